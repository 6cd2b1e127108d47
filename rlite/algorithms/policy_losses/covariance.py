"""Compute the covariance of advantage and log-probability, by which `clip_cov` and `kl_cov` choose tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rlite.algorithms.policy_losses.base import LossInputs
from rlite.algorithms.reduce import masked_mean
from rlite.algorithms.shapes import Flags, Mask, Tokens


def covariances(inputs: LossInputs) -> Tokens:
    """Return (A - mean A)(log pi - mean log pi) of each token, with means over the mask."""
    advantages, logprobs, mask = inputs.advantages, inputs.logprobs.detach(), inputs.mask
    return (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))


def lowest(x: Tensor, share: float, mask: Mask) -> Flags:
    """Return whether a token is among the tokens with the lowest `x`.

    Args:
        x: values, of any shape.
        share: share of the mask's tokens to choose, at least one token.
        mask: tokens that count.
    """
    flat = x.flatten()
    count = max(int(share * int(mask.bool().count_nonzero())), 1)
    chosen = flat.topk(min(count, len(flat)), largest=False).indices
    return torch.zeros_like(flat, dtype=torch.bool).index_fill(0, chosen, True).view(x.shape)
