"""Compute KL-Cov: a KL penalty on a few tokens that make the entropy collapse."""

from __future__ import annotations

from typing import Any

import torch

from rlite.algorithms.policy_losses.base import LossInputs, ratio_metrics, register_policy_loss
from rlite.algorithms.policy_losses.selection import covariances, lowest
from rlite.algorithms.reduce import TokenLoss
from rlite.algorithms.shapes import Flags


@torch.no_grad()
def largest_covariances(inputs: LossInputs, *, share: float = 2e-4, **_: Any) -> Flags:
    """Return the tokens that `kl_cov` punishes: the `share` of the mask with the largest covariances."""
    return lowest((-covariances(inputs)).masked_fill(~inputs.mask.bool(), torch.inf), share, inputs.mask)


@register_policy_loss("kl_cov", select=largest_covariances)
def kl_cov(inputs: LossInputs, *, share: float = 2e-4, kl_coef: float = 1.0) -> TokenLoss:
    """Return KL-Cov's loss of every token.

    L = -rho A, plus kl_coef |log rho| for a few tokens with the largest covariance of A and log pi.

    The covariance of a token is (A - mean A)(log pi - mean log pi). KL-Cov, arXiv:2505.22617.

    Args:
        inputs: per-token tensors, `[T]` or `[B, L]`. Without `selected`, tokens are chosen from these tensors alone.
        share: share of the tokens with the penalty, at least one token.
        kl_coef: weight of the penalty.

    Returns:
        The loss, and the metrics `approx_kl` and `ratio`.
    """
    log_ratio = inputs.log_ratio()
    selected = largest_covariances(inputs, share=share) if inputs.selected is None else inputs.selected
    loss = -inputs.advantages * log_ratio.exp()
    return inputs.weighted(torch.where(selected, loss + kl_coef * log_ratio.abs(), loss), ratio_metrics(log_ratio))
