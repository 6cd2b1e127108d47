"""Rows of a program, such as a `datasets.IterableDataset`, that are read a few at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rlite.data.tables import Row, type_in_words
from rlite.errors import ConfigError, DataError


class ProgramRows:
    """Rows that can be iterated again. A row's place is its number.

    The rows before a place are skipped: by index if there are `len` and indices, else by iterating.

    Args:
        rows: the rows.
        key: group of options that names the rows, for messages.

    Raises:
        ConfigError: the rows can be iterated once only.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], key: str) -> None:
        if isinstance(rows, Iterator):
            raise ConfigError(
                f"{key}: {key}.streaming=true iterates the rows again for each epoch and to resume; "
                f"{type_in_words(rows)} can be iterated once only. Give an object that starts over in __iter__, such "
                "as datasets.IterableDataset.from_generator(...)"
            )
        self.name = key
        self._rows = rows
        self._has_indices = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
        self._rest: Iterator[Any] | None = None
        self._next = 0

    def read_from(self, place: int, count: int) -> tuple[list[tuple[int, Row]], int]:
        """Return `count` rows with their numbers, or as many as are left, and the number after them.

        Raises:
            DataError: the program's code raised an error, or a row is no mapping.
        """
        rest, self._rest = self._rest_from(place), None  # an iterator that raised is at its end
        rows = [(number, self._row(number, row)) for number, row in enumerate(islice(rest, count), place)]
        self._rest, self._next = rest, place + len(rows)
        return rows, self._next

    def read(self, places: Sequence[int]) -> list[Row]:
        """Return the rows of these numbers, which ascend.

        Raises:
            DataError: there are fewer rows, or as for `read_from`.
        """
        found: list[Row] = []
        for place in places:
            rows, _ = self.read_from(place, 1)
            if not rows:
                raise DataError(f"{self.name_of(place)}: no such row; it was there when the checkpoint was made")
            found.append(rows[0][1])
        return found

    def name_of(self, place: int) -> str:
        """Return the name of a row in messages."""
        return f"{self.name}, row index {place}"

    def digest(self, end: int | None) -> str:
        """Return the number of rows; their content is not compared."""
        return str(end)

    def _row(self, number: int, row: Any) -> Row:
        if not isinstance(row, Mapping):
            raise DataError(f"{self.name_of(number)}: expected a dict of columns, found {type_in_words(row)}")
        return dict(row)

    def _rest_from(self, place: int) -> Iterator[Any]:
        """Return an iterator over the rows from a place on."""
        if self._has_indices:
            return self._iterate(place)
        if self._rest is None or place < self._next:
            self._rest, self._next = self._iterate(0), 0
        deque(islice(self._rest, place - self._next), maxlen=0)
        return self._rest

    def _iterate(self, start: int) -> Iterator[Any]:
        number = start
        try:
            rows: Any = self._rows
            for row in map(rows.__getitem__, range(start, len(rows))) if self._has_indices else rows:
                yield row
                number += 1
        except Exception as error:  # the program's own code
            raise DataError(f"{self.name_of(number)}: {type(error).__name__}: {error}") from error
