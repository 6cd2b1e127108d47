"""Compute PPO's clipped surrogate."""

from __future__ import annotations

import torch

from rlite.algorithms.policy_losses.base import MAX_LOG_RATIO, LossInputs, ratio_metrics, register_policy_loss
from rlite.algorithms.reduce import TokenLoss
from rlite.algorithms.shapes import Tokens


@register_policy_loss("ppo_clip")
def ppo_clip(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> TokenLoss:
    """Return PPO's clipped loss of every token.

    L = -min(rho A, clip(rho, 1 - low, 1 + high) A), rho = pi / pi_old. PPO, arXiv:1707.06347, eq. 7.

    Args:
        inputs: per-token tensors, `[T]` or `[B, L]`.
        clip_low: distance of the clip range below 1.
        clip_high: distance above 1; larger than `clip_low` it is clip-higher (DAPO, arXiv:2503.14476).
        dual_clip: c, which bounds the loss by -c A for A < 0 (arXiv:1912.09729). None is off.
        max_log_ratio: bound of |log rho|, beyond which there is no gradient.

    Returns:
        The loss, and the metrics of `clipped_surrogate`.
    """
    log_ratio = inputs.log_ratio(max_log_ratio)
    return inputs.weighted(*clipped_surrogate(log_ratio, inputs.advantages, clip_low, clip_high, dual_clip))


def clipped_surrogate(
    log_ratio: Tokens, advantages: Tokens, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """Return the clipped objective for any log ratio, of tokens or of sequences.

    Args:
        log_ratio: log rho with its gradient, `[T]` or `[B, L]`.
        advantages: advantage of each token or sequence, of the same shape, without a gradient.
        clip_low: distance of the clip range below 1.
        clip_high: distance of the clip range above 1.
        dual_clip: c, which bounds the loss by -c A for A < 0. None is off.

    Returns:
        The loss and its metrics: `clip_fraction` (the clipped branch is strictly larger), `dual_clip_fraction`,
        `approx_kl` and `ratio`.
    """
    ratio = log_ratio.exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    is_dual_clipped = torch.zeros_like(loss, dtype=torch.bool)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        is_dual_clipped = (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    fractions = {"clip_fraction": clipped > unclipped, "dual_clip_fraction": is_dual_clipped}
    return TokenLoss(loss, {key: x.to(loss.dtype) for key, x in fractions.items()} | ratio_metrics(log_ratio))
