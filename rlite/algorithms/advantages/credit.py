"""Credit of branches: how the rows of one episode (sub-agents, compacted histories, retries) share its advantage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlite.registry import Table


@dataclass(frozen=True)
class Branch:
    """One row of an episode: a line of conversation from its beginning to its end."""

    num_tokens: int
    """tokens of the model that the row trains"""
    reward: float
    """sum of the rewards of the row's own turns; without rewards of turns, the episode's"""
    advantage: float
    """mean advantage of these tokens, which the episode shares; 0 without tokens"""


CreditRule = Callable[[Sequence[Branch]], Sequence[float]]
CREDITS: Table[CreditRule] = Table("credit", given=("branches",))
"""rules by name: branches of one episode -> the factor of the advantage of each"""


def register_credit(name: str) -> Callable[[Any], Any]:
    """Register a function of the branches of one episode for `adv.credit=name`.

    Args:
        name: the value of `adv.credit`.

    Returns:
        A decorator, which returns the function unchanged. It raises ConfigError if the name is taken.
    """
    return CREDITS.register(name)


@register_credit("tokens")
def credit_by_tokens(branches: Sequence[Branch]) -> list[float]:
    """Return each branch's share of the episode's tokens: w_b = T_b / sum of T.

    With a mean per sequence (avg_level=sequence), the episode then counts as its mean over tokens, once.

    Args:
        branches: rows of one episode.
    """
    total = sum(branch.num_tokens for branch in branches) or 1
    return [branch.num_tokens / total for branch in branches]


@register_credit("branches")
def credit_by_branches(branches: Sequence[Branch]) -> list[float]:
    """Return an equal share for each branch with tokens: w_b = 1 / K.

    With a mean per sequence (avg_level=sequence), the episode counts as the mean of its branches' means, once.

    Args:
        branches: rows of one episode.
    """
    total = sum(branch.num_tokens > 0 for branch in branches) or 1
    return [1 / total] * len(branches)
