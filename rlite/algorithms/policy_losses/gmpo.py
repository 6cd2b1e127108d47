"""Compute GMPO: the geometric mean of a sequence's clipped ratios."""

from __future__ import annotations

import torch

from rlite.algorithms.policy_losses.base import LossInputs, WeightedTokenLoss, ratio_metrics, register_policy_loss
from rlite.algorithms.reduce import TokenLoss


@register_policy_loss("gmpo")
def gmpo(inputs: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> TokenLoss:
    """Return GMPO's loss of every token.

    L = -mean(A) prod_t |min(rho_t A, clip(rho_t, e^-low, e^high) A)|^(1 / |y|) with the sign of A.

    GMPO, arXiv:2507.20673. The paper averages by sequence. `inputs.weights` enter by their geometric mean.

    Args:
        inputs: per-token tensors, `[T]` or `[B, L]`.
        clip_low: lower bound of log rho, negated; the paper also bounds the logarithm.
        clip_high: upper bound of log rho.

    Returns:
        The sequence's loss at each of its tokens, and the metrics `clip_fraction` (tokens clipped with A > 0),
        `negative_clip_fraction` (with A < 0), `approx_kl` and `ratio`.
    """
    log_ratio, advantages = inputs.logprobs - inputs.old_logprobs, inputs.advantages
    near = log_ratio.clamp(-clip_low, clip_high)
    pessimistic = torch.where(advantages < 0, torch.maximum(log_ratio, near), torch.minimum(log_ratio, near))
    mean = inputs.sequence_mean(torch.where(advantages == 0, 0.0, pessimistic))
    if inputs.weights is not None:
        mean = mean + inputs.sequence_mean((inputs.weights + 1e-10).log())
    loss = -inputs.sequence_mean(advantages) * mean.clamp(max=20.0).exp()
    is_clipped = (log_ratio != near).to(loss.dtype)
    fractions = {
        "clip_fraction": is_clipped * (advantages > 0),
        "negative_clip_fraction": is_clipped * (advantages < 0),
    }
    return WeightedTokenLoss(loss, fractions | ratio_metrics(log_ratio))
