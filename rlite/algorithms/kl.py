"""Per-token estimators of KL(policy || reference) from tokens that the policy sampled.

D = logprobs - ref_logprobs (John Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html):
k1 = D (unbiased), k2 = D^2 / 2 (biased, low variance), k3 = exp(-D) - 1 + D (unbiased, low variance, >= 0).
As a loss, only k2 has the gradient of the KL in expectation: `straight_through` gives any estimator that gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from rlite.errors import ConfigError

KLEstimator = Literal["k1", "abs", "k2", "k3"]
KL_ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)
BinaryDivergence = Literal["tv", "kl"]


def kl_penalty(
    logprobs: Float[Tensor, "*tokens"],
    ref_logprobs: Float[Tensor, "*tokens"],
    estimator: KLEstimator = "k1",
    *,
    straight_through: bool = False,
    weights: Float[Tensor, "*tokens"] | None = None,
    max_log_ratio: float | None = 20.0,
    max_value: float | None = 10.0,
) -> Float[Tensor, "*tokens"]:
    """The estimate at each token, differentiable in both arguments.

    `weights`, importance weights of the policy over the one that sampled, multiply the straight-through gradient but
    not the value: tokens of an older policy then give the gradient of this one's KL. To weigh both, as DeepSeek-V3.2
    (arXiv:2512.02556) does with a ratio that carries its gradient, multiply the result.
    As a loss, k1 needs `straight_through`: its own gradient, that of log pi, is 0 in expectation.
    `max_log_ratio` and `max_value` guard the exponential of k3 alone (no gradient where they are active); None turns
    a guard off.
    """
    if estimator not in _ESTIMATE:
        raise ConfigError(f"KL estimator {estimator!r}: expected one of {', '.join(KL_ESTIMATORS)}")
    log_ratio = logprobs - ref_logprobs
    if estimator == "k3":
        value = _k3(log_ratio, max_log_ratio, max_value)
    else:
        value = _ESTIMATE[estimator](log_ratio)
    if not straight_through:
        return value
    gradient = _k2(log_ratio) if weights is None else weights.detach() * _k2(log_ratio)
    return gradient + (value - gradient).detach()


def binary_divergence(
    logprobs: Float[Tensor, "*tokens"], other_logprobs: Float[Tensor, "*tokens"], divergence: BinaryDivergence
) -> Float[Tensor, "*tokens"]:
    """The divergence of (p, 1 - p) from (q, 1 - q), where p and q are the sampled token's probabilities: total
    variation |p - q|, or p log(p / q) + (1 - p) log((1 - p) / (1 - q)). A lower bound of that over all tokens.
    """
    p = logprobs.exp()
    if divergence == "tv":
        return (p - other_logprobs.exp()).abs()
    rest, other_rest = -logprobs.expm1(), -other_logprobs.expm1()
    # nothing is left where a policy is certain: the logarithm is kept finite
    log_rest_ratio = torch.log(rest.clamp(min=_SMALLEST_REST) / other_rest.clamp(min=_SMALLEST_REST))
    return p * (logprobs - other_logprobs) + rest * log_rest_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor, max_log_ratio: float | None = None, max_value: float | None = None) -> Tensor:
    if max_log_ratio is not None:
        log_ratio = log_ratio.clamp(-max_log_ratio, max_log_ratio)
    value = (-log_ratio).expm1() + log_ratio
    return value if max_value is None else value.clamp(-max_value, max_value)


_SMALLEST_REST = 1e-8
_ESTIMATE: dict[str, Callable[[Tensor], Tensor]] = {"k1": lambda d: d, "abs": Tensor.abs, "k2": _k2, "k3": _k3}
