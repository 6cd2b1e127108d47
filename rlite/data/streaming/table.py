"""A table that is read and converted in windows, so that it need not fit in memory. No torch here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from typing import Any, Generic, Protocol, TypeVar

from rlite.data.source import Source
from rlite.data.streaming.files import RowFile, open_files
from rlite.data.tables import Row
from rlite.errors import ConfigError, DataError, StreamedDataError

WINDOW = 4096
"""rows that are read and converted at a time"""

Place = tuple[int, int]
"""a row: number of its file, and its place there"""


class Window(Protocol):
    """Rows that were converted together."""

    def items(self) -> Sequence[Any]:
        """Return an item for each row; None for a row that is dropped."""

    def digest(self) -> str:
        """Return a hash of the rows."""


W = TypeVar("W", bound=Window)


class StreamedTable(Generic[W]):
    """A table of files, of which a window of rows is in memory at a time.

    The first window is read, converted and checked at once. Later windows are checked against its first row that is not
    dropped: that row is converted again with each of them, so a table has one format and the same further columns.

    Args:
        source: the table.
        convert: makes a window of rows of the files. Its messages name a row as `TABLE, row index N`.
        buffer_size: items among which the next one is chosen at random; 1 keeps the order of the files.
        window: rows that are read at a time.

    Raises:
        ConfigError: the table cannot be streamed.
        DataError: a row of the first window cannot be used.
    """

    def __init__(
        self, source: Source, convert: Callable[[list[Row]], W], buffer_size: int, window: int = WINDOW
    ) -> None:
        self.files: list[RowFile] = open_files(source)
        self.buffer_size = buffer_size
        self._source, self._convert, self._size = source, convert, window
        self._checks: dict[str, Callable[[W], object]] = {}
        self._reference: list[tuple[Place, Row]] = []
        beginnings = (self._read_from(file, 0)[0] for file in range(len(self.files)))
        rows = next(filter(None, beginnings), [])
        if not rows:
            raise DataError(f"{source.where}: no rows; expected at least one")
        self.is_whole = len(self.files) == 1 and len(rows) < window
        """true if the first window is the whole table"""
        self._places = [place for place, _ in rows]
        with self._naming(self._places):
            self.first = convert([row for _, row in rows])
            """the first window"""
        place, row = next(kept for kept, item in zip(rows, self.first.items(), strict=True) if item is not None)
        absent = dict.fromkeys(own for own in source.columns.values() if own is not None)
        self._reference = [(place, absent | row)]

    def __str__(self) -> str:
        """Return how the table is read, in words."""
        num_files = f"{len(self.files)} files, " if len(self.files) > 1 else ""
        return f"streaming, {num_files}buffer of {self.buffer_size} rows"

    def check(self, name: str, check: Callable[[W], object]) -> None:
        """Check the first window now, and every later window when it is read.

        Args:
            name: name of the check; another check of this name is replaced.
            check: raises ConfigError or DataError if the window cannot be used.

        Raises:
            ConfigError: as `check` does.
            DataError: as `check` does.
        """
        with self._naming(self._places):
            check(self.first)
        self._checks[name] = check

    def read_window(self, file: int, place: int) -> tuple[list[tuple[Place, Any]], int | None]:
        """Return the items of the next window of a file with their places, and the place after it; None at the end.

        Raises:
            StreamedDataError: the file is damaged, or a row cannot be used.
        """
        try:
            rows, end = self._read_from(file, place)
            return self._converted(rows), (end if len(rows) == self._size else None)
        except (ConfigError, DataError, OSError) as error:
            raise StreamedDataError(str(error)) from error

    def read(self, places: Sequence[Place]) -> dict[Place, Any]:
        """Return the items at some places; dropped ones are missing.

        Raises:
            DataError: the file is damaged, or a row cannot be used.
        """
        found: dict[Place, Any] = {}
        for file, group in groupby(sorted(places), key=lambda place: place[0]):
            own = [place for _, place in group]
            for start in range(0, len(own), self._size):
                part = own[start : start + self._size]
                rows = self.files[file].read(part)
                found.update(self._converted([((file, at), row) for at, row in zip(part, rows, strict=True)]))
        return found

    def _read_from(self, file: int, place: int) -> tuple[list[tuple[Place, Row]], int]:
        rows, end = self.files[file].read_from(place, self._size)
        return [((file, at), row) for at, row in rows], end

    def _converted(self, rows: list[tuple[Place, Row]]) -> list[tuple[Place, Any]]:
        if not rows:
            return []
        rows = [*self._reference, *rows]
        with self._naming([place for place, _ in rows]):
            window = self._convert([row for _, row in rows])
            for check in self._checks.values():
                check(window)
        items = zip(rows, window.items(), strict=True)
        return [(place, item) for (place, _), item in items if item is not None][1:]

    @cached_property
    def content(self) -> str:
        """A hash of the first window."""
        return self.first.digest()

    @contextmanager
    def _naming(self, places: Sequence[Place]) -> Iterator[None]:
        """Name rows by their files and lines in errors of the `with` block, which name them by number."""

        def name(match: re.Match[str]) -> str:
            if int(match[1]) >= len(places):  # a text of the row
                return match[0]
            file, place = places[int(match[1])]
            return self.files[file].name_of(place)

        key, where = re.escape(self._source.key), re.escape(self._source.where)
        numbered = re.compile(rf"(?:(?:{where}|{key}), )?\brow index (\d+)(?: of {key}\b)?")
        try:
            yield
        except (ConfigError, DataError) as error:
            kind = ConfigError if isinstance(error, ConfigError) else DataError
            raise kind(numbered.sub(name, str(error))) from error
