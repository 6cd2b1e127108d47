"""Estimate the KL to a reference policy from sampled tokens, shape rewards by it, and adapt its coefficient.

D = logprobs - ref_logprobs (John Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html):
k1 = D (unbiased), k2 = D^2 / 2 (biased, low variance), k3 = exp(-D) - 1 + D (unbiased, low variance, >= 0).
As a loss, only k2 has the gradient of the KL in expectation. `straight_through` gives any estimator this gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from rlite.algorithms.reduce import finite_gradient
from rlite.algorithms.shapes import Mask, Tokens
from rlite.errors import ConfigError
from rlite.types import KLEstimator

BinaryDivergence = Literal["tv", "kl"]


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


def binary_divergence(logprobs: Tokens, other_logprobs: Tokens, divergence: BinaryDivergence) -> Tokens:
    """Return the divergence of (p, 1 - p) from (q, 1 - q), a lower bound of the divergence over all tokens.

    Args:
        logprobs: log p of the sampled token, `[T]` or `[B, L]`.
        other_logprobs: log q of the sampled token.
        divergence: "tv" is the total variation |p - q|; "kl" is p log(p / q) + (1 - p) log((1 - p) / (1 - q)).
    """
    logprobs, other_logprobs = finite_gradient(logprobs, other_logprobs), finite_gradient(other_logprobs, logprobs)
    p = logprobs.exp()
    if divergence == "tv":
        return (p - other_logprobs.exp()).abs()
    rest, other_rest = -logprobs.expm1(), -other_logprobs.expm1()
    # nothing is left where a policy is certain: the logarithm is kept finite
    log_rest_ratio = torch.log(rest.clamp(min=_SMALLEST_REST) / other_rest.clamp(min=_SMALLEST_REST))
    return p * (logprobs - other_logprobs) + rest * log_rest_ratio


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


def adaptive_kl_coef(coef: float, kl: float, *, target: float, horizon: float, num_steps: float) -> float:
    """Return the next coefficient, coef (1 + clip(kl / target - 1, -0.2, 0.2) num_steps / horizon).

    This is proportional control in log space (arXiv:1909.08593, section 2.2). It approaches the target within about 5
    horizons.

    Args:
        coef: the current coefficient.
        kl: mean KL measured with this coefficient.
        target: desired mean KL, in the same unit.
        horizon: inverse gain, in steps.
        num_steps: steps since the last update, in any unit (for example, sequences).

    Raises:
        ConfigError: target or horizon is not positive.
    """
    if target <= 0 or horizon <= 0:
        raise ConfigError(f"target={target}, horizon={horizon}: both must be positive")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_steps / horizon)


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor, max_log_ratio: float | None, max_value: float | None) -> Tensor:
    if max_log_ratio is not None:
        log_ratio = log_ratio.clamp(-max_log_ratio, max_log_ratio)
    value = (-log_ratio).expm1() + log_ratio
    return value if max_value is None else value.clamp(-max_value, max_value)


_SMALLEST_REST = 1e-8
_ESTIMATE: dict[str, Callable[[Tensor], Tensor]] = {"k1": lambda d: d, "abs": Tensor.abs, "k2": _k2}
