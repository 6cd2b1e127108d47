"""Batches of token rows in a shuffled order, of a table in memory or a streamed one; both resume exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tensordict import TensorDict

from rlite.data.mixture import shuffled
from rlite.data.readers.streaming import ShuffledStream, StreamedTable
from rlite.data.tokens import TokenRows, joined
from rlite.wording import counted


class BatchLoader:
    """Loader of shuffled batches of token rows, epoch by epoch.

    Iteration continues from the position, which moves when a batch is yielded. A state that is saved while a batch is
    trained on therefore continues with the next batch. Every item occurs once per epoch, except in a mixture with
    weights. The epoch's last batch may be smaller.

    Args:
        rows: the data.
        batch_size: items in a batch (a preference pair is one item and two rows).
        seed: seed of the order.
        n_epochs: epochs to yield.
    """

    def __init__(self, rows: TokenRows, batch_size: int, seed: int = 0, n_epochs: int = 1) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._num_epochs = n_epochs
        self._order = shuffled(len(rows), rows.mixture, seed, rows.digest)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-len(self._rows) // self._batch_size)

    def __str__(self) -> str:
        """Return how many batches there are, in words."""
        return f"{counted(self._num_epochs, 'epoch')} of {len(self)} steps"

    @property
    def num_batches(self) -> int:
        """Batches in all epochs."""
        return len(self) * self._num_epochs

    @property
    def num_left(self) -> int:
        """Batches not yielded yet."""
        if (epochs := self._num_epochs - self._order.epoch) < 1:
            return 0
        return -(-self._order.left_in_epoch // self._batch_size) + (epochs - 1) * len(self)

    def __iter__(self) -> Iterator[TensorDict]:
        while self._order.epoch < self._num_epochs:
            yield self._rows.batch(self._order.take(min(self._batch_size, self._order.left_in_epoch)))

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position and a digest of the data."""
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another loader's position.

        Raises:
            CheckpointError: the state is of other data.
        """
        self._order.load_state_dict(state)


class StreamLoader:
    """Loader of a number of shuffled batches of a streamed table, epoch by epoch.

    As with a `BatchLoader`, an epoch's last batch may be smaller.

    Args:
        table: the data.
        batch_size: items in a batch (a preference pair is one item and two rows).
        seed: seed of the order.
        num_batches: batches to yield.
    """

    def __init__(self, table: StreamedTable[TokenRows], batch_size: int, seed: int, num_batches: int) -> None:
        self._items: ShuffledStream[TokenRows] = ShuffledStream(table, seed)
        self._batch_size = batch_size
        self.num_batches = num_batches
        """batches in all"""
        self._num_dealt = 0

    def __str__(self) -> str:
        """Return how many batches there are, in words."""
        return "epochs of unknown length, steps"

    @property
    def num_left(self) -> int:
        """Batches not yielded yet."""
        return max(self.num_batches - self._num_dealt, 0)

    def __iter__(self) -> Iterator[TensorDict]:
        while self.num_left:
            items = joined(self._items.take(self._batch_size))
            self._num_dealt += 1
            yield items.batch(range(len(items)))

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position and digests of the data that was read."""
        return {**self._items.state_dict(), "num_batches": self._num_dealt}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another loader's position.

        Raises:
            CheckpointError: the state is of other data.
        """
        self._items.load_state_dict(state)
        self._num_dealt = state["num_batches"]
