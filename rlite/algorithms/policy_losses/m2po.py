"""Compute M2PO: no clip, but without tokens that are too far from the behaviour policy."""

from __future__ import annotations

import torch

from rlite.algorithms.policy_losses.base import LossInputs, ratio_metrics, register_policy_loss
from rlite.algorithms.reduce import TokenLoss
from rlite.algorithms.shapes import Flags, Mask, Tokens


def near_behaviour(inputs: LossInputs, *, threshold: float = 0.04) -> Flags:
    """Return the tokens that `m2po` keeps."""
    return second_moment_mask(inputs.old_logprobs - inputs.behaviour("m2po"), inputs.mask, threshold=threshold)


@register_policy_loss("m2po", select=near_behaviour)
def m2po(inputs: LossInputs, *, threshold: float = 0.04) -> TokenLoss:
    """Return M2PO's loss of every token.

    L = -M rho A, with M = 0 for the tokens that `second_moment_mask` drops. M2PO, arXiv:2510.01161.

    Dropped tokens still count in the average.

    Args:
        inputs: per-token tensors, `[T]` or `[B, L]`; needs `behaviour_logprobs`. Without `selected`, tokens are kept by
            a statistic over these tensors alone.
        threshold: bound of the mean of log(pi_old / pi_behaviour)^2.

    Returns:
        The loss, and the metrics `clip_fraction` (tokens dropped), `approx_kl` and `ratio`.
    """
    log_ratio = inputs.log_ratio()
    selected = near_behaviour(inputs, threshold=threshold) if inputs.selected is None else inputs.selected
    loss = torch.where(selected, -inputs.advantages * log_ratio.exp(), 0.0)
    dropped = (inputs.mask.bool() & ~selected).to(loss.dtype)
    return inputs.weighted(loss, ratio_metrics(log_ratio) | {"clip_fraction": dropped})


@torch.no_grad()
def second_moment_mask(log_ratio: Tokens, mask: Mask, *, threshold: float) -> Flags:
    """Return the mask without the fewest tokens that bring the mean of the others' (log ratio)^2 under a bound.

    The dropped tokens have the largest (log ratio)^2. M2PO, arXiv:2510.01161.

    Args:
        log_ratio: log probability ratio of each token, `[T]` or `[B, L]`.
        mask: tokens that count.
        threshold: bound of the mean.

    Returns:
        The mask without the dropped tokens; at least one token stays.
    """
    moments = torch.where(mask.bool(), log_ratio.double().square(), torch.inf).flatten()
    ascending, order = moments.sort()
    counts = torch.arange(1, len(moments) + 1, device=moments.device)
    # the mean of the smallest n grows with n; masked tokens are at the end and infinite
    num_kept = (ascending.cumsum(0) / counts < threshold).count_nonzero().clamp(min=1)
    kept = torch.zeros_like(moments, dtype=torch.bool).index_put((order,), counts <= num_kept)
    return kept.view(mask.shape) & mask.bool()
