"""Compare two policies by the log-probabilities of sampled tokens: estimates of the KL, and importance weights.

D = logprobs - ref_logprobs (John Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html):
k1 = D (unbiased), k2 = D^2 / 2 (biased, low variance), k3 = exp(-D) - 1 + D (unbiased, low variance, >= 0).
As a loss, only k2 has the gradient of the KL in expectation. `straight_through` gives any estimator this gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor

from rlite.algorithms.reduce import finite_gradient, masked_mean, sequence_means, sequence_sums, to_tokens
from rlite.algorithms.shapes import CuSeqlens, Mask, Tokens
from rlite.errors import ConfigError
from rlite.types import KLEstimator

Scope = Literal["token", "sequence"]
MAX_LOG_RATIO = 20.0
"""bound of a log ratio; the square of its exponential is finite in float32"""


def kl_penalty(
    logprobs: Tokens,
    ref_logprobs: Tokens,
    estimator: KLEstimator = "k1",
    *,
    straight_through: bool = False,
    weights: Tokens | None = None,
    max_log_ratio: float | None = 20.0,
    max_value: float | None = 10.0,
) -> Tokens:
    """Return an estimate of KL(policy || reference) at each token, differentiable in both arguments.

    Args:
        logprobs: log-probabilities under the policy, `[T]` or `[B, L]`.
        ref_logprobs: log-probabilities under the reference.
        estimator: "k1", "abs" (|k1|), "k2" or "k3". As a loss k1 needs `straight_through`: its own gradient, the
            gradient of log pi, is 0 in expectation.
        straight_through: give the estimate the gradient of k2.
        weights: importance weights of the policy over the policy that sampled. They multiply the straight-through
            gradient but not the value, so tokens of an older policy give the gradient of this policy's KL.
            DeepSeek-V3.2 (arXiv:2512.02556) weights both, by a ratio that carries its gradient. For this form, multiply
            the result.
        max_log_ratio: bound of |D| in the exponential of k3, beyond which there is no gradient; None sets no bound.
        max_value: bound of k3, beyond which there is no gradient; None sets no bound.

    Raises:
        ConfigError: the estimator is unknown.
    """
    if estimator not in get_args(KLEstimator):
        raise ConfigError(f"KL estimator {estimator!r}: expected one of {', '.join(get_args(KLEstimator))}")
    log_ratio = finite_gradient(logprobs - ref_logprobs, weights)
    value = _k3(log_ratio, max_log_ratio, max_value) if estimator == "k3" else _ESTIMATE[estimator](log_ratio)
    if not straight_through:
        return value
    gradient = _k2(log_ratio) if weights is None else weights.detach() * _k2(log_ratio)
    return gradient + (value - gradient).detach()


@torch.no_grad()
def importance_weights(
    logprobs: Tokens,
    sampler_logprobs: Tokens,
    mask: Mask,
    *,
    upper: float = 2.0,
    lower: float | None = None,
    scope: Scope = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    batch_normalize: bool = False,
    max_log_ratio: float = MAX_LOG_RATIO,
    cu_seqlens: CuSeqlens | None = None,
) -> Tokens:
    """Return w = exp(logprobs - sampler_logprobs), bounded.

    Args:
        logprobs: log-probabilities under the trainer's policy, `[T]` or `[B, L]`.
        sampler_logprobs: log-probabilities under the policy that the inference engine sampled from.
        mask: tokens that count.
        upper: upper bound of w.
        lower: lower bound of w; None sets no bound.
        scope: "token", or "sequence" for the product over the sequence.
        mode: "truncate" clamps w to the bounds (Ionides 2008; TIS for the engine mismatch, Yao et al. 2025); "mask"
            makes w 0 outside of them (IcePop, Ling team 2025).
        batch_normalize: divide by the mean weight of the tokens (or of the sequences).
        max_log_ratio: bound of |log w| before the exponential.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
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
    return weights / masked_mean(means, is_occupied(mask, cu_seqlens)).clamp(min=1e-8)


def is_occupied(mask: Mask, cu_seqlens: CuSeqlens | None) -> Bool[Tensor, " sequences"]:
    """Return whether a sequence has a token in the mask."""
    return sequence_sums(torch.ones_like(mask, dtype=torch.float32), mask, cu_seqlens) > 0


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor, max_log_ratio: float | None, max_value: float | None) -> Tensor:
    if max_log_ratio is not None:
        log_ratio = log_ratio.clamp(-max_log_ratio, max_log_ratio)
    value = (-log_ratio).expm1() + log_ratio
    return value if max_value is None else value.clamp(-max_value, max_value)


_ESTIMATE: dict[str, Callable[[Tensor], Tensor]] = {"k1": lambda d: d, "abs": Tensor.abs, "k2": _k2}
