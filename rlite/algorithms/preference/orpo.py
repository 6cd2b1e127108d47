"""Compute the odds-ratio loss of ORPO, which needs no reference."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from rlite.algorithms.preference.base import register_preference_loss
from rlite.algorithms.shapes import Pairs

_SURE = -1e-6
"""largest mean log-probability; the odds of a certain response are infinite"""


@register_preference_loss("orpo", of_probabilities=True)
def orpo(chosen: Pairs, rejected: Pairs, *, beta: float) -> Pairs:
    """Return ORPO's odds-ratio loss of every pair.

    L = -b log sigmoid(log odds(c) - log odds(r)), log odds(x) = x - log(1 - exp x). ORPO, arXiv:2403.07691, eq. 7. The
    paper adds the negative log-likelihood of the chosen response (`actor.preference_loss.nll_weight=1`).

    Args:
        chosen: mean log-probability of the chosen response's tokens, `[P]`, without a reference.
        rejected: mean log-probability of the rejected response's tokens, `[P]`.
        beta: weight of the loss, lambda in the paper.
    """
    return -beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logps: Pairs) -> Pairs:
    logps = logps.clamp(max=_SURE)
    return logps - torch.log(-torch.expm1(logps))
