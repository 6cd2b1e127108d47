"""Compute advantages, returns and rewards of tokens: packed `[T]` + `cu_seqlens`, or padded `[B, L]`.

Estimators step over action tokens only. They skip holes in the mask, such as an environment's tokens. Statistics are
computed in float64. No function here carries a gradient.
"""

from __future__ import annotations

import torch

from rlite.algorithms.advantages import group
from rlite.algorithms.advantages.outcomes import group_advantages
from rlite.algorithms.logprobs import kl_penalty
from rlite.algorithms.reduce import masked_mean, masked_variance, sequence_sums, to_tokens
from rlite.algorithms.shapes import CuSeqlens, GroupIds, Mask, Tokens
from rlite.types import KLEstimator


def discounted_suffix_sums(x: group.ActionTable, factor: float) -> group.ActionTable:
    """Return S_t = x_t + factor S_{t+1} along the columns, in log2(columns) steps.

    The sums are computed by doubling: S^{2n}_t = S^n_t + factor^n S^n_{t+n}.

    `x`: values, `[rows, columns]`.
    """
    step = 1
    while step < x.shape[1]:
        x = x + torch.nn.functional.pad(x[:, step:], (0, step)) * factor**step
        step *= 2
    return x


@torch.no_grad()
def gae(
    rewards: Tokens,
    values: Tokens,
    mask: Mask,
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    cu_seqlens: CuSeqlens | None = None,
) -> tuple[Tokens, Tokens]:
    """Return advantages and returns by generalised advantage estimation, both 0 outside of the mask.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1},  return_t = A_t + V_t
    (arXiv:1506.02438, eq. 16). t + 1 is the next action token. Environment tokens in between are skipped, and their
    rewards and values are dropped. After the last action token V and A are 0, without bootstrapping.

    Args:
        rewards: reward of each token, `[T]` or `[B, L]`.
        values: V of the state in which each token was chosen.
        mask: action tokens.
        gamma: discount per action token.
        lam: lambda; 1 relies only on rewards, 0 on values.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
    """
    actions = group.ActionTokens.of(mask, cu_seqlens)
    r, v = actions.table(rewards), actions.table(values)
    next_v = torch.nn.functional.pad(v[:, 1:], (0, 1)) if v.shape[1] else v
    advantages = discounted_suffix_sums(r + gamma * next_v - v, gamma * lam)
    dtype = torch.promote_types(values.dtype, torch.float32)
    return actions.tokens(advantages).to(dtype), actions.tokens(advantages + v).to(dtype)


@torch.no_grad()
def discounted_returns(
    rewards: Tokens, mask: Mask, gamma: float = 1.0, *, cu_seqlens: CuSeqlens | None = None
) -> Tokens:
    """Return G_t = r_t + gamma G_{t+1} over action tokens, 0 outside of the mask.

    Args:
        rewards: reward of each token, `[T]` or `[B, L]`.
        mask: action tokens.
        gamma: discount per action token.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
    """
    actions = group.ActionTokens.of(mask, cu_seqlens)
    returns = discounted_suffix_sums(actions.table(rewards), gamma)
    return actions.tokens(returns).to(torch.promote_types(rewards.dtype, torch.float32))


def reinforce_pp_advantages(
    rewards: Tokens,
    mask: Mask,
    gamma: float = 1.0,
    *,
    group_ids: GroupIds | None = None,
    singleton: group.Singleton = "zero",
    cu_seqlens: CuSeqlens | None = None,
) -> Tokens:
    """Return discounted returns, whitened over all action tokens of the batch. REINFORCE++, arXiv:2501.03262.

    Args:
        rewards: reward of each token, `[T]` or `[B, L]`.
        mask: action tokens.
        gamma: discount per action token; without effect with `group_ids`.
        group_ids: choose the variant with a baseline, `[N]`. Each action token then has its sequence's total reward
            less the group's mean, whitened in the same way.
        singleton: advantage of a group of one before whitening: "zero", or its reward, "raw".
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
    """
    if group_ids is None:
        unscaled = discounted_returns(rewards, mask, gamma, cu_seqlens=cu_seqlens)
    else:
        totals = sequence_sums(rewards.double(), torch.ones_like(mask), cu_seqlens)
        unscaled = to_tokens(group_advantages(totals, group_ids, singleton=singleton), mask, cu_seqlens)
    return masked_whiten(unscaled, mask).to(torch.promote_types(rewards.dtype, torch.float32))


@torch.no_grad()
def masked_whiten(
    x: Tokens, mask: Mask, *, shift_mean: bool = True, unbiased: bool = True, eps: float = 1e-8
) -> Tokens:
    """Return (x - mean) / sqrt(var + eps) over the mask, 0 elsewhere.

    Args:
        x: values, of any shape.
        mask: elements that count, of the same shape.
        shift_mean: subtract the mean; otherwise it is kept.
        unbiased: divide the variance by n - 1 instead of n.
        eps: added to the variance.
    """
    wide = x.double()
    mean = masked_mean(wide, mask)
    white = (wide - mean) * (masked_variance(wide, mask, unbiased=unbiased) + eps).rsqrt()
    if not shift_mean:
        white = white + mean
    return torch.where(mask.bool(), white, 0.0).to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def kl_shaped_rewards(
    rewards: Tokens, logprobs: Tokens, ref_logprobs: Tokens, mask: Mask, coef: float, *, estimator: KLEstimator = "k1"
) -> Tokens:
    """Return r_t - coef KL_t over the mask, 0 elsewhere. RLHF, arXiv:2203.02155 (eq. 2, there with k1).

    Args:
        rewards: reward of each token, `[T]` or `[B, L]`.
        logprobs: log-probabilities under the policy.
        ref_logprobs: log-probabilities under the reference.
        mask: tokens that count.
        coef: weight of the KL.
        estimator: estimator of the KL at a token.
    """
    return torch.where(mask.bool(), rewards - coef * kl_penalty(logprobs, ref_logprobs, estimator), 0.0)


@torch.no_grad()
def optimal_token_advantages(
    rewards: Tokens,
    logprobs: Tokens,
    sum_pi_squared: Tokens,
    mask: Mask,
    group_ids: GroupIds,
    *,
    importance_weights: Tokens | None = None,
    zero_tail: bool = True,
    eps: float = 1e-8,
    cu_seqlens: CuSeqlens | None = None,
) -> Tokens:
    """Return the advantage of every token over the Optimal Token Baseline (Li et al., ICML 2026).

    A_t = G_t - B_t, with the baseline of least variance at each position t of a group. G_t is the reward still to come.
    w_t = 1 - 2 pi(token) + sum over the vocabulary of pi^2 is the squared norm of the logits' gradient.
    W_t = w_1 + ... + w_t. B_t = sum(G_t W_t) / (sum(W_t) + eps) over the members of the group that act at t. t counts
    action tokens.

    Args:
        rewards: reward of each token, `[T]` or `[B, L]`.
        logprobs: log pi(token).
        sum_pi_squared: sum of pi^2 over the vocabulary, from the function of this name.
        mask: action tokens.
        group_ids: equal for the responses to one prompt, `[N]`. A group of one has no baseline.
        importance_weights: their squares multiply w_t.
        zero_tail: use no baseline for the longest sequence after the second longest has ended. The baseline there would
            be the sequence's own return.
        eps: added to sums of W_t.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
    """
    actions = group.ActionTokens.of(mask, cu_seqlens)
    returns = discounted_suffix_sums(actions.table(rewards), 1.0)
    acts = actions.table(torch.ones_like(rewards))
    energy = 1 - 2 * logprobs.double().exp() + sum_pi_squared.double()
    if importance_weights is not None:
        energy = energy * importance_weights.double().square()
    path = actions.table(energy).cumsum(1) * acts
    groups = group.group_indices(returns.new_zeros(len(returns)), group_ids)
    baseline = group.sum_over_set(returns * path, groups) / (group.sum_over_set(path, groups) + eps)
    is_alone = group.sum_over_set(acts.any(1).double(), groups)[:, None] == 1
    if zero_tail:
        is_alone = is_alone | (group.sum_over_set(acts, groups) == 1)
    return group.as_advantages(actions.tokens(returns - torch.where(is_alone, 0.0, baseline)), rewards)
