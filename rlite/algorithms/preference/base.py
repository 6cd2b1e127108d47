"""Define the results of preference losses, and the table of the DPO family."""

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
    """Return a decorator that registers a function as the preference loss of this name.

    A preference loss is a function `(chosen, rejected, *, beta, ...) -> loss` of the two log ratios to the reference
    `[P]`. Its other keyword parameters are its options. If the name is taken, the decorator raises ConfigError.
    """
    return partial(register, PREFERENCE_LOSSES, name)


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return `chosen_rewards`, `rejected_rewards`, `accuracy` and `margin` of each pair.

    `accuracy` is 1 if the chosen reward is larger, and `margin` is the difference.

    Args:
        chosen: reward of the chosen response, `[P]`.
        rejected: reward of the rejected response, `[P]`.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "chosen_rewards": chosen,
        "rejected_rewards": rejected,
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "margin": chosen - rejected,
    }
