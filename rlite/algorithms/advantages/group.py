"""Compute advantages of outcomes: one reward per sequence, and the group to which each sequence belongs.

Statistics are computed in float64. In float32 the mean of eight rewards of 0.7 is not 0.7, and the rounding error
divided by itself looks like an advantage. Equal rewards give exactly 0. No function here carries a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rlite.algorithms.advantages.base import register_advantage
from rlite.algorithms.shapes import GroupIds, Sequences
from rlite.errors import ConfigError

Level = Literal["group", "batch"]
Singleton = Literal["zero", "raw"]


@register_advantage("dr_grpo")
def group_advantages(
    rewards: Sequences,
    group_ids: GroupIds,
    *,
    norm_std: bool = False,
    eps: float = 1e-6,
    unbiased: bool = True,
    singleton: Singleton = "zero",
) -> Sequences:
    """Return the advantage of every sequence over the mean of its group.

    A = R - mean(group), with `norm_std` divided by (std(group) + eps). Without `norm_std` it is the baseline of Dr.
    GRPO (arXiv:2503.20783), with `norm_std` the advantage of GRPO (arXiv:2402.03300).

    With one response per prompt, give all sequences one id. The baseline is then the batch mean.

    Args:
        rewards: one per sequence, `[N]`.
        group_ids: equal for the responses to one prompt, `[N]`; groups may have any size and order.
        norm_std: divide by the standard deviation of the group.
        eps: added to the standard deviation.
        unbiased: divide the variance by n - 1 instead of n.
        singleton: advantage of a group of one: "zero", or its reward, "raw".
    """
    std: Level | None = "group" if norm_std else None
    return normalize_rewards(rewards, group_ids, std=std, unbiased=unbiased, eps=eps, singleton=singleton)


register_advantage("grpo")(partial(group_advantages, norm_std=True))


@register_advantage("rloo")
def rloo_advantages(rewards: Sequences, group_ids: GroupIds, *, singleton: Singleton = "zero") -> Sequences:
    """Return RLOO's advantage of every sequence.

    A = R - mean of the others of the group = n / (n - 1) (R - mean(group)). RLOO, arXiv:2402.14740.

    Args:
        rewards: one per sequence, `[N]`.
        group_ids: equal for the responses to one prompt, `[N]`.
        singleton: advantage of a group of one: "zero", or its reward, "raw".
    """
    return normalize_rewards(rewards, group_ids, leave_one_out=True, singleton=singleton)


def remax_advantages(rewards: Sequences, greedy_rewards: Sequences) -> Sequences:
    """Return ReMax's advantage of every sequence.

    A = R - R(greedy response to the same prompt). ReMax, arXiv:2310.10505.
    """
    return rewards - greedy_rewards


@register_advantage("remax", needs=("greedy_rewards",))
def _remax(rewards: Tensor, group_ids: Tensor, *, greedy_rewards: Tensor) -> Tensor:
    return remax_advantages(rewards, greedy_rewards)


@register_advantage("normalized")
@torch.no_grad()
def normalize_rewards(
    rewards: Sequences,
    group_ids: GroupIds,
    *,
    mean: Level | None = "group",
    std: Level | None = None,
    leave_one_out: bool = False,
    unbiased: bool = True,
    std_about: Literal["baseline", "own_mean"] = "baseline",
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> Sequences:
    """Return normalised rewards as the advantage of every sequence.

    A = (R - mean) / (std + eps), the family to which GRPO, Dr. GRPO and RLOO belong.

    Args:
        rewards: one per sequence, `[N]`.
        group_ids: equal for the responses to one prompt, `[N]`.
        mean: "group" or "batch"; None subtracts no mean.
        std: "group" or "batch"; None does not divide.
        leave_one_out: leave the sequence itself out of the mean.
        unbiased: divide the variance by n - 1 instead of n.
        std_about: point from which the deviation is measured: the baseline that was subtracted, or the mean of the
            level that `std` names.
        eps: added to the deviation.
        singleton: "raw" gives a group of one its reward unchanged. "zero" applies the formula, 0 with mean "group".

    Raises:
        ConfigError: rewards and group_ids are not both `[N]`.
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
    return as_advantages(_with_singletons(centred, scores, groups, singleton), rewards)


@register_advantage("gpg")
def gpg_advantages(rewards: Sequences, group_ids: GroupIds, *, singleton: Singleton = "zero") -> Sequences:
    """Return GPG's advantage of every sequence.

    A = alpha (R - mean(group)), alpha = N / number of sequences whose reward is not 0. GPG, arXiv:2504.02546.

    alpha compensates for groups without success, which count in the batch's mean and have no gradient.

    Args:
        rewards: one per sequence, `[N]`.
        group_ids: equal for the responses to one prompt, `[N]`.
        singleton: advantage of a group of one before alpha: "zero", or its reward, "raw".
    """
    alpha = len(rewards) / rewards.count_nonzero().clamp(min=1)
    return alpha * group_advantages(rewards, group_ids, singleton=singleton)


@register_advantage("opo", needs=("lengths",))
@torch.no_grad()
def opo_advantages(
    rewards: Sequences, group_ids: GroupIds, *, lengths: Shaped[Tensor, " sequences"], singleton: Singleton = "zero"
) -> Sequences:
    """Return OPO's advantage of every sequence.

    A = R - sum(l R) / sum(l) over the group, l the number of action tokens. OPO, arXiv:2505.23585.

    The baseline has the least variance if the squared norm of a response's gradient grows with its length.

    Args:
        rewards: one per sequence, `[N]`.
        group_ids: equal for the responses to one prompt, `[N]`.
        lengths: action tokens of each sequence, `[N]`. A group without a token has advantage 0.
        singleton: advantage of a group of one: "zero", or its reward, "raw".
    """
    groups = group_indices(rewards, group_ids)
    scores, weight = rewards.double(), lengths.double()
    total = sum_over_set(weight, groups)
    # a weighted mean of differences, so that equal rewards give exactly 0
    centre = group_advantages(scores, group_ids)
    advantages = centre - sum_over_set(weight * centre, groups) / total.clamp(min=1)
    advantages = torch.where(total > 0, advantages, 0.0)
    return as_advantages(_with_singletons(advantages, scores, groups, singleton), rewards)


@register_advantage("pass_at_k")
@torch.no_grad()
def pass_at_k_advantages(
    rewards: Sequences, group_ids: GroupIds, *, norm_std: bool = False, eps: float = 1e-6
) -> Sequences:
    """Return pass@k's leave-one-out advantage of every sequence.

    A = R - second best of the group for the single best response, 0 for all others. If two share the best reward, A = 0
    for both. The objective is max(group), pass@k with k the group's size (arXiv:2503.19595).

    Args:
        rewards: one per sequence, `[N]`.
        group_ids: equal for the responses to one prompt, `[N]`. A group of one has advantage 0.
        norm_std: divide by (std(group) + eps).
        eps: added to the standard deviation.
    """
    groups = group_indices(rewards, group_ids)
    scores = rewards.double()
    is_best = scores == _max_over_set(scores, groups)
    second = _max_over_set(scores.masked_fill(is_best, -torch.inf), groups)
    is_alone_best = is_best & (sum_over_set(is_best.double(), groups) == 1) & second.isfinite()
    advantages = torch.where(is_alone_best, scores - second, 0.0)
    if norm_std:
        count = sum_over_set(torch.ones_like(scores), groups)
        distance = group_advantages(scores, group_ids)
        deviation = (sum_over_set(distance.square(), groups) / (count - 1).clamp(min=1)).sqrt()
        advantages = advantages / (deviation + eps)
    return as_advantages(advantages, rewards)


@register_advantage("gdpo")
@torch.no_grad()
def gdpo_advantages(
    rewards: Float[Tensor, "kinds sequences"],
    group_ids: GroupIds,
    *,
    weights: Sequence[float] | None = None,
    eps: float = 1e-6,
    batch_norm: bool = True,
) -> Sequences:
    """Return GDPO's advantage of every sequence.

    A = sum over kinds of reward k of weights[k] (R_k - mean(group)) / (std(group) + eps).

    The sum is then normalised over the batch, (A - mean) / (std + eps). GDPO, arXiv:2601.05242.

    Each kind is normalised separately, so a kind with a large spread does not dominate the others.

    Args:
        rewards: one row per kind of reward, `[K, N]`. A reward that does not count is NaN, and adds nothing.
        group_ids: equal for the responses to one prompt, `[N]`.
        weights: one per kind; default: 1.
        eps: added to standard deviations.
        batch_norm: normalise the sum over the batch. To normalise over tokens instead, turn it off and whiten:
            `masked_whiten(to_tokens(A, mask), mask)`.

    Raises:
        ConfigError: the number of weights differs from the number of kinds.
    """
    weights = [1.0] * len(rewards) if weights is None else weights
    if len(weights) != len(rewards):
        raise ConfigError(f"{len(weights)} weights for {len(rewards)} kinds of reward")
    total = torch.zeros(rewards.shape[1], dtype=torch.float64, device=rewards.device)
    for weight, reward in zip(weights, rewards, strict=True):
        counts = reward.isfinite()
        scores = reward[counts].double()
        total[counts] += weight * group_advantages(scores, group_ids[counts], norm_std=True, eps=eps)
    if batch_norm:
        total = normalize_rewards(total, group_ids, mean="batch", std="batch", eps=eps)
    return as_advantages(total, rewards)


def group_indices(rewards: Shaped[Tensor, " sequences"], group_ids: GroupIds) -> Int[Tensor, " sequences"]:
    """Return the number of each sequence's group, counted from 0, `[N]`.

    Args:
        rewards: one per sequence, `[N]`.
        group_ids: equal for the responses to one prompt, `[N]`.

    Raises:
        ConfigError: rewards and group_ids are not both `[N]`.
    """
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ConfigError(
            f"expected rewards [N] and group_ids [N], found {list(rewards.shape)}, {list(group_ids.shape)}"
        )
    return torch.unique(group_ids, return_inverse=True)[1]


def sum_over_set(x: Float[Tensor, "sequences *any"], ids: Int[Tensor, " sequences"]) -> Float[Tensor, "sequences *any"]:
    """Return for each member the sum over its set. `ids` number the sets from 0."""
    return torch.zeros_like(x).index_add(0, ids, x)[ids]


def as_advantages(wide: Float[Tensor, "*any"], rewards: Shaped[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return float64 values in the rewards' dtype, or in float32 for whole-number rewards."""
    return wide.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def _with_singletons(advantages: Tensor, scores: Tensor, groups: Tensor, singleton: Singleton) -> Tensor:
    if singleton == "zero":
        return advantages
    return torch.where(sum_over_set(torch.ones_like(scores), groups) == 1, scores, advantages)


def _max_over_set(x: Sequences, ids: Int[Tensor, " sequences"]) -> Sequences:
    return torch.zeros_like(x).scatter_reduce(0, ids, x, "amax", include_self=False)[ids]


def _are_equal_in_set(x: Sequences, ids: Int[Tensor, " sequences"]) -> Bool[Tensor, " sequences"]:
    return _max_over_set(x, ids) == -_max_over_set(-x, ids)
