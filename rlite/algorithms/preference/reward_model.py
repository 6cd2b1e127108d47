"""Compute the loss of reward models."""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from rlite.algorithms.preference.base import PairLoss, pair_metrics
from rlite.algorithms.shapes import Pairs


def reward_model_loss(
    chosen_scores: Pairs, rejected_scores: Pairs, *, margin: Pairs | None = None, center_coefficient: float = 0.0
) -> PairLoss:
    """Return the reward model's loss of every pair.

    L = -log sigmoid(r_c - r_r - margin) + k (r_c + r_r)^2. Bradley-Terry, arXiv:2203.02155, eq. 1.

    Args:
        chosen_scores: r_c, `[P]`.
        rejected_scores: r_r, `[P]`.
        margin: margin of Llama 2 (arXiv:2307.09288, eq. 2), `[P]`.
        center_coefficient: k, which keeps scores near 0 (arXiv:2312.09244).
    """
    difference = chosen_scores - rejected_scores
    loss = -logsigmoid(difference if margin is None else difference - margin)
    if center_coefficient:
        loss = loss + center_coefficient * (chosen_scores + rejected_scores).square()
    return PairLoss(loss, pair_metrics(chosen_scores, rejected_scores))
