"""Compute VESPO: a soft gate on the importance weight of a whole sequence."""

from __future__ import annotations

import math

import torch

from rlite.algorithms.policy_losses import base
from rlite.algorithms.policy_losses.base import LossInputs, WeightedTokenLoss, register_policy_loss
from rlite.algorithms.reduce import TokenLoss, sequence_sums, to_tokens

_LOG_SMALLEST_WEIGHT = math.log(1e-8)


@register_policy_loss("vespo")
def vespo(
    inputs: LossInputs, *, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> TokenLoss:
    """Return VESPO's loss of every token.

    L = -sg(phi(W)) A log pi, phi(W) = W^k exp(lambda (1 - W)), W the ratio of the whole sequence.

    VESPO, arXiv:2602.10693. `inputs.weights` are factors of W.

    Args:
        inputs: per-token tensors, `[T]` or `[B, L]`.
        k_pos: k for A >= 0.
        lambda_pos: lambda for A >= 0.
        k_neg: k for A < 0.
        lambda_neg: lambda for A < 0.

    Returns:
        The loss, and the metrics `sequence_weight` (phi), `approx_kl` and `ratio`.
    """
    mask, cu_seqlens, is_positive = inputs.mask, inputs.cu_seqlens, inputs.advantages >= 0
    log_ratio = inputs.log_ratio().detach()
    per_token = log_ratio if inputs.weights is None else log_ratio + inputs.weights.log()
    log_w = to_tokens(sequence_sums(per_token, mask, cu_seqlens), mask, cu_seqlens)
    log_w = log_w.clamp(_LOG_SMALLEST_WEIGHT, base.MAX_LOG_RATIO)
    k, rate = (base.choose(is_positive, yes, no, like=log_w) for yes, no in ((k_pos, k_neg), (lambda_pos, lambda_neg)))
    phi = torch.exp(k * log_w + rate * (1 - log_w.exp()))
    loss = -phi * inputs.advantages * inputs.logprobs
    return WeightedTokenLoss(loss, base.ratio_metrics(log_ratio) | {"sequence_weight": phi})
