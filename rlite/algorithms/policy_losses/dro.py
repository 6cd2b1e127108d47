"""Compute DRO: a quadratic penalty in place of the clip."""

from __future__ import annotations

from rlite.algorithms.policy_losses.base import LossInputs, ratio_metrics, register_policy_loss
from rlite.algorithms.reduce import TokenLoss


@register_policy_loss("dro")
def dro(inputs: LossInputs, *, beta: float = 0.1) -> TokenLoss:
    """Return DRO's loss of every token.

    L = -A log pi + beta / 2 (log pi - log pi_old)^2. DRO, arXiv:2405.19107, per token and with A for R - V.

    Args:
        inputs: per-token tensors, `[T]` or `[B, L]`.
        beta: strength of the penalty.

    Returns:
        The loss, and the metrics `approx_kl` and `ratio`.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    loss = 0.5 * beta * log_ratio.square() - inputs.advantages * inputs.logprobs
    return inputs.weighted(loss, ratio_metrics(inputs.log_ratio()))
