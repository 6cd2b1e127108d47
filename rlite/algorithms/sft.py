"""Compute the loss of supervised fine-tuning."""

from __future__ import annotations

from rlite.algorithms.reduce import TokenLoss
from rlite.algorithms.shapes import Tokens


def cross_entropy(logprobs: Tokens) -> TokenLoss:
    """Return the cross entropy of every token.

    L = -log p(token), from the log-probabilities of `gather_logprobs`.
    """
    return TokenLoss(-logprobs, {})
