"""Compute PPO with a behaviour policy apart from the trust region's centre, the proximal policy."""

from __future__ import annotations

from typing import Any, Literal

from rlite.algorithms.logprobs import Scope
from rlite.algorithms.off_policy import Metric, Over, behaviour_weights
from rlite.algorithms.policy_losses.base import LossInputs, WeightedTokenLoss, register_policy_loss
from rlite.algorithms.policy_losses.ppo_clip import clipped_surrogate
from rlite.algorithms.reduce import TokenLoss


@register_policy_loss("decoupled_ppo")
def decoupled_ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    upper: float = 5.0,
    lower: float | None = None,
    metric: Metric = "ratio",
    scope: Scope = "token",
    action: Literal["mask", "clamp"] = "clamp",
    over: Over = "mean",
    token_weights: bool = False,
) -> TokenLoss:
    """Return decoupled PPO's loss of every token.

    L = b L_clip(rho), rho = pi / pi_old, b = pi_old / pi_behaviour without a gradient. Sources: arXiv:2110.00641;
    AReaL, arXiv:2505.24298.

    The loss makes its own weights b and ignores `inputs.weights`.

    Args:
        inputs: per-token tensors, `[T]` or `[B, L]`; needs `behaviour_logprobs`.
        clip_low: distance of the clip range below 1.
        clip_high: distance of the clip range above 1.
        dual_clip: as in `ppo_clip`.
        upper: upper bound of the statistic of b; see `behaviour_weights` for this and the following options.
        lower: lower bound of the statistic.
        metric: the statistic.
        scope: "token" or "sequence".
        action: "clamp" bounds b; "mask" drops tokens out of bounds.
        over: mean, sum or max over the sequence's tokens.
        token_weights: with scope "sequence", keep each token's own b.

    Returns:
        The loss and the metrics of `clipped_surrogate`, `behaviour_weight` (b), and `filtered_fraction`, the share of
        tokens that a bound removed or clamped.
    """
    bounds: dict[str, Any] = {"upper": upper, "lower": lower, "metric": metric, "scope": scope}
    bounds |= {"action": action, "over": over, "token_weights": token_weights}
    policies = inputs.old_logprobs, inputs.behaviour("decoupled_ppo")
    weights, _, changed = behaviour_weights(*policies, inputs.mask, cu_seqlens=inputs.cu_seqlens, **bounds)
    loss, metrics = clipped_surrogate(inputs.log_ratio(), inputs.advantages, clip_low, clip_high, dual_clip)
    own = {"behaviour_weight": weights, "filtered_fraction": changed.to(loss.dtype)}
    return WeightedTokenLoss(loss * weights, metrics | own)
