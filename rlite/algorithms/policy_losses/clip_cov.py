"""Compute Clip-Cov: PPO without the gradient of a few tokens that make the entropy collapse."""

from __future__ import annotations

import torch

from rlite.algorithms.policy_losses.base import LossInputs, register_policy_loss
from rlite.algorithms.policy_losses.ppo_clip import clipped_surrogate
from rlite.algorithms.policy_losses.selection import covariances, lowest
from rlite.algorithms.reduce import TokenLoss
from rlite.algorithms.shapes import Flags


@torch.no_grad()
def draw_covariant(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    seed: int = 0,
) -> Flags:
    """Return the tokens that `clip_cov` drops.

    Every token has a random number of its own, determined by `seed` and its place among the tokens in the mask. One
    token's candidacy therefore changes no other token's draw.

    `inputs`: per-token tensors, `[T]` or `[B, L]`. `clip_low`: distance of PPO's clip range below 1. `clip_high`:
    distance of PPO's clip range above 1.
    """
    mask, covariance = inputs.mask.bool(), covariances(inputs)
    is_clipped = clipped_surrogate(inputs.log_ratio(), inputs.advantages, clip_low, clip_high).metrics["clip_fraction"]
    eligible = mask & (covariance > cov_low) & (covariance < cov_high) & (is_clipped == 0)
    numbers = torch.rand(int(mask.sum()), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lots = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    lots[mask] = numbers.to(mask.device)
    return lowest(lots.masked_fill(~eligible, torch.inf), share, mask) & eligible


@register_policy_loss("clip_cov", select=draw_covariant)
def clip_cov(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    seed: int = 0,
) -> TokenLoss:
    """Return Clip-Cov's loss of every token (arXiv:2505.22617).

    L = PPO's clipped loss, but 0 for a few tokens with a large covariance (A - mean A)(log pi - mean log pi).

    Args:
        inputs: per-token tensors, `[T]` or `[B, L]`. Without `selected`, tokens are drawn from these tensors alone.
        clip_low: distance of PPO's clip range below 1.
        clip_high: distance of PPO's clip range above 1.
        share: share of the tokens that is dropped, at least one token. They are drawn at random from the candidates.
        cov_low: lower bound of a candidate's covariance.
        cov_high: upper bound of a candidate's covariance.
        seed: seed of the draw.

    Returns:
        The loss and the metrics of `clipped_surrogate`, and `cov_clip_fraction`, the share of dropped tokens.
    """
    loss, metrics = clipped_surrogate(inputs.log_ratio(), inputs.advantages, clip_low, clip_high)
    selected = inputs.selected
    if selected is None:
        options = {"clip_low": clip_low, "clip_high": clip_high, "share": share}
        selected = draw_covariant(inputs, **options, cov_low=cov_low, cov_high=cov_high, seed=seed)
    metrics["cov_clip_fraction"] = selected.to(loss.dtype)
    return inputs.weighted(torch.where(selected, 0.0, loss), metrics)
