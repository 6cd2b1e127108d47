"""Compute SAPO: a smooth gate in place of the clip."""

from __future__ import annotations

import torch

from rlite.algorithms.policy_losses.base import LossInputs, choose, ratio_metrics, register_policy_loss
from rlite.algorithms.reduce import TokenLoss


@register_policy_loss("sapo")
def sapo(inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """Return SAPO's loss of every token.

    L = -(4 / tau) sigmoid(tau (rho - 1)) A. SAPO, arXiv:2511.20347.

    At rho = 1 the gradient is PPO's; away from it the gradient fades smoothly. The paper averages by sequence.

    Args:
        inputs: per-token tensors, `[T]` or `[B, L]`.
        tau_pos: tau for A > 0.
        tau_neg: tau for A <= 0.

    Returns:
        The loss, and the metrics `approx_kl` and `ratio`.
    """
    log_ratio = inputs.log_ratio()
    tau = choose(inputs.advantages > 0, tau_pos, tau_neg, log_ratio)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    return inputs.weighted(-gate * inputs.advantages, ratio_metrics(log_ratio))
