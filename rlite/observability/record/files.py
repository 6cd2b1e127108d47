"""The files of a record, which appear whole or not at all.

FOLDER/record/train-00000012.rows.parquet          what step 12 decided
FOLDER/record/train-00000012.tokens.parquet        tokens of some of its rollouts
FOLDER/record/eval.NAME-00000012.rows.parquet      the evaluation of set NAME after step 12
FOLDER/record/train-00000001_00000100.rows.parquet steps 1 to 100, compacted

The steps follow the last hyphen, so a NAME may end in a hyphen and digits.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from rlite import files
from rlite.errors import writing

FOLDER = "record"
TRAIN = "train"
DAMAGED = ".damaged"
"""suffix of a file that a resumed run can neither read nor cut"""
TOKEN_ROWS = 8
"""sequences that are read together, to show one"""
ROW_BYTES = 16 << 20
"""rollouts that are read together, to show one: about a millisecond more for each such part when all are read"""
Kind = Literal["rows", "tokens"]
_NAME = re.compile(r"(train|eval\.[\w.-]+)-([0-9]{8,})(?:_([0-9]{8,}))?\.(rows|tokens)\.parquet")


@dataclass(frozen=True)
class RecordFile:
    """One file of a record."""

    path: Path
    source: str
    """`train`, or `eval.NAME`"""
    first: int
    last: int
    """first and last step"""
    kind: str
    """rows or tokens"""

    def covers(self, other: RecordFile) -> bool:
        """Return whether this file holds what another file holds, and further steps."""
        is_alike = (self.source, self.kind) == (other.source, other.kind)
        return is_alike and self != other and self.first <= other.first and other.last <= self.last


def all_files(folder: Path) -> list[RecordFile]:
    """Return the files of the record in a run's folder, by name, also those that a compacted file covers.

    Pipes, sockets and links to nothing are no files of the record.
    """
    found = []
    for path in sorted((folder / FOLDER).glob("*.parquet")):
        if (match := _NAME.fullmatch(path.name)) and os.path.isfile(path):
            source, first, last, kind = match.groups()
            found.append(RecordFile(path, source, int(first), int(last or first), kind))
    return found


def record_files(folder: Path) -> Iterator[RecordFile]:
    """Yield the files of the record in a run's folder, by name; each step is in one file of its source and kind."""
    found = all_files(folder)
    compacted = [file for file in found if file.first < file.last]
    yield from (file for file in found if not any(wide.covers(file) for wide in compacted))


def damaged_files(folder: Path) -> list[Path]:
    """Return the damaged files that a resumed run has set aside, by name."""
    return sorted((folder / FOLDER).glob(f"*{DAMAGED}"))


def used_bytes(folder: Path) -> int:
    """Return the bytes of all files of the record in a run's folder, whatever they are."""
    return sum(size_of(path) for path in (folder / FOLDER).glob("*"))


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 if there is none."""
    return (files.stamp(path) or (0, 0))[1]


def path_of(folder: Path, source: str, kind: str, first: int, last: int) -> Path:
    """Return the path of the file of some steps.

    Args:
        folder: the run's folder.
        source: `train`, or `eval.NAME`.
        kind: rows or tokens.
        first: first step.
        last: last step.
    """
    steps = f"{first:08d}" if first == last else f"{first:08d}_{last:08d}"
    return folder / FOLDER / f"{source}-{steps}.{kind}.parquet"


def write_table(folder: Path, source: str, step: int, kind: Kind, table: pa.Table) -> Path:
    """Write one table of a step; an older table of the same step is replaced.

    Args:
        folder: the run's folder.
        source: `train`, or `eval.NAME`.
        step: step of the run.
        kind: which table.
        table: table of the schema `ROWS` or `TOKENS`.

    Returns:
        The file.

    Raises:
        StorageError: the file cannot be written.
    """
    path = path_of(folder, source, kind, step, step)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = io.BytesIO()
        size = TOKEN_ROWS if kind == "tokens" else max(ROW_BYTES * len(table) // max(table.nbytes, 1), 1)
        pq.write_table(table, stream, compression="zstd", row_group_size=size)
        files.replace(path, stream.getvalue())
    return path
