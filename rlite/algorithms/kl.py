"""Per-token estimators of KL(policy || reference) from tokens that the policy sampled.

D = logprobs - ref_logprobs (John Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html):
k1 = D (unbiased), k2 = D^2 / 2 (biased, low variance), k3 = exp(-D) - 1 + D (unbiased, low variance, >= 0).
As a loss, only k2 has the gradient of the KL in expectation: `straight_through` gives any estimator that gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from rlite.errors import ConfigError

KLEstimator = Literal["k1", "abs", "k2", "k3"]
KL_ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)


def kl_penalty(
    logprobs: Float[Tensor, "*tokens"],
    ref_logprobs: Float[Tensor, "*tokens"],
    estimator: KLEstimator = "k1",
    *,
    straight_through: bool = False,
    max_log_ratio: float | None = 20.0,
    max_value: float | None = 10.0,
) -> Float[Tensor, "*tokens"]:
    """The estimate at each token, differentiable in both arguments.

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
    gradient = _k2(log_ratio)
    return gradient + (value - gradient).detach()


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor, max_log_ratio: float | None = None, max_value: float | None = None) -> Tensor:
    if max_log_ratio is not None:
        log_ratio = log_ratio.clamp(-max_log_ratio, max_log_ratio)
    value = (-log_ratio).expm1() + log_ratio
    return value if max_value is None else value.clamp(-max_value, max_value)


_ESTIMATE: dict[str, Callable[[Tensor], Tensor]] = {"k1": lambda d: d, "abs": Tensor.abs, "k2": _k2, "k3": _k3}
