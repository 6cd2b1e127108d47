"""More advantages than the group's mean gives: each is the group's advantage with another weight, baseline or set.

As in `advantages`: one reward per sequence and the group each belongs to, statistics in float64, no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from rlite.algorithms.actions import ActionTokens, discounted_suffix_sums
from rlite.algorithms.advantages import (
    Singleton,
    as_advantages,
    group_advantages,
    group_indices,
    normalize_rewards,
    sum_over_set,
)
from rlite.errors import ConfigError


def gpg_advantages(
    rewards: Float[Tensor, " sequences"], group_ids: Int[Tensor, " sequences"], *, singleton: Singleton = "zero"
) -> Float[Tensor, " sequences"]:
    """A = alpha (R - mean(group)), alpha = N / number of sequences whose reward is not 0. GPG, arXiv:2504.02546.

    alpha makes up for groups in which nobody succeeds, which count in the batch's mean and have no gradient.
    """
    alpha = len(rewards) / rewards.count_nonzero().clamp(min=1)
    return alpha * group_advantages(rewards, group_ids, singleton=singleton)


@torch.no_grad()
def opo_advantages(
    rewards: Float[Tensor, " sequences"],
    group_ids: Int[Tensor, " sequences"],
    *,
    lengths: Shaped[Tensor, " sequences"],
    singleton: Singleton = "zero",
) -> Float[Tensor, " sequences"]:
    """A = R - sum(l R) / sum(l) over the group, l the number of action tokens. OPO, arXiv:2505.23585.

    The baseline of least variance where the squared norm of a response's gradient grows with its length. A group
    without a token has advantage 0.
    """
    groups = group_indices(rewards, group_ids)
    scores, weight = rewards.double(), lengths.double()
    total = sum_over_set(weight, groups)
    # a weighted mean of differences, so that equal rewards give exactly 0
    centre = group_advantages(scores, group_ids)
    advantages = centre - sum_over_set(weight * centre, groups) / total.clamp(min=1)
    advantages = torch.where(total > 0, advantages, 0.0)
    if singleton == "raw":
        advantages = torch.where(sum_over_set(torch.ones_like(scores), groups) == 1, scores, advantages)
    return as_advantages(advantages, rewards)


@torch.no_grad()
def pass_at_k_advantages(
    rewards: Float[Tensor, " sequences"],
    group_ids: Int[Tensor, " sequences"],
    *,
    norm_std: bool = False,
    eps: float = 1e-6,
) -> Float[Tensor, " sequences"]:
    """A = R - second best of the group for the best alone, 0 for the others and where two are the best.

    The leave-one-out advantage of the objective max(group), pass@k for k the group's size (arXiv:2503.19595); with
    `norm_std` divided by (std(group) + eps). A group of one has advantage 0.
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


@torch.no_grad()
def gdpo_advantages(
    rewards: Float[Tensor, "kinds sequences"],
    group_ids: Int[Tensor, " sequences"],
    *,
    weights: Sequence[float] | None = None,
    eps: float = 1e-6,
    batch_norm: bool = True,
) -> Float[Tensor, " sequences"]:
    """A = sum over kinds of reward k of weights[k] (R_k - mean(group)) / (std(group) + eps), then (A - mean) /
    (std + eps) over the batch. GDPO, arXiv:2601.05242.

    Each kind is normalised by itself, so that one with a large spread does not drown the others. `weights` are 1 by
    default. To normalise over tokens instead of sequences, leave `batch_norm` out and whiten
    (`masked_whiten(to_tokens(A, mask), mask)`).

    Raises: ConfigError where the number of weights is not that of kinds.
    """
    weights = [1.0] * len(rewards) if weights is None else weights
    if len(weights) != len(rewards):
        raise ConfigError(f"{len(weights)} weights for {len(rewards)} kinds of reward")
    total = torch.zeros(rewards.shape[1], dtype=torch.float64, device=rewards.device)
    for weight, reward in zip(weights, rewards, strict=True):
        total += weight * group_advantages(reward.double(), group_ids, norm_std=True, eps=eps)
    if batch_norm:
        total = normalize_rewards(total, group_ids, mean="batch", std="batch", eps=eps)
    return as_advantages(total, rewards)


@torch.no_grad()
def optimal_token_advantages(
    rewards: Float[Tensor, "*tokens"],
    logprobs: Float[Tensor, "*tokens"],
    sum_pi_squared: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    group_ids: Int[Tensor, " sequences"],
    *,
    importance_weights: Float[Tensor, "*tokens"] | None = None,
    zero_tail: bool = True,
    eps: float = 1e-8,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> Float[Tensor, "*tokens"]:
    """A_t = G_t - B_t, with the baseline of least variance at each position t of a group. The Optimal Token Baseline
    (Li et al., ICML 2026).

    G_t is the reward still to come, w_t = 1 - 2 pi(token) + sum over the vocabulary of pi^2 the squared norm of the
    logits' gradient (times the squared importance weight), W_t = w_1 + ... + w_t, and
    B_t = sum(G_t W_t) / (sum(W_t) + eps) over the members of the group that act at t; t counts action tokens. A group
    of one has no baseline; nor, with `zero_tail`, has the longest sequence after the second longest has ended: its
    baseline there would be its own return.
    """
    actions = ActionTokens.of(mask, cu_seqlens)
    returns = discounted_suffix_sums(actions.table(rewards), 1.0)
    acts = actions.table(torch.ones_like(rewards))
    energy = 1 - 2 * logprobs.double().exp() + sum_pi_squared.double()
    if importance_weights is not None:
        energy = energy * importance_weights.double().square()
    path = actions.table(energy).cumsum(1) * acts
    groups = group_indices(returns.new_zeros(len(returns)), group_ids)
    baseline = sum_over_set(returns * path, groups) / (sum_over_set(path, groups) + eps)
    is_alone = sum_over_set(acts.any(1).double(), groups)[:, None] == 1
    if zero_tail:
        is_alone = is_alone | (sum_over_set(acts, groups) == 1)
    advantages = returns - torch.where(is_alone, 0.0, baseline)
    return as_advantages(actions.tokens(advantages), rewards)


def _max_over_set(x: Float[Tensor, " sequences"], ids: Int[Tensor, " sequences"]) -> Float[Tensor, " sequences"]:
    """Each member's largest over its set."""
    return torch.zeros_like(x).scatter_reduce(0, ids, x, "amax", include_self=False)[ids]
