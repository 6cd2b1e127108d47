"""Compute further advantages of outcomes: one reward per sequence, and the group to which each sequence belongs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlite.algorithms.advantages import group
from rlite.algorithms.advantages.group import Singleton, register_advantage
from rlite.algorithms.shapes import GroupIds, Sequences
from rlite.errors import ConfigError


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
    std: group.Level | None = "group" if norm_std else None
    return group.normalize_rewards(rewards, group_ids, std=std, unbiased=unbiased, eps=eps, singleton=singleton)


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
    return group.normalize_rewards(rewards, group_ids, leave_one_out=True, singleton=singleton)


def remax_advantages(rewards: Sequences, greedy_rewards: Sequences) -> Sequences:
    """Return ReMax's advantage of every sequence.

    A = R - R(greedy response to the same prompt). ReMax, arXiv:2310.10505.
    """
    return rewards - greedy_rewards


@register_advantage("remax", needs=("greedy_rewards",))
def _remax(rewards: Tensor, group_ids: Tensor, *, greedy_rewards: Tensor) -> Tensor:
    return remax_advantages(rewards, greedy_rewards)


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
    groups = group.group_indices(rewards, group_ids)
    scores, weight = rewards.double(), lengths.double()
    total = group.sum_over_set(weight, groups)
    # a weighted mean of differences, so that equal rewards give exactly 0
    centre = group_advantages(scores, group_ids)
    advantages = centre - group.sum_over_set(weight * centre, groups) / total.clamp(min=1)
    advantages = torch.where(total > 0, advantages, 0.0)
    return group.as_advantages(group.with_singletons(advantages, scores, groups, singleton), rewards)


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
    groups = group.group_indices(rewards, group_ids)
    scores = rewards.double()
    is_best = scores == group.max_over_set(scores, groups)
    second = group.max_over_set(scores.masked_fill(is_best, -torch.inf), groups)
    is_alone_best = is_best & (group.sum_over_set(is_best.double(), groups) == 1) & second.isfinite()
    advantages = torch.where(is_alone_best, scores - second, 0.0)
    if norm_std:
        count = group.sum_over_set(torch.ones_like(scores), groups)
        distance = group_advantages(scores, group_ids)
        deviation = (group.sum_over_set(distance.square(), groups) / (count - 1).clamp(min=1)).sqrt()
        advantages = advantages / (deviation + eps)
    return group.as_advantages(advantages, rewards)


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
        total = group.normalize_rewards(total, group_ids, mean="batch", std="batch", eps=eps)
    return group.as_advantages(total, rewards)


def is_of_group_alone(estimator: str | group.AdvantageFunction, options: Mapping[str, Any], group_size: int) -> bool:
    """Return whether a group's advantages depend only on this group, and are 0 if its rewards are equal.

    The estimator is run on examples, so the answer also holds for user-defined functions.

    Args:
        estimator: a name of `ADVANTAGES`, or a function with the same signature.
        options: keyword arguments of the estimator.
        group_size: sequences in a group, at least 2.

    Raises:
        ConfigError: the estimator returns something else than one advantage for each sequence.
        OwnCodeError: the estimator is the user's, and raised an exception.
    """
    mixed = torch.arange(group_size) % 2
    groups = torch.stack([torch.full_like(mixed, value) for value in (0, 1, -2)] + [mixed, 3 * mixed - 1]).double()
    lengths = torch.arange(1, groups.numel() + 1).view(groups.shape)

    def advantages(chosen: slice) -> Tensor:
        ids = torch.arange(len(groups))[chosen].repeat_interleave(group_size)
        rewards, counts = groups[chosen].flatten(), lengths[chosen].flatten()
        return group.outcome_advantages(estimator, rewards, ids, lengths=counts, options=options, is_example=True)

    together = advantages(slice(None))
    alone = torch.cat([advantages(slice(number, number + 1)) for number in range(len(groups))])
    return torch.allclose(together, alone) and not together[: 3 * group_size].any()
