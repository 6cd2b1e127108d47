"""The results of preference losses, and the table of the DPO family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from rlite.algorithms.registry import register
from rlite.algorithms.shapes import Pairs


class PairLoss(NamedTuple):
    """The loss of every pair, to be averaged over pairs."""

    loss: Pairs
    """carries the gradient"""
    metrics: dict[str, Pairs]
    """detached, one value per pair"""


class ResponseLoss(NamedTuple):
    """The loss of every response."""

    loss: Float[Tensor, " responses"]
    """carries the gradient"""
    metrics: dict[str, Float[Tensor, " responses"]]
    """detached, one value per response"""


PreferenceLossFunction = Callable[..., Tensor]
PREFERENCE_LOSSES: dict[str, PreferenceLossFunction] = {}
"""losses of the DPO family by name"""


def register_preference_loss(name: str) -> Callable[[PreferenceLossFunction], PreferenceLossFunction]:
    """Make a function the preference loss of this name. Raises ConfigError if the name is taken.

    A preference loss is a function `(chosen, rejected, *, beta, ...) -> loss` of the two log ratios to the reference
    `[P]`; its other keyword parameters are its options.
    """
    return partial(register, PREFERENCE_LOSSES, name)


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return both rewards of each pair, whether the chosen one is larger (`accuracy`), and by how much (`margin`)."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "chosen_rewards": chosen,
        "rejected_rewards": rejected,
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "margin": chosen - rejected,
    }
