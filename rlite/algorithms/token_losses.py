"""Compute the losses of critics and of supervised fine-tuning."""

from __future__ import annotations

import torch

from rlite.algorithms.reduce import TokenLoss, finite_gradient
from rlite.algorithms.shapes import Tokens


def value_loss(
    values: Tokens, returns: Tokens, old_values: Tokens | None = None, *, clip: float | None = None
) -> TokenLoss:
    """Return the critic's loss of every token.

    L = max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2; without `clip`, (v - R)^2 / 2.

    The clipped value loss of the PPO implementation in OpenAI baselines (ppo2).

    Args:
        values: v with its gradient, `[T]` or `[B, L]`.
        returns: R, constants.
        old_values: v at the rollout, constants.
        clip: c, how far v may move from v_old. None is off.

    Returns:
        The loss, and the metric `clip_fraction`.
    """
    returns = returns.detach()
    values = finite_gradient(values, returns, old_values)
    unclipped = clipped = (values - returns).square()
    if clip is not None and old_values is not None:
        old_values = old_values.detach()
        near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        clipped = (near - returns).square()
    is_clipped = (clipped > unclipped).to(unclipped.dtype)
    return TokenLoss(0.5 * torch.maximum(unclipped, clipped), {"clip_fraction": is_clipped})


def cross_entropy(logprobs: Tokens) -> TokenLoss:
    """Return the cross entropy of every token.

    L = -log p(token), from the log-probabilities of `gather_logprobs`.
    """
    return TokenLoss(-logprobs, {})
