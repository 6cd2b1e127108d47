"""Correct for tokens sampled by another policy: bounded weights, rejection masks and metrics of the distance.

The sampler differs from the policy that is trained, because the inference engine rounds differently. In asynchronous
training its weights are also older. Weights and masks are constants without a gradient. Weights are 0 outside of the
mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rlite.algorithms import reduce
from rlite.algorithms.logprobs import MAX_LOG_RATIO, Scope, is_occupied, kl_penalty
from rlite.algorithms.shapes import CuSeqlens, Flags, Mask, Scalar, Tokens
from rlite.errors import ConfigError
from rlite.registry import check_options

BinaryDivergence = Literal["tv", "kl"]
Metric = Literal["ratio", "k1", "k2", "k3", "tv", "binary_kl"]
Over = Literal["mean", "sum", "max"]
_SMALLEST_REST = 1e-8


class BehaviourWeights(NamedTuple):
    """Per-token weights and the effect of the bounds. Losses are still averaged over the original mask."""

    weights: Tokens
    kept: Flags
    """tokens of the mask that no bound removed"""
    changed: Flags
    """tokens that a bound removed or clamped"""


def binary_divergence(logprobs: Tokens, other_logprobs: Tokens, divergence: BinaryDivergence) -> Tokens:
    """Return the divergence of (p, 1 - p) from (q, 1 - q), a lower bound of the divergence over all tokens.

    Args:
        logprobs: log p of the sampled token, `[T]` or `[B, L]`.
        other_logprobs: log q of the sampled token.
        divergence: "tv" is the total variation |p - q|; "kl" is p log(p / q) + (1 - p) log((1 - p) / (1 - q)).
    """
    logprobs = reduce.finite_gradient(logprobs, other_logprobs)
    other_logprobs = reduce.finite_gradient(other_logprobs, logprobs)
    p = logprobs.exp()
    if divergence == "tv":
        return (p - other_logprobs.exp()).abs()
    rest, other_rest = -logprobs.expm1(), -other_logprobs.expm1()
    # nothing is left where a policy is certain: the logarithm is kept finite
    log_rest_ratio = torch.log(rest.clamp(min=_SMALLEST_REST) / other_rest.clamp(min=_SMALLEST_REST))
    return p * (logprobs - other_logprobs) + rest * log_rest_ratio


@torch.no_grad()
def behaviour_weights(
    proximal_logprobs: Tokens,
    behaviour_logprobs: Tokens,
    mask: Mask,
    *,
    upper: float,
    lower: float | None = None,
    metric: Metric = "ratio",
    scope: Scope = "token",
    action: Literal["mask", "clamp"] = "clamp",
    over: Over = "mean",
    token_weights: bool = False,
    cu_seqlens: CuSeqlens | None = None,
) -> BehaviourWeights:
    """Return b = exp(proximal - behaviour), bounded: the second factor of decoupled PPO.

    Sources: arXiv:2110.00641; AReaL, arXiv:2505.24298.

    Args:
        proximal_logprobs: log-probabilities under the proximal (old) policy, `[T]` or `[B, L]`.
        behaviour_logprobs: log-probabilities under the policy that sampled.
        mask: tokens that count.
        upper: upper bound of the statistic.
        lower: lower bound of the statistic; None sets no bound.
        metric: the statistic: "ratio" is b; "k1" is log b, "k2" (log b)^2 / 2, "k3" exp(-log b) - 1 + log b; "tv" and
            "binary_kl" are the divergence of the sampled token against all others, of behaviour from proximal.
        scope: "token" computes one statistic per token, "sequence" one per sequence. With "sequence" and "ratio", b
            itself becomes the sequence's geometric mean, unless `token_weights`.
        action: "mask" makes b 0 for tokens out of bounds and leaves the others uncapped. "clamp" clamps b to
            [lower or 0, upper], with scope "sequence" only if the sequence is out of bounds.
        over: mean, sum or max over the sequence's tokens. With "ratio" it applies to log b, followed by the
            exponential.
        token_weights: with scope "sequence", keep each token's own b.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.

    Raises:
        ConfigError: "clamp" is combined with a metric other than "ratio", whose bounds are not bounds of b.
    """
    if action == "clamp" and metric != "ratio":
        raise ConfigError(f"metric {metric!r} decides what is kept: action 'mask'; 'clamp' bounds the weight, 'ratio'")
    mask = mask.bool()
    log_b = proximal_logprobs - behaviour_logprobs
    statistic = _statistic(proximal_logprobs, behaviour_logprobs, metric)
    weights = log_b.exp()
    if scope == "sequence":
        statistic = _over_sequences(statistic, mask, over, cu_seqlens)
        if metric == "ratio" and not token_weights:
            weights = reduce.sequence_log_ratio(log_b, mask, cu_seqlens).exp()
    if metric == "ratio":
        statistic = statistic.exp()
    outside = mask & ((statistic > upper) | (statistic < (-torch.inf if lower is None else lower)))
    kept = mask & ~outside if action == "mask" else mask
    if action == "clamp":
        weights = torch.where(outside, weights.clamp(lower or 0.0, upper), weights)
    return BehaviourWeights(torch.where(kept, weights, 0.0), kept, outside)


def rejection_mask(
    logprobs: Tokens,
    sampler_logprobs: Tokens,
    mask: Mask,
    *,
    upper: float,
    lower: float | None = None,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    scope: Scope = "sequence",
    over: Over = "mean",
    cu_seqlens: CuSeqlens | None = None,
) -> Flags:
    """Return the mask with only the tokens with lower <= KL(sampler || trained) <= upper.

    Used as a loss mask, the result removes rejected tokens from the average. Used as weights of the loss, it leaves
    them in the divisor. Combine several criteria by the conjunction of their masks. Rejection by sequence is Trust
    Region Masking (Li et al., ICML 2026).

    Args:
        logprobs: log-probabilities under the policy that is trained, `[T]` or `[B, L]`.
        sampler_logprobs: log-probabilities under the policy that sampled.
        mask: tokens that count.
        upper: upper bound of the KL.
        lower: lower bound. k1 = log(sampler / trained) has a sign, so it usually needs a lower bound.
        estimator: estimator of the KL at a token.
        scope: "token", or "sequence", which keeps or rejects each sequence as a whole.
        over: mean, sum or max over the sequence's tokens in the mask.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
    """
    # the samples are the sampler's, so the divergence that they estimate is the divergence from the sampler
    bounds: dict[str, Any] = {"upper": upper, "lower": lower, "metric": estimator, "scope": scope, "over": over}
    return behaviour_weights(sampler_logprobs, logprobs, mask, action="mask", cu_seqlens=cu_seqlens, **bounds).kept


def check_rejection(options: Mapping[str, Any]) -> None:
    """Check the keyword arguments of `rejection_mask` that a config gives; {} rejects no token.

    Raises:
        UnknownOptionError: `rejection_mask` has no such option.
        ConfigError: a value has the wrong kind, or the upper bound is missing.
    """
    if options:
        check_options(rejection_mask, options, "rejection", ("logprobs", "sampler_logprobs", "mask"), ("cu_seqlens",))


@torch.no_grad()
def off_policy_sequence_mask(
    logprobs: Tokens,
    sampler_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    threshold: float,
    cu_seqlens: CuSeqlens | None = None,
) -> Flags:
    """Return the mask without tokens that have A < 0 in sequences with mean(log mu - log pi) > threshold.

    DeepSeek-V3.2, arXiv:2512.02556. The loss is still averaged over the whole mask: multiply the loss by the result.

    Args:
        logprobs: log pi under the policy that is trained, `[T]` or `[B, L]`.
        sampler_logprobs: log mu under the policy that sampled.
        advantages: A of each token.
        mask: tokens that count.
        threshold: bound of the sequence's mean.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
    """
    distance = reduce.sequence_log_ratio(sampler_logprobs - logprobs, mask, cu_seqlens)
    return mask.bool() & ~((advantages < 0) & (distance > threshold))


@torch.no_grad()
def interpolated_proximal(
    logprobs: Tokens,
    behaviour_logprobs: Tokens,
    versions: Int[Tensor, "*tokens"],
    current_version: int,
    *,
    space: Literal["log", "linear"] = "log",
) -> Tokens:
    """Return estimates of the proximal policy's log-probabilities without a forward pass. A-3PO, arXiv:2512.06547.

    The estimate lies between the behaviour policy and the policy that is trained. The policy that is trained has the
    weight alpha = (current - 1 - version) / (current - version).

    Args:
        logprobs: log-probabilities under the policy that is trained, `[T]` or `[B, L]`.
        behaviour_logprobs: log-probabilities under the policy that sampled.
        versions: policy version of each token. A token without a version (below 0), or not older than
            `current_version`, keeps the behaviour policy's log-probability.
        current_version: version of the policy that is trained.
        space: "log" interpolates log-probabilities, "linear" probabilities.
    """
    age = current_version - versions
    is_older = (versions >= 0) & (age > 0)
    alpha = torch.where(is_older, (age - 1) / age.clamp(min=1), 0.0).to(logprobs.dtype)
    if space == "log":
        return behaviour_logprobs + alpha * (logprobs - behaviour_logprobs)
    return ((1 - alpha) * behaviour_logprobs.exp() + alpha * logprobs.exp() + 1e-10).log()


@torch.no_grad()
def off_policy_metrics(
    logprobs: Tokens, sampler_logprobs: Tokens, mask: Mask, *, cu_seqlens: CuSeqlens | None = None
) -> dict[str, Scalar]:
    """Measure the distance of the policy that is trained from the policy that sampled.

    Args:
        logprobs: log-probabilities under the policy that is trained, `[T]` or `[B, L]`.
        sampler_logprobs: log-probabilities under the policy that sampled.
        mask: tokens that count.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.

    Returns:
        Means over the tokens in the mask, or over the sequences with such tokens. `kl`, `k3_kl`: KL(sampler || trained)
        per token, by k1 and k3. `perplexity`, `sampler_perplexity`: exp(-mean logprob) of a sequence. `log_perplexity`,
        `sampler_log_perplexity`: their logarithms. `log_perplexity_gap`: the trained policy's less the sampler's, with
        `_abs`, `_max` and `_min`. `perplexity_ratio`: exponential of the gap. `chi2_token`, `chi2_sequence`: E[w^2] - 1
        for the importance weight w of a token or a sequence (|log w| at most 20). They estimate the chi-squared
        divergence, which measures how many samples the weights are worth.
    """
    mask = mask.bool()
    occupied = is_occupied(mask, cu_seqlens)
    surprise, sampler_surprise = (-reduce.sequence_means(x, mask, cu_seqlens) for x in (logprobs, sampler_logprobs))
    gap, log_ratio = surprise - sampler_surprise, logprobs - sampler_logprobs
    highest, lowest = _bounds(gap, occupied)
    k3 = kl_penalty(sampler_logprobs, logprobs, "k3", max_log_ratio=None, max_value=None)
    by_sequence = {
        "perplexity": surprise.exp(),
        "sampler_perplexity": sampler_surprise.exp(),
        "log_perplexity": surprise,
        "sampler_log_perplexity": sampler_surprise,
        "log_perplexity_gap": gap,
        "log_perplexity_gap_abs": gap.abs(),
        "perplexity_ratio": gap.exp(),
        "chi2_sequence": _squared_weights(reduce.sequence_sums(log_ratio, mask, cu_seqlens)) - 1,
    }
    return {
        "kl": reduce.masked_mean(-log_ratio, mask),
        "k3_kl": reduce.masked_mean(k3, mask),
        "chi2_token": reduce.masked_mean(_squared_weights(log_ratio), mask) - 1,
        "log_perplexity_gap_max": highest,
        "log_perplexity_gap_min": lowest,
    } | {key: reduce.masked_mean(value, occupied) for key, value in by_sequence.items()}


@torch.no_grad()
def weight_metrics(weights: Tokens, mask: Mask) -> dict[str, Scalar]:
    """Return `mean`, `std`, `max` and `min` of importance weights over the mask, and `effective_fraction`.

    `effective_fraction` is E[w]^2 / E[w^2] (Kish 1965). An unweighted sample of this fraction of the tokens would
    estimate as well. All metrics are 0 for an empty mask.

    Args:
        weights: importance weights, `[T]` or `[B, L]`.
        mask: tokens that count.
    """
    mean = reduce.masked_mean(weights, mask)
    highest, lowest = _bounds(weights, mask.bool())
    second_moment = reduce.masked_mean(weights.square(), mask)
    return {
        "mean": mean,
        "std": reduce.masked_variance(weights, mask, unbiased=False).sqrt(),
        "max": highest,
        "min": lowest,
        "effective_fraction": torch.where(second_moment > 0, mean.square() / second_moment, 0.0),
    }


def _squared_weights(log_weights: Tensor) -> Tensor:
    return log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).mul(2).exp()


def _bounds(x: Shaped[Tensor, "*any"], mask: Bool[Tensor, "*any"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the largest and the smallest value in the mask; 0 for an empty mask."""
    if not mask.any():
        return x.new_zeros(()), x.new_zeros(())
    return x[mask].max(), x[mask].min()


def _statistic(proximal: Tensor, behaviour: Tensor, metric: Metric) -> Tensor:
    if metric == "tv" or metric == "binary_kl":
        return binary_divergence(behaviour, proximal, "tv" if metric == "tv" else "kl")
    estimator = "k1" if metric == "ratio" else metric  # the ratio is exponentiated after it was taken over the sequence
    return kl_penalty(proximal, behaviour, estimator, max_log_ratio=None, max_value=None)


def _over_sequences(x: Tensor, mask: Tensor, over: Over, cu_seqlens: Tensor | None) -> Tensor:
    if over == "mean":
        return reduce.sequence_log_ratio(x, mask, cu_seqlens)
    if over == "sum":
        return reduce.to_tokens(reduce.sequence_sums(x, mask, cu_seqlens), mask, cu_seqlens)
    index = reduce.sequence_index(mask, cu_seqlens).flatten()
    num_sequences = mask.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    highest = x.new_full((num_sequences + 1,), -torch.inf)
    highest = highest.scatter_reduce(0, index, x.masked_fill(~mask, -torch.inf).flatten(), "amax")
    return torch.where(mask, highest[index].view(mask.shape), 0.0)
