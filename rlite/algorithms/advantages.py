"""Advantages. Outcome estimators take one reward per sequence and the group each belongs to; token estimators take
packed `[T]` + `cu_seqlens` or padded `[B, L]` and step over action tokens only (masked holes are skipped).

Statistics are computed in float64: in float32 the mean of eight rewards of 0.7 is not 0.7, and the rounding divided
by itself looks like an advantage. Equal rewards give exactly 0. Nothing here carries a gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rlite.algorithms.actions import ActionTokens, discounted_suffix_sums
from rlite.algorithms.reduce import masked_mean, masked_variance, sequence_sums, to_tokens
from rlite.errors import ConfigError

Level = Literal["group", "batch"]
Singleton = Literal["zero", "raw"]


def group_advantages(
    rewards: Float[Tensor, " sequences"],
    group_ids: Int[Tensor, " sequences"],
    *,
    norm_std: bool = False,
    eps: float = 1e-6,
    unbiased: bool = True,
    singleton: Singleton = "zero",
) -> Float[Tensor, " sequences"]:
    """A = R - mean(group), the baseline of Dr. GRPO (arXiv:2503.20783); with `norm_std` divided by
    (std(group) + eps), GRPO (arXiv:2402.03300).

    Groups are equal ids in any order and of any size. A group of one has advantage 0, or its raw reward with
    `singleton="raw"`. With one response per prompt, give all sequences one id: the batch mean is then the baseline.
    """
    return normalize_rewards(
        rewards, group_ids, std="group" if norm_std else None, unbiased=unbiased, eps=eps, singleton=singleton
    )


def rloo_advantages(
    rewards: Float[Tensor, " sequences"], group_ids: Int[Tensor, " sequences"], *, singleton: Singleton = "zero"
) -> Float[Tensor, " sequences"]:
    """A = R - mean of the others of the group = n / (n - 1) (R - mean(group)). RLOO, arXiv:2402.14740."""
    return normalize_rewards(rewards, group_ids, leave_one_out=True, singleton=singleton)


def remax_advantages(
    rewards: Float[Tensor, " sequences"], greedy_rewards: Float[Tensor, " sequences"]
) -> Float[Tensor, " sequences"]:
    """A = R - R(greedy response to the same prompt). ReMax, arXiv:2310.10505."""
    return rewards - greedy_rewards


@torch.no_grad()
def normalize_rewards(
    rewards: Float[Tensor, " sequences"],
    group_ids: Int[Tensor, " sequences"],
    *,
    mean: Level | None = "group",
    std: Level | None = None,
    leave_one_out: bool = False,
    unbiased: bool = True,
    std_about: Literal["baseline", "own_mean"] = "baseline",
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> Float[Tensor, " sequences"]:
    """(R - mean) / (std + eps), each over the group or the whole batch; the family of which GRPO, Dr. GRPO and RLOO
    are members.

    `std` is the root mean square distance over n - 1 (unbiased) or n, from the baseline that was used, or with
    `std_about="own_mean"` from the mean of the level that `std` names. None leaves a part out. A group of one member
    gives what the formula says, 0 for the group's mean, or with `singleton="raw"` its reward as it is.
    """
    groups = group_indices(rewards, group_ids)
    levels = {"group": groups, "batch": torch.zeros_like(groups)}
    scores = rewards.double()
    centred = scores
    if mean is not None:
        ids = levels[mean]
        count, total = sum_over_set(torch.ones_like(scores), ids), sum_over_set(scores, ids)
        baseline = (total - scores) / (count - 1).clamp(min=1) if leave_one_out else total / count
        centred = torch.where(_are_equal_in_set(scores, ids), 0.0, scores - baseline)
    if std is not None:
        ids = levels[std]
        count = sum_over_set(torch.ones_like(scores), ids)
        distance = centred if std_about == "baseline" else scores - sum_over_set(scores, ids) / count
        variance = sum_over_set(distance.square(), ids) / (count - int(unbiased)).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    if singleton == "raw":
        centred = torch.where(sum_over_set(torch.ones_like(scores), groups) == 1, scores, centred)
    return as_advantages(centred, rewards)


@torch.no_grad()
def gae(
    rewards: Float[Tensor, "*tokens"],
    values: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> tuple[Float[Tensor, "*tokens"], Float[Tensor, "*tokens"]]:
    """Advantages and returns, both 0 where the mask is 0.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1},  return_t = A_t + V_t
    (arXiv:1506.02438, eq. 16), where t + 1 is the next action token: environment tokens in between are skipped, their
    rewards and values dropped. After the last action token V and A are 0; nothing is bootstrapped.
    """
    actions = ActionTokens.of(mask, cu_seqlens)
    r, v = actions.table(rewards), actions.table(values)
    next_v = torch.nn.functional.pad(v[:, 1:], (0, 1)) if v.shape[1] else v
    advantages = discounted_suffix_sums(r + gamma * next_v - v, gamma * lam)
    dtype = torch.promote_types(values.dtype, torch.float32)
    return actions.tokens(advantages).to(dtype), actions.tokens(advantages + v).to(dtype)


@torch.no_grad()
def discounted_returns(
    rewards: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    gamma: float = 1.0,
    *,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> Float[Tensor, "*tokens"]:
    """G_t = r_t + gamma G_{t+1} over action tokens, 0 where the mask is 0."""
    actions = ActionTokens.of(mask, cu_seqlens)
    returns = discounted_suffix_sums(actions.table(rewards), gamma)
    return actions.tokens(returns).to(torch.promote_types(rewards.dtype, torch.float32))


def reinforce_pp_advantages(
    rewards: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    gamma: float = 1.0,
    *,
    group_ids: Int[Tensor, " sequences"] | None = None,
    singleton: Singleton = "zero",
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> Float[Tensor, "*tokens"]:
    """Returns, whitened over all action tokens of the batch. REINFORCE++, arXiv:2501.03262.

    With `group_ids` it is the variant with a baseline: each sequence's total reward less its group's mean, on each of
    its action tokens (`gamma` has no part in it), whitened in the same way.
    """
    if group_ids is None:
        unscaled = discounted_returns(rewards, mask, gamma, cu_seqlens=cu_seqlens)
    else:
        totals = sequence_sums(rewards.double(), torch.ones_like(mask), cu_seqlens)
        unscaled = to_tokens(group_advantages(totals, group_ids, singleton=singleton), mask, cu_seqlens)
    whitened = masked_whiten(unscaled, mask)
    return whitened.to(torch.promote_types(rewards.dtype, torch.float32))


@torch.no_grad()
def masked_whiten(
    x: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    *,
    shift_mean: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
) -> Float[Tensor, "*tokens"]:
    """(x - mean) / sqrt(var + eps) over the masked-in tokens, 0 elsewhere; without `shift_mean` the mean is kept."""
    wide = x.double()
    mean = masked_mean(wide, mask)
    white = (wide - mean) * (masked_variance(wide, mask, unbiased=unbiased) + eps).rsqrt()
    if not shift_mean:
        white = white + mean
    return torch.where(mask.bool(), white, 0.0).to(torch.promote_types(x.dtype, torch.float32))


def group_indices(
    rewards: Shaped[Tensor, " sequences"], group_ids: Int[Tensor, " sequences"]
) -> Int[Tensor, " sequences"]:
    """The groups numbered from 0. Raises ConfigError where the shapes are not those of one reward per sequence."""
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ConfigError(
            f"expected rewards [N] and group_ids [N], found {list(rewards.shape)}, {list(group_ids.shape)}"
        )
    return torch.unique(group_ids, return_inverse=True)[1]


def sum_over_set(x: Float[Tensor, "sequences *any"], ids: Int[Tensor, " sequences"]) -> Float[Tensor, "sequences *any"]:
    """Each member's sum over its set, of which `ids` give the number from 0."""
    return torch.zeros_like(x).index_add(0, ids, x)[ids]


def as_advantages(wide: Float[Tensor, "*any"], rewards: Shaped[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Out of float64 to the rewards' type, or float32 for whole numbers."""
    return wide.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def _are_equal_in_set(x: Float[Tensor, " sequences"], ids: Int[Tensor, " sequences"]) -> Bool[Tensor, " sequences"]:
    zeros = torch.zeros_like(x)
    lowest = zeros.scatter_reduce(0, ids, x, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, ids, x, "amax", include_self=False)
    return (lowest == highest)[ids]
