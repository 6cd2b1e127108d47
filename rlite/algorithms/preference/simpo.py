"""Compute SimPO's loss, which needs no reference."""

from __future__ import annotations

from rlite.algorithms.preference.base import register_preference_loss
from rlite.algorithms.preference.dpo import dpo
from rlite.algorithms.shapes import Pairs


@register_preference_loss("simpo", of_probabilities=True)
def simpo(chosen: Pairs, rejected: Pairs, *, beta: float, gamma: float = 1.0, label_smoothing: float = 0.0) -> Pairs:
    """Return SimPO's loss of every pair.

    L = -log sigmoid(b c - b r - gamma). SimPO, arXiv:2405.14734, eq. 6.

    Args:
        chosen: mean log-probability of the chosen response's tokens, `[P]`, without a reference.
        rejected: mean log-probability of the rejected response's tokens, `[P]`.
        beta: factor of the mean log-probabilities.
        gamma: margin of the rewards; in the paper 0.3 to 1.6 times beta.
        label_smoothing: as in `dpo`.
    """
    return dpo(chosen, rejected, beta=beta, margin=gamma, label_smoothing=label_smoothing)
