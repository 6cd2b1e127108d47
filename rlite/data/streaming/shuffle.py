"""The items of a streamed table in an order that a resumed run continues: shuffled in a buffer, epoch by epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from rlite.data.streaming.table import Place, StreamedTable
from rlite.errors import CheckpointError, StreamedDataError
from rlite.wording import counted

T = TypeVar("T")


class ShuffledStream(Generic[T]):
    """Endless items of a streamed table. Every item occurs once in an epoch, and each epoch has another order.

    The files are taken in a random order. Their items fill a buffer, from which the next item is drawn at random. A
    buffer of one item keeps the order of the files and of their rows. Memory holds the buffer, the items of the next
    call of `take`, and the first and the current window.

    Args:
        table: the table.
        seed: seed of the order.
    """

    def __init__(self, table: StreamedTable[Any], seed: int) -> None:
        self._table, self._seed = table, seed
        self._order: list[int]
        self._buffer: list[tuple[Place, T]]
        self._begin(0)

    @property
    def num_held(self) -> int:
        """Items in memory."""
        return len(self._buffer) + len(self._ahead)

    def take(self, count: int) -> list[T]:
        """Return the next `count` items, or as many as are left in the epoch; at least one.

        Raises:
            StreamedDataError: a row cannot be used, or a file cannot be read.
        """
        return [item for _, item in self.take_placed(count)]

    def take_placed(self, count: int) -> list[tuple[Place, T]]:
        """Return the next items as `take` does, each with its place: the number of the file, and the place in it.

        All rows that the call needs are read before an item is returned. An error therefore leaves the state unchanged.

        Raises:
            StreamedDataError: a row cannot be used, or a file cannot be read.
        """
        self._read_ahead(count)
        if not self.num_held:
            self._begin(self._epoch + 1)
            self._read_ahead(count)
        if not self.num_held:
            raise StreamedDataError("the files of the data no longer have rows")
        return [self._draw() for _ in range(min(count, self.num_held))]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the places of the buffer's items, and digests of what has been read."""
        turn, place = self._turn, self._place
        if self._ahead:
            (file, place), _ = self._ahead[0]
            turn = self._order.index(file)
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "dealt": self._num_dealt,
            "order": self._order,
            "next": [turn, place],
            "buffer": [list(place) for place, _ in self._buffer],
            "content": self._table.content,
            "read": self._digests(turn, place),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another stream's position, with its seed. The buffer's rows are read again.

        Raises:
            CheckpointError: the state is of other data.
            DataError: a row of the buffer cannot be read.
        """
        if "order" not in state:
            raise CheckpointError(
                "the checkpoint was made without streaming: resume without it, or start over from the weights"
            )
        table, num_files = self._table, len(state["order"])
        if num_files != len(table.files):
            raise CheckpointError(
                f"the checkpoint was made with {counted(num_files, 'file')} of data; now there are {len(table.files)}: "
                "resume with the same data, or start over from the weights"
            )
        self._seed = state["seed"]
        self._begin(state["epoch"])
        self._order = list(state["order"])
        self._turn, self._place = state["next"]
        self._check_unchanged(state)
        self._num_dealt = state["dealt"]
        self._random.bit_generator.advance(self._num_dealt)  # type: ignore[attr-defined]
        places: list[Place] = [(file, place) for file, place in state["buffer"]]
        found = table.read(places)
        if len(found) < len(places):
            raise CheckpointError(_OTHER_CONTENT)
        self._buffer = [(place, found[place]) for place in places]

    def _begin(self, epoch: int) -> None:
        num_files = len(self._table.files)
        self._epoch, self._num_dealt = epoch, 0
        self._random = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        shuffled = np.random.default_rng([self._seed, epoch, 1]).permutation(num_files).tolist()
        self._order = shuffled if self._table.buffer_size > 1 else list(range(num_files))
        self._turn, self._place = 0, 0
        self._buffer = []
        self._ahead: deque[tuple[Place, T]] = deque()
        self._whole: dict[int, str] = {}

    def _read_ahead(self, count: int) -> None:
        while self.num_held < self._table.buffer_size - 1 + count and self._turn < len(self._order):
            items, end = self._table.read_window(self._order[self._turn], self._place)
            self._ahead.extend(items)
            self._turn, self._place = (self._turn + 1, 0) if end is None else (self._turn, end)

    def _draw(self) -> tuple[Place, T]:
        while self._ahead and len(self._buffer) < self._table.buffer_size:
            self._buffer.append(self._ahead.popleft())
        number = int(self._random.random() * len(self._buffer))
        self._buffer[number], self._buffer[-1] = self._buffer[-1], self._buffer[number]
        self._num_dealt += 1
        return self._buffer.pop()

    def _digests(self, turn: int, place: int) -> dict[str, str]:
        """Return a digest of each file's part that was read; later epochs have read all."""
        whole = range(len(self._order)) if self._epoch else self._order[:turn]
        for file in whole:
            if file not in self._whole:
                self._whole[file] = self._table.files[file].digest(None)
        digests = {str(file): self._whole[file] for file in whole}
        if not self._epoch and turn < len(self._order) and place:
            file = self._order[turn]
            digests[str(file)] = self._table.files[file].digest(place)
        return digests

    def _check_unchanged(self, state: Mapping[str, Any]) -> None:
        if state["content"] != self._table.content:
            raise CheckpointError(_OTHER_CONTENT)
        digests = self._digests(*state["next"])
        for file, digest in state["read"].items():
            if digests[file] != digest:
                raise CheckpointError(
                    f"{self._table.files[int(file)].name} was changed in the part that the run has read: resume with "
                    "the same data, or start over from the weights"
                )


_OTHER_CONTENT = (
    "the checkpoint was made with another content of the data: resume with the same data, tokenizer and max_length, or "
    "start over from the weights"
)
