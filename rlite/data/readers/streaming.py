"""Tables that do not fit in memory: read in windows, shuffled in a buffer, resumed exactly. No torch here."""

from __future__ import annotations

import hashlib
import re
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

import numpy as np

from rlite.data.readers.tables import Row, parse_object, parse_path, read_columnar, type_in_words
from rlite.data.source import Source
from rlite.errors import CheckpointError, ConfigError, DataError, StreamedDataError
from rlite.wording import counted


class ProgramRows:
    """Rows that can be iterated again. A row's place is its number.

    The rows before a place are skipped: by index if there are `len` and indices, else by iterating.
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
        """Return `count` rows with their numbers, or as many as are left, and the number after them."""
        rest, self._rest = self._rest_from(place), None  # an iterator that raised is at its end
        rows = [(number, self._row(number, row)) for number, row in enumerate(islice(rest, count), place)]
        self._rest, self._next = rest, place + len(rows)
        return rows, self._next

    def read(self, places: Sequence[int]) -> list[Row]:
        """Return the rows of these numbers, which ascend."""
        found = {place: row for place in places for _, row in self.read_from(place, 1)[0]}
        if missing := [place for place in places if place not in found]:
            raise DataError(f"{self.name_of(missing[0])}: no such row; it was there when the checkpoint was made")
        return list(found.values())

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


LONGEST_LINE = 1 << 28
"""bytes of a line at most"""
_EDGE = 1 << 20
"""bytes of each end of a file that its digest covers"""
_BLOCK = 1 << 20


class JsonLinesFile:
    """A file of JSON objects, one per line. A row's place is the byte offset of its line."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.name = f"{key}.path={path}"
        with path.open("rb") as file:
            if file.read(_BLOCK).removeprefix(BOM_UTF8).lstrip().startswith(b"["):
                remedy = f"write one object per line to stream it, or leave {key}.streaming out"
                raise ConfigError(f"{self.name}: a JSON array is read as a whole; {remedy}")

    def read_from(self, place: int, count: int) -> tuple[list[tuple[int, Row]], int]:
        """Return `count` rows with their places, or as many as are left, and the place after them."""
        rows: list[tuple[int, Row]] = []
        with self.path.open("rb") as file:
            file.seek(place)
            while len(rows) < count and (line := self._line(file, place)):
                if line.strip(BOM_UTF8 + b" \t\r\n"):
                    rows.append((place, self._row(line, place)))
                place += len(line)
        return rows, place

    def read(self, places: Sequence[int]) -> list[Row]:
        """Return the rows at these places."""
        rows = []
        with self.path.open("rb") as file:
            for place in places:
                file.seek(place)
                rows.append(self._row(self._line(file, place), place))
        return rows

    def name_of(self, place: int) -> str:
        """Return the name of a row in messages, with its line, which is counted now."""
        number = 1
        with self.path.open("rb") as file:
            while place > 0 and (block := file.read(min(place, _BLOCK))):  # a checkpoint's place may be past the end
                number += block.count(b"\n")
                place -= len(block)
        return f"{self.name}, line {number}"

    def digest(self, end: int | None) -> str:
        """Return a hash of the length and of both ends of the file's first `end` bytes; None is the whole file."""
        return _digest(self.path, end)

    def _line(self, file: BinaryIO, place: int) -> bytes:
        line = file.readline(LONGEST_LINE)
        if len(line) == LONGEST_LINE:
            raise DataError(f"{self.name_of(place)}: a line of {LONGEST_LINE} bytes or more; expected one row per line")
        return line

    def _row(self, line: bytes, place: int) -> Row:
        try:
            text = (line if place else line.removeprefix(BOM_UTF8)).decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{self.name_of(place)}: not UTF-8 at byte {place + error.start}") from error
        return parse_object(text, lambda: self.name_of(place))


class ParquetFile:
    """A Parquet file. A row's place is its number. A sandbox process reads it."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.name = f"{key}.path={path}"

    def read_from(self, place: int, count: int) -> tuple[list[tuple[int, Row]], int]:
        """Return `count` rows with their places, or as many as are left, and the place after them."""
        rows = self._rows(range(place, place + count))
        return list(enumerate(rows, place)), place + len(rows)

    def read(self, places: Sequence[int]) -> list[Row]:
        """Return the rows at these places."""
        rows = self._rows(places)
        if len(rows) < len(places):
            raise DataError(f"{self.name_of(places[-1])}: no such row")
        return rows

    def name_of(self, place: int) -> str:
        """Return the name of a row in messages."""
        return f"{self.name}, row index {place}"

    def digest(self, end: int | None) -> str:
        """Return a hash of the file's length and of both its ends, where its index of columns is."""
        return _digest(self.path, None)

    def _rows(self, places: Sequence[int]) -> list[Row]:
        rows = read_columnar("parquet", self.path, self.name, list(places), first=places[0])
        if len(rows) > len(places):  # the reader is not trusted
            raise DataError(f"{self.name}: the reader sent {len(rows)} rows and was asked for {len(places)}")
        return rows


RowFile = JsonLinesFile | ParquetFile | ProgramRows
"""A file of rows. The place of a row is a number that finds it without reading the rows before it."""
_KINDS: Mapping[str, Any] = {".jsonl": JsonLinesFile, ".json": JsonLinesFile, ".parquet": ParquetFile}
_IN_FOLDERS = (".jsonl", ".parquet")  # .json in a folder describes it


def open_files(source: Source) -> list[RowFile]:
    """Return the files of a table that is streamed.

    `source`: a file, or a folder of files, which are taken in the order of their names. `split@folder` takes the files
    whose names begin with the split; the default is train, if there are such files.
    """
    where, key = source.where, source.key
    if source.rows is not None:
        return [ProgramRows(source.rows, key)]
    split, path, subset = parse_path(source.path, where)
    if subset or (split and (path.is_file() or split["start"] or split["stop"])):
        whole = f"{key}.streaming=true reads whole files, or split@folder"
        raise ConfigError(f"{where}: {whole}; leave out parts and subsets")
    if not path.exists() and path.suffix in _KINDS:
        raise ConfigError(f"{where}: no such file")
    if path.is_dir():
        paths = _files_in(path, split["name"] if split else None)
    else:
        paths = [path] if path.is_file() else []
    if not paths and (inner := _folders_in(path)):
        raise ConfigError(f"{where}: its files lie in folders of it; name one of them: {', '.join(inner)}")
    if not paths or paths[0].suffix not in _KINDS:
        raise ConfigError(
            f"{where}: {key}.streaming=true reads .jsonl and .parquet files and folders of them; write the rows as one "
            "of these (Dataset.to_json and Dataset.to_parquet of datasets do so), download a dataset of the hub to a "
            f"folder (hf download NAME --repo-type dataset --local-dir FOLDER), or leave {key}.streaming out"
        )
    return [_KINDS[path.suffix](path, key) for path in paths]


def _files_in(folder: Path, split: str | None) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.suffix in _IN_FOLDERS and path.is_file())
    of_split = [path for path in files if path.name.startswith(split or "train")]
    return of_split if split else of_split or files


def _folders_in(folder: Path) -> list[str]:
    """Return the folders below a folder that hold files to stream."""
    return sorted({str(path.parent) for suffix in _IN_FOLDERS for path in folder.rglob(f"*{suffix}")} - {str(folder)})


def _digest(path: Path, end: int | None) -> str:
    """Return a hash of both ends of a file's first `end` bytes."""
    end = path.stat().st_size if end is None else end
    with path.open("rb") as file:
        digest = hashlib.sha256(f"{end} ".encode() + file.read(min(end, _EDGE)))
        file.seek(max(end - _EDGE, 0))
        digest.update(file.read(min(end, _EDGE)))
    return digest.hexdigest()


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

    `convert`: makes a window of rows of the files. Its messages name a row as `TABLE, row index N`. `buffer_size`:
    items among which the next one is chosen at random; 1 keeps the order of the files.
    """

    def __init__(
        self, source: Source, convert: Callable[[list[Row]], W], buffer_size: int, window: int = WINDOW
    ) -> None:
        self.files: list[RowFile] = open_files(source)
        self.buffer_size = buffer_size
        self._source, self._convert, self._size = source, convert, window
        self._checks: dict[str, Callable[[W], object]] = {}
        self._reference: list[tuple[Place, Row]] = []
        rows = next(filter(None, (self._read_from(file, 0)[0] for file in range(len(self.files)))), [])
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

        `name`: name of the check; another check of this name is replaced.
        """
        with self._naming(self._places):
            check(self.first)
        self._checks[name] = check

    def read_window(self, file: int, place: int) -> tuple[list[tuple[Place, Any]], int | None]:
        """Return the items of the next window of a file with their places, and the place after it; None at the end."""
        try:
            rows, end = self._read_from(file, place)
            return self._converted(rows), (end if len(rows) == self._size else None)
        except (ConfigError, DataError, OSError) as error:
            raise StreamedDataError(str(error)) from error

    def read(self, places: Sequence[Place]) -> dict[Place, Any]:
        """Return the items at some places; dropped ones are missing."""
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
        return [(place, item) for (place, _), item in zip(rows, window.items(), strict=True) if item is not None][1:]

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


_OTHER_CONTENT = ("with another content of the data", "with the same data, tokenizer and max_length")


def check_same(is_same: bool, made: str, remedy: str = "with the same data", note: str = "") -> None:
    """Check that a checkpoint can be resumed with the present data."""
    if not is_same:
        remedy = f"resume {remedy}, or start over from the weights"
        raise CheckpointError(f"the checkpoint was made {made}: {remedy}{note}")


T = TypeVar("T")


class ShuffledStream(Generic[T]):
    """Endless items of a streamed table. Every item occurs once in an epoch, and each epoch has another order.

    The files are taken in a random order. Their items fill a buffer, from which the next item is drawn at random. A
    buffer of one item keeps the order of the files and of their rows. Memory holds the buffer, the items of the next
    call of `take`, and the first and the current window.
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
        """Return the next `count` items, or as many as are left in the epoch; at least one."""
        return [item for _, item in self.take_placed(count)]

    def take_placed(self, count: int) -> list[tuple[Place, T]]:
        """Return the next items as `take` does, each with its place: the number of the file, and the place in it.

        All rows that the call needs are read before an item is returned. An error therefore leaves the state unchanged.
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
        """Continue from another stream's position, with its seed. The buffer's rows are read again."""
        check_same("order" in state, "without streaming", "without it")
        table, num_files = self._table, len(state["order"])
        made = f"with {counted(num_files, 'file')} of data; now there are {len(table.files)}"
        check_same(num_files == len(table.files), made)
        self._seed = state["seed"]
        self._begin(state["epoch"])
        self._order = list(state["order"])
        self._turn, self._place = state["next"]
        self._check_unchanged(state)
        self._num_dealt = state["dealt"]
        self._random.bit_generator.advance(self._num_dealt)  # type: ignore[attr-defined]
        places: list[Place] = [(file, place) for file, place in state["buffer"]]
        found = table.read(places)
        check_same(len(found) == len(places), *_OTHER_CONTENT)
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
        self._whole = cache(lambda file: self._table.files[file].digest(None))

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
        digests = {str(file): self._whole(file) for file in whole}
        if not self._epoch and turn < len(self._order) and place:
            file = self._order[turn]
            digests[str(file)] = self._table.files[file].digest(place)
        return digests

    def _check_unchanged(self, state: Mapping[str, Any]) -> None:
        check_same(state["content"] == self._table.content, *_OTHER_CONTENT)
        digests = self._digests(*state["next"])
        for file, digest in state["read"].items():
            if digests[file] != digest:
                changed = f"{self._table.files[int(file)].name} was changed in the part that the run has read"
                raise CheckpointError(f"{changed}: resume with the same data, or start over from the weights")
