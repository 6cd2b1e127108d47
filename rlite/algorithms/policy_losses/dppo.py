"""Compute DPPO: a trust region by a divergence of probabilities instead of a range of ratios."""

from __future__ import annotations

import torch

from rlite.algorithms.off_policy import BinaryDivergence, binary_divergence
from rlite.algorithms.policy_losses.base import LossInputs, choose, ratio_metrics, register_policy_loss
from rlite.algorithms.reduce import TokenLoss


@register_policy_loss("dppo")
def dppo(
    inputs: LossInputs,
    *,
    divergence: BinaryDivergence = "tv",
    clip_low: float = 0.15,
    clip_high: float = 0.15,
    ratio_cap: float = 20.0,
) -> TokenLoss:
    """Return DPPO's loss of every token (arXiv:2602.04879).

    L = -M sg(min(rho, cap)) A log pi. M = 0 for a token whose probability has moved too far in the direction of A. Too
    far is a divergence above `clip_high` (A > 0) or `clip_low` (A <= 0).

    Args:
        inputs: per-token tensors, `[T]` or `[B, L]`.
        divergence: divergence of the sampled token against all others. "tv" is |p - p_old|. "kl" is the KL of
            (p_old, 1 - p_old) from (p, 1 - p). A bound of 0.05 for "kl" is of the same order as 0.15 for "tv".
        clip_low: bound of the divergence for A <= 0.
        clip_high: bound of the divergence for A > 0.
        ratio_cap: upper bound of the weight rho.

    Returns:
        The loss, and the metrics `clip_fraction`, `capped_fraction`, `approx_kl` and `ratio`.
    """
    logprobs, log_ratio = inputs.logprobs.detach(), inputs.log_ratio().detach()
    moved = binary_divergence(inputs.old_logprobs, logprobs, divergence)
    rises = inputs.advantages > 0
    has_left = torch.where(rises, logprobs > inputs.old_logprobs, logprobs < inputs.old_logprobs)
    is_clipped = has_left & (moved > choose(rises, clip_high, clip_low, moved))
    ratio = log_ratio.exp()
    loss = -torch.where(is_clipped, 0.0, ratio.clamp(max=ratio_cap)) * inputs.advantages * inputs.logprobs
    fractions = {"clip_fraction": is_clipped, "capped_fraction": (ratio > ratio_cap) & ~is_clipped}
    return inputs.weighted(loss, ratio_metrics(log_ratio) | {key: x.to(loss.dtype) for key, x in fractions.items()})
