"""The order in which data is dealt, and batches in that order; both go on exactly where they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
from tensordict import TensorDict

from rlite.data.tokens import TokenRows
from rlite.errors import CheckpointError, ConfigError


class ShuffledOrder:
    """The numbers 0 to num_items - 1 without end: each epoch in another order, which seed and epoch alone decide.

    `position` counts the numbers dealt so far; set it to go on from there.
    """

    def __init__(self, num_items: int, seed: int) -> None:
        if num_items < 1:
            raise ConfigError(f"num_items={num_items}: expected at least 1")
        self._num_items = num_items
        self._seed = seed
        self._epoch = -1
        self.position = 0

    @property
    def epoch(self) -> int:
        """Epochs dealt whole."""
        return self.position // self._num_items

    @property
    def left_in_epoch(self) -> int:
        """Numbers that the epoch has still to deal, at least one."""
        return self._num_items - self.position % self._num_items

    def take(self, count: int) -> list[int]:
        """The next `count` numbers; they may span epochs."""
        taken = [self._number(place) for place in range(self.position, self.position + count)]
        self.position += count
        return taken

    def state_dict(self) -> dict[str, int]:
        """Where the order is: seed, epoch, offset in the epoch, and the number of items that this is true of."""
        epoch, offset = divmod(self.position, self._num_items)
        return {"seed": self._seed, "epoch": epoch, "offset": offset, "num_items": self._num_items}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another order was, with its seed. Raises: CheckpointError if the number of items differs."""
        if state["num_items"] != self._num_items:
            raise CheckpointError(
                f"the checkpoint was made with {state['num_items']} items of data; now there are {self._num_items}: "
                "resume with the same data and max_length, or start anew from the weights"
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


def check_content(state: Mapping[str, Any], digest: str) -> None:
    """Raise CheckpointError if a state holds the digest of other data. States of earlier versions hold none."""
    if state.get("content", digest) != digest:
        raise CheckpointError(
            "the checkpoint was made with as many items of data, but with another content or in another order: resume "
            "with the same data, tokenizer and max_length, or start anew from the weights"
        )


class BatchLoader:
    """Shuffled batches of token rows, epoch by epoch.

    Iterating goes on from the position, which has moved when a batch is handed out: a state taken while a batch is
    trained on continues with the next one. Every item is dealt once in an epoch; its last batch may be smaller.

    Args:
        rows: what to deal.
        batch_size: items in a batch (a preference pair is one item, and two rows).
        seed: of the order.
        n_epochs: how often the data is dealt.
    """

    def __init__(self, rows: TokenRows, batch_size: int, seed: int = 0, n_epochs: int = 1) -> None:
        for name, value in (("batch_size", batch_size), ("n_epochs", n_epochs)):
            if value < 1:
                raise ConfigError(f"{name}={value}: expected at least 1")
        self._rows = rows
        self._batch_size = batch_size
        self._num_epochs = n_epochs
        self._order = ShuffledOrder(len(rows), seed)
        self._content = cache(rows.digest)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self._rows) // self._batch_size)

    @property
    def num_batches(self) -> int:
        """Batches in all epochs."""
        return len(self) * self._num_epochs

    @property
    def num_left(self) -> int:
        """Batches that are still to be dealt."""
        if (epochs := self._num_epochs - self._order.epoch) < 1:
            return 0
        return -(-self._order.left_in_epoch // self._batch_size) + (epochs - 1) * len(self)

    @property
    def epoch(self) -> int:
        """Epochs dealt whole."""
        return self._order.epoch

    def __iter__(self) -> Iterator[TensorDict]:
        while self._order.epoch < self._num_epochs:
            yield self._rows.batch(self._order.take(min(self._batch_size, self._order.left_in_epoch)))

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, as a few numbers, and a digest of the data."""
        return {**self._order.state_dict(), "content": self._content()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another loader was. Raises: CheckpointError if its data was other data."""
        self._order.load_state_dict(state)
        check_content(state, self._content())
