"""The order of data items: shuffled epoch by epoch, and resumed exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from rlite.errors import CheckpointError, ConfigError


class ShuffledOrder:
    """Endless sequence of the numbers 0 to num_items - 1. Each epoch has another order, given by seed and epoch.

    `position` counts the numbers returned so far; set it to continue from there.

    Args:
        num_items: items of data.
        seed: seed of the order.
        digest: returns a hash of the items. A state belongs to one hash.

    Raises:
        ConfigError: there are no items.
    """

    def __init__(self, num_items: int, seed: int, digest: Callable[[], str] | None = None) -> None:
        if num_items < 1:
            raise ConfigError(f"num_items={num_items}: expected at least 1")
        self._digest = cache(digest) if digest is not None else None
        self._num_items = num_items
        self._seed = seed
        self._epoch = -1
        self.position = 0

    @property
    def epoch(self) -> int:
        """Complete epochs so far."""
        return self.position // self._num_items

    @property
    def left_in_epoch(self) -> int:
        """Numbers left in the current epoch, at least one."""
        return self._num_items - self.position % self._num_items

    def take(self, count: int) -> list[int]:
        """Return the next `count` numbers; they may span epochs."""
        taken = [self._number(place) for place in range(self.position, self.position + count)]
        self.position += count
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the position: seed, epoch, offset in the epoch, and number and hash of the items it holds for."""
        epoch, offset = divmod(self.position, self._num_items)
        state = {"seed": self._seed, "epoch": epoch, "offset": offset, "num_items": self._num_items}
        return state if self._digest is None else {**state, "content": self._digest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another order's position, with its seed.

        Raises:
            CheckpointError: the items differ. States of earlier versions have no hash of them.
        """
        if "num_items" not in state:
            raise CheckpointError(
                "the checkpoint was made with streaming: resume with it, or start over from the weights"
            )
        if state["num_items"] != self._num_items:
            raise CheckpointError(
                f"the checkpoint was made with {state['num_items']} items of data; now there are {self._num_items}: "
                "resume with the same data and max_length, or start over from the weights"
            )
        if self._digest is not None and state.get("content", digest := self._digest()) != digest:
            raise CheckpointError(
                "the checkpoint was made with as many items of data, but with another content or in another order: "
                "resume with the same data, tokenizer and max_length, or start over from the weights; the ends of "
                "answers in a checkpoint of an earlier version (sft, rm, dpo, kto) need data.end_token=keep"
            )
        self._seed = state["seed"]
        self._epoch = -1
        self.position = state["epoch"] * self._num_items + state["offset"]

    def _number(self, place: int) -> int:
        epoch, offset = divmod(place, self._num_items)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(self._num_items)
        return int(self._permutation[offset])
