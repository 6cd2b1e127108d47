"""Files whose rows are read a few at a time: JSON lines by byte offset, Parquet by row number. No torch here."""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from rlite.data.columnar import read_columnar
from rlite.data.source import Source
from rlite.data.streaming.program import ProgramRows
from rlite.data.tables import Row, parse_json, parse_path, type_in_words
from rlite.errors import ConfigError, DataError

LONGEST_LINE = 1 << 28
"""bytes of a line at most"""
_EDGE = 1 << 20
"""bytes of each end of a file that its digest covers"""
_BLOCK = 1 << 20


class JsonLinesFile:
    """A file of JSON objects, one per line. A row's place is the byte offset of its line.

    Args:
        path: the file.
        key: group of options that names the file, for messages.

    Raises:
        ConfigError: the file holds a JSON array.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.name = f"{key}.path={path}"
        with path.open("rb") as file:
            if file.read(_BLOCK).removeprefix(BOM_UTF8).lstrip().startswith(b"["):
                raise ConfigError(
                    f"{self.name}: a JSON array is read as a whole; write one object per line to stream it, or leave "
                    f"{key}.streaming out"
                )

    def read_from(self, place: int, count: int) -> tuple[list[tuple[int, Row]], int]:
        """Return `count` rows with their places, or as many as are left, and the place after them.

        Raises:
            DataError: a line is no JSON object.
        """
        rows: list[tuple[int, Row]] = []
        with self.path.open("rb") as file:
            file.seek(place)
            while len(rows) < count and (line := self._line(file, place)):
                if line.strip(BOM_UTF8 + b" \t\r\n"):
                    rows.append((place, self._row(line, place)))
                place += len(line)
        return rows, place

    def read(self, places: Sequence[int]) -> list[Row]:
        """Return the rows at these places.

        Raises:
            DataError: a line is no JSON object.
        """
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
            while place > 0 and (block := file.read(min(place, _BLOCK))):
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
        row = parse_json(text, lambda _: self.name_of(place))
        if not isinstance(row, dict):
            raise DataError(f"{self.name_of(place)}: expected an object, found {type_in_words(row)}")
        return row


class ParquetFile:
    """A Parquet file. A row's place is its number. A sandbox process reads it.

    Args:
        path: the file.
        key: group of options that names the file, for messages.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.name = f"{key}.path={path}"

    def read_from(self, place: int, count: int) -> tuple[list[tuple[int, Row]], int]:
        """Return `count` rows with their places, or as many as are left, and the place after them.

        Raises:
            DataError: the file is damaged.
        """
        rows = self._rows(range(place, place + count))
        end = place + len(rows)
        return list(zip(range(place, end), rows, strict=True)), end

    def read(self, places: Sequence[int]) -> list[Row]:
        """Return the rows at these places.

        Raises:
            DataError: the file is damaged, or has fewer rows.
        """
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
        rows = read_columnar("parquet rows", self.path, self.name, list(places), first=places[0])
        if len(rows) > len(places):  # the reader is not trusted
            raise DataError(f"{self.name}: the reader sent {len(rows)} rows and was asked for {len(places)}")
        return rows


RowFile = JsonLinesFile | ParquetFile | ProgramRows
"""A file of rows. The place of a row is a number that finds it without reading the rows before it."""
_KINDS: dict[str, type[JsonLinesFile] | type[ParquetFile]] = {
    ".jsonl": JsonLinesFile,
    ".json": JsonLinesFile,
    ".parquet": ParquetFile,
}
_IN_FOLDERS = (".jsonl", ".parquet")  # .json in a folder describes it


def open_files(source: Source) -> list[RowFile]:
    """Return the files of a table that is streamed.

    Args:
        source: a file, or a folder of files, which are taken in the order of their names. `split@folder` takes the
            files whose names begin with the split; the default is train, if there are such files.

    Raises:
        ConfigError: there are no such files, this kind of table cannot be streamed, or a part of a split is asked for.
    """
    where, key = source.where, source.key
    if source.rows is not None:
        return [ProgramRows(source.rows, key)]
    split, path, subset = parse_path(source.path, where)
    if subset or (split and (path.is_file() or split["start"] or split["stop"])):
        raise ConfigError(
            f"{where}: {key}.streaming=true reads whole files, or split@folder; leave out parts and subsets"
        )
    if not path.exists() and path.suffix in _KINDS:
        raise ConfigError(f"{where}: no such file")
    paths = _files_in(path, split["name"] if split else None) if path.is_dir() else [path] if path.is_file() else []
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
