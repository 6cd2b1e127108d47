"""Prompts for rollouts: batches of rows, in an order that a resumed run continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rlite.data.mixture import Mixture, shuffled
from rlite.data.readers.streaming import ShuffledStream
from rlite.data.rows import Rows, rows_digest, stream_of
from rlite.errors import ConfigError, StreamedDataError

MAX_ITEM = 200
"""characters of a row's name"""


class Prompt(dict[str, Any]):
    """A row of the data, with its name in the record of a run.

    Args:
        row: the row.
        item: name of the row.
    """

    def __init__(self, row: Mapping[str, Any], item: str) -> None:
        super().__init__(row)
        self.item = item


def item_name(row: Mapping[str, Any], number: int | str) -> str:
    """Return the name of a row in records: its `id`, else its index in the data, or its place if it is streamed."""
    name = row.get("id")
    return str(number if name is None else name)[:MAX_ITEM]


class PromptStream:
    """Endless batches of rows: each epoch in another order that depends only on seed and epoch.

    Args:
        rows: the table, or the first window of a table that is streamed.
        batch_size: rows of a batch.
        seed: seed of the order.
        mixture: the table's sources; None if there is one.

    Raises:
        ConfigError: a batch would be larger than the table.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], batch_size: int, seed: int, mixture: Mixture | None = None
    ) -> None:
        stream = stream_of(rows)
        if batch_size > len(rows) and (stream is None or stream.is_whole):
            raise ConfigError(
                f"train_data.prompts_per_rollout={batch_size}: there are {len(rows)} rows, so one rollout would hold a "
                "prompt twice; lower it, or give more rows"
            )
        self._rows = rows.rows if isinstance(rows, Rows) else rows
        self._batch_size = batch_size
        self.order = shuffled(len(rows), mixture, seed, partial(rows_digest, rows))
        """order of the rows, unless they are streamed; its `position` counts the rows returned so far"""
        self._stream: ShuffledStream[Mapping[str, Any]] | None = (
            None if stream is None else ShuffledStream(stream, seed)
        )
        self.returned: list[Prompt] = []
        """rows that come before all others: they were returned before, and not used"""

    def next(self, count: int | None = None) -> list[Prompt]:
        """Return the next `batch_size` rows, or `count` of them; a batch may span two epochs."""
        count = self._batch_size if count is None else count
        new = self._take(max(count - len(self.returned), 0))
        first, self.returned = self.returned[:count], self.returned[count:]
        return first + new

    def _take(self, count: int) -> list[Prompt]:
        if self._stream is None:
            return [Prompt(row, item_name(row, n)) for n in self.order.take(count) for row in [self._rows[n]]]
        taken: list[Prompt] = []
        while len(taken) < count:
            try:
                placed = self._stream.take_placed(count - len(taken))
            except StreamedDataError:
                self.returned = taken + self.returned
                raise
            taken += [Prompt(row, item_name(row, f"{file}:{place}")) for (file, place), row in placed]
        return taken

    def __iter__(self) -> Iterator[list[Prompt]]:
        """Yield batches forever; the first has all `returned` rows, if there are some."""
        while True:
            yield self.next(len(self.returned) or None)

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position and a digest of the rows."""
        return (self._stream or self.order).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another stream's position.

        Raises:
            CheckpointError: the state is of other rows.
        """
        (self._stream or self.order).load_state_dict(state)
