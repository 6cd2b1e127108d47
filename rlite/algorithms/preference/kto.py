"""Compute KTO: preferences on responses without pairs."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlite.algorithms.preference.base import ResponseLoss
from rlite.algorithms.shapes import Scalar

Responses = Float[Tensor, " responses"]


def kto_loss(
    logps: Responses,
    ref_logps: Responses,
    is_desirable: Shaped[Tensor, " responses"],
    *,
    kl: Scalar | float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> ResponseLoss:
    """Return KTO's loss of every response (arXiv:2402.01306).

    L = w (1 - sigmoid(+-beta [logp - ref - kl])), + for a desirable response, - for the others.

    Args:
        logps: sum of log-probabilities over each response, `[R]`.
        ref_logps: sum of log-probabilities over each response under the reference, `[R]`.
        is_desirable: 1 for a desirable response, `[R]`.
        kl: `kto_reference_point`; 0 is the unpaired form of APO-zero (arXiv:2408.06266).
        beta: strength of the regularisation towards the reference.
        desirable_weight: w of a desirable response.
        undesirable_weight: w of an undesirable response.

    Returns:
        The loss, and the metric `rewards`, the implicit rewards beta (logp - ref).
    """
    rewards = beta * (logps - ref_logps.detach())
    is_desirable = is_desirable.bool()
    shifted = rewards - beta * kl
    loss = torch.sigmoid(torch.where(is_desirable, -shifted, shifted))
    loss = torch.where(is_desirable, desirable_weight * loss, undesirable_weight * loss)
    return ResponseLoss(loss, {"rewards": rewards.detach()})


@torch.no_grad()
def kto_reference_point(logps: Responses, ref_logps: Responses) -> Scalar:
    """Return max(0, mean(logp - ref)) over mismatched prompts and responses: KTO's estimate of the KL.

    arXiv:2402.01306 takes each prompt with the response to another prompt of the batch.
    """
    return (logps - ref_logps).mean().clamp(min=0)
