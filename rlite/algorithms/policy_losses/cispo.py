"""Compute CISPO: the clipped ratio as a constant weight of log pi."""

from __future__ import annotations

from rlite.algorithms.policy_losses.base import LossInputs, ratio_metrics, register_policy_loss
from rlite.algorithms.reduce import TokenLoss


@register_policy_loss("cispo")
def cispo(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLoss:
    """Return CISPO's loss of every token.

    L = -sg(clip(rho, 1 - low, 1 + high)) A log pi. CISPO, MiniMax-M1, arXiv:2506.13585.

    Args:
        inputs: per-token tensors, `[T]` or `[B, L]`.
        clip_low: distance of the clip range below 1; 1 is no lower bound, as in the paper.
        clip_high: distance above 1. The default is the cap of 5 of ScaleRL (arXiv:2510.13786).

    Returns:
        The loss, and the metrics `clip_fraction`, `approx_kl` and `ratio`.
    """
    log_ratio = inputs.log_ratio().detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -clipped * inputs.advantages * inputs.logprobs
    return inputs.weighted(loss, ratio_metrics(log_ratio) | {"clip_fraction": (clipped != ratio).to(loss.dtype)})
