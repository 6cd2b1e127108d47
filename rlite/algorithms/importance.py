"""Importance weights between the policy that sampled, the one that is the trust region's centre, and the one that
is trained. Weights are constants: no gradient flows through them. They are 0 where the mask is 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rlite.algorithms.kl import binary_divergence
from rlite.algorithms.reduce import (
    masked_mean,
    sequence_index,
    sequence_means,
    sequence_sums,
    to_tokens,
)
from rlite.errors import ConfigError

Scope = Literal["token", "sequence"]
Metric = Literal["ratio", "k1", "k2", "k3", "tv", "binary_kl"]


class BehaviourWeights(NamedTuple):
    """Per-token weights, and the tokens that were kept. Losses are still averaged over the original mask."""

    weights: Float[Tensor, "*tokens"]
    kept: Bool[Tensor, "*tokens"]
    changed: Bool[Tensor, "*tokens"]
    """tokens that a bound removed or clamped"""


@torch.no_grad()
def importance_weights(
    logprobs: Float[Tensor, "*tokens"],
    sampler_logprobs: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    *,
    upper: float = 2.0,
    lower: float | None = None,
    scope: Scope = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    batch_normalize: bool = False,
    max_log_ratio: float = 20.0,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> Float[Tensor, "*tokens"]:
    """w = exp(logprobs - sampler_logprobs), the trainer's policy over the one that the inference engine sampled from.

    truncate: min(w, upper), truncated importance sampling (Ionides 2008; TIS for the engine mismatch, Yao et al. 2025).
    mask: 0 unless lower <= w <= upper (IcePop, Ling team 2025). `scope="sequence"` takes the product over the
    sequence. `batch_normalize` divides by the mean weight of tokens (or of sequences).
    """
    log_ratio = logprobs - sampler_logprobs
    if scope == "sequence":
        log_ratio = to_tokens(sequence_sums(log_ratio, mask, cu_seqlens), mask, cu_seqlens)
    weights = log_ratio.clamp(-max_log_ratio, max_log_ratio).exp()
    if mode == "truncate":
        weights = weights.clamp(min=lower, max=upper)
    else:
        weights = torch.where((weights <= upper) & (weights >= (lower or 0.0)), weights, 0.0)
    weights = torch.where(mask.bool(), weights, 0.0)
    if not batch_normalize:
        return weights
    if scope == "token":
        return weights / masked_mean(weights, mask).clamp(min=1e-8)
    means = sequence_means(weights, mask, cu_seqlens)
    occupied = sequence_sums(torch.ones_like(weights), mask, cu_seqlens) > 0
    return weights / masked_mean(means, occupied).clamp(min=1e-8)


@torch.no_grad()
def behaviour_weights(
    proximal_logprobs: Float[Tensor, "*tokens"],
    behaviour_logprobs: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    *,
    upper: float,
    lower: float | None = None,
    metric: Metric = "ratio",
    scope: Scope = "token",
    action: Literal["mask", "clamp"] = "clamp",
    over: Literal["mean", "sum", "max"] = "mean",
    token_weights: bool = False,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> BehaviourWeights:
    """b = exp(proximal - behaviour), the second factor of decoupled PPO (arXiv:2110.00641; AReaL,
    arXiv:2505.24298), bounded.

    The statistic that the bounds apply to is b, or k1 = log b, k2 = (log b)^2 / 2, k3 = exp(-log b) - 1 + log b, or
    the divergence of the sampled token against all others, "tv" or "binary_kl" of behaviour from proximal. With
    `scope="sequence"` it is its mean, sum or max over the sequence (for the ratio: the exponential of that of log b,
    and b itself becomes the sequence's geometric mean, unless `token_weights`). mask: tokens out of bounds get weight
    0, the others keep b uncapped. clamp: b is clamped to [lower or 0, upper]; in a sequence scope only where the
    sequence is out of bounds.

    Raises: ConfigError for clamp with another metric than the ratio, whose bounds are not b's.
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
            weights = _over_sequences(log_b, mask, "mean", cu_seqlens).exp()
    if metric == "ratio":
        statistic = statistic.exp()
    outside = mask & ((statistic > upper) | (statistic < (float("-inf") if lower is None else lower)))
    if action == "mask":
        kept, changed = mask & ~outside, outside
    else:
        clamped = torch.where(outside, weights.clamp(lower or 0.0, upper), weights)
        kept, changed, weights = mask, outside, clamped
    return BehaviourWeights(torch.where(kept, weights, 0.0), kept, changed)


@torch.no_grad()
def interpolated_proximal(
    logprobs: Float[Tensor, "*tokens"],
    behaviour_logprobs: Float[Tensor, "*tokens"],
    versions: Int[Tensor, "*tokens"],
    current_version: int,
    *,
    space: Literal["log", "linear"] = "log",
) -> Float[Tensor, "*tokens"]:
    """The proximal policy's log-probabilities without a forward pass of it, between the behaviour policy's, of
    `versions`, and those of the policy that is trained, of `current_version`.

    alpha = (current - 1 - version) / (current - version), the share of the way to the last update; log: behaviour +
    alpha (logprobs - behaviour); linear: the same between the probabilities. A token without a version (below 0), or
    that is not older than the current one, keeps the behaviour policy's. A-3PO, arXiv:2512.06547.
    """
    age = current_version - versions
    is_older = (versions >= 0) & (age > 0)
    alpha = torch.where(is_older, (age - 1) / age.clamp(min=1), 0.0).to(logprobs.dtype)
    if space == "log":
        return behaviour_logprobs + alpha * (logprobs - behaviour_logprobs)
    return ((1 - alpha) * behaviour_logprobs.exp() + alpha * logprobs.exp() + 1e-10).log()


def _statistic(proximal: Tensor, behaviour: Tensor, metric: Metric) -> Tensor:
    log_b = proximal - behaviour
    if metric in ("tv", "binary_kl"):
        return binary_divergence(behaviour, proximal, "tv" if metric == "tv" else "kl")
    if metric == "k2":
        return 0.5 * log_b.square()
    if metric == "k3":
        return (-log_b).expm1() + log_b
    return log_b  # the ratio is exponentiated after it was taken over the sequence


def _over_sequences(x: Tensor, mask: Tensor, over: str, cu_seqlens: Tensor | None) -> Tensor:
    if over == "mean":
        return to_tokens(sequence_means(x, mask, cu_seqlens), mask, cu_seqlens)
    if over == "sum":
        return to_tokens(sequence_sums(x, mask, cu_seqlens), mask, cu_seqlens)
    index = sequence_index(mask, cu_seqlens).flatten()
    num_sequences = mask.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    highest = x.new_full((num_sequences + 1,), float("-inf"))
    highest = highest.scatter_reduce(0, index, x.masked_fill(~mask, float("-inf")).flatten(), "amax")
    return torch.where(mask, highest[index].view(mask.shape), 0.0)
