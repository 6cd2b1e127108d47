"""How far the policy that is trained is from the one that sampled: which tokens to reject, and what to report.

The two differ where the inference engine computes otherwise than the trainer does, and where the weights are older.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rlite.algorithms.importance import Scope, behaviour_weights
from rlite.algorithms.kl import kl_penalty
from rlite.algorithms.reduce import masked_mean, masked_variance, sequence_means, sequence_sums

_MAX_LOG_RATIO = 20.0
"""its exponential, squared, is finite in float32"""


def rejection_mask(
    logprobs: Float[Tensor, "*tokens"],
    sampler_logprobs: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    *,
    upper: float,
    lower: float | None = None,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    scope: Scope = "sequence",
    over: Literal["mean", "sum", "max"] = "mean",
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> Bool[Tensor, "*tokens"]:
    """The tokens of the mask to learn from: those where lower <= KL(sampler || trained) <= upper.

    The KL is estimated at the token, or in the scope of a sequence by the mean, sum or max over its action tokens,
    and then the sequence stays or goes as one. k1 = log(sampler / trained) has a sign, so it wants a lower bound as
    well. Several criteria: the conjunction of their masks.

    As a loss mask it takes the rejected tokens out of the average; as weights of the loss it leaves them in the
    divisor. Rejection by sequence: Trust Region Masking (Li et al., ICML 2026).
    """
    # samples are the sampler's, so the divergence that they estimate is from it
    return behaviour_weights(
        sampler_logprobs,
        logprobs,
        mask,
        upper=upper,
        lower=lower,
        metric=estimator,
        scope=scope,
        action="mask",
        over=over,
        cu_seqlens=cu_seqlens,
    ).kept


@torch.no_grad()
def off_policy_metrics(
    logprobs: Float[Tensor, "*tokens"],
    sampler_logprobs: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    *,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> dict[str, Float[Tensor, ""]]:
    """Scalars over the action tokens, or over the sequences that have any.

    `kl`, `k3_kl`: KL(sampler || trained) per token, by k1 and k3. `perplexity`, `sampler_perplexity`: exp(-mean
    logprob) of a sequence, averaged; `log_perplexity`, `sampler_log_perplexity` its logarithm. `log_perplexity_gap`:
    the trained policy's less the sampler's, with `_abs`, `_max` and `_min`; `perplexity_ratio` its exponential.
    `chi2_token`, `chi2_sequence`: E[w^2] - 1, w the importance weight of a token or a sequence (log w is held within
    20), an estimate of the chi-squared divergence that says how many samples the weights are worth.
    """
    mask = mask.bool()
    is_occupied = sequence_sums(torch.ones_like(logprobs), mask, cu_seqlens) > 0
    surprise, sampler_surprise = (-sequence_means(x, mask, cu_seqlens) for x in (logprobs, sampler_logprobs))
    gap = surprise - sampler_surprise
    log_ratio = logprobs - sampler_logprobs
    log_ratio_sums = sequence_sums(log_ratio, mask, cu_seqlens)
    highest, lowest = _bounds(gap, is_occupied)
    return {
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(kl_penalty(sampler_logprobs, logprobs, "k3", max_log_ratio=None, max_value=None), mask),
        "perplexity": masked_mean(surprise.exp(), is_occupied),
        "sampler_perplexity": masked_mean(sampler_surprise.exp(), is_occupied),
        "log_perplexity": masked_mean(surprise, is_occupied),
        "sampler_log_perplexity": masked_mean(sampler_surprise, is_occupied),
        "log_perplexity_gap": masked_mean(gap, is_occupied),
        "log_perplexity_gap_abs": masked_mean(gap.abs(), is_occupied),
        "log_perplexity_gap_max": highest,
        "log_perplexity_gap_min": lowest,
        "perplexity_ratio": masked_mean(gap.exp(), is_occupied),
        "chi2_token": masked_mean(_held(log_ratio).mul(2).exp(), mask) - 1,
        "chi2_sequence": masked_mean(_held(log_ratio_sums).mul(2).exp(), is_occupied) - 1,
    }


@torch.no_grad()
def weight_metrics(weights: Float[Tensor, "*tokens"], mask: Shaped[Tensor, "*tokens"]) -> dict[str, Float[Tensor, ""]]:
    """`mean`, `std`, `max` and `min` of importance weights over the mask, and `effective_fraction`: the share of
    unweighted samples that estimates as well, E[w]^2 / E[w^2] (Kish 1965). All are 0 for an empty mask."""
    mean = masked_mean(weights, mask)
    highest, lowest = _bounds(weights, mask.bool())
    second_moment = masked_mean(weights.square(), mask)
    return {
        "mean": mean,
        "std": masked_variance(weights, mask, unbiased=False).sqrt(),
        "max": highest,
        "min": lowest,
        "effective_fraction": torch.where(second_moment > 0, mean.square() / second_moment, 0.0),
    }


def _held(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _bounds(x: Float[Tensor, "*any"], mask: Bool[Tensor, "*any"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The largest and the smallest where the mask is 1; 0 for an empty mask."""
    if not x.numel():
        return x.new_zeros(()), x.new_zeros(())
    is_empty = ~mask.any()
    highest, lowest = x.masked_fill(~mask, -torch.inf).max(), x.masked_fill(~mask, torch.inf).min()
    return torch.where(is_empty, 0.0, highest), torch.where(is_empty, 0.0, lowest)
