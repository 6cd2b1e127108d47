"""The files of a record, which appear whole or not at all.

FOLDER/record/train-00000012.rows.parquet          what step 12 decided
FOLDER/record/train-00000012.tokens.parquet        tokens of some of its rollouts
FOLDER/record/eval.NAME-00000012.rows.parquet      the evaluation of set NAME after step 12
FOLDER/record/train-00000001-00000100.rows.parquet steps 1 to 100, compacted
"""

from __future__ import annotations

import io
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
TOKEN_ROWS = 8
"""sequences that are read together, to show one"""
Kind = Literal["rows", "tokens"]
_NAME = re.compile(r"(train|eval\.[\w.-]+?)-(\d{8})(?:-(\d{8}))?\.(rows|tokens)\.parquet")


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


def record_files(folder: Path) -> Iterator[RecordFile]:
    """Yield the files of the record in a run's folder, by name."""
    for path in sorted((folder / FOLDER).glob("*.parquet")):
        if match := _NAME.fullmatch(path.name):
            source, first, last, kind = match.groups()
            yield RecordFile(path, source, int(first), int(last or first), kind)


def write_table(folder: Path, source: str, step: int, kind: Kind, table: pa.Table) -> Path:
    """Write one table of a step; an older table of the same step is replaced.

    Args:
        folder: the run's folder.
        source: `train`, or `eval.NAME`.
        step: of the run.
        kind: which table.
        table: of the schema `ROWS` or `TOKENS`.

    Returns:
        The file.

    Raises:
        StorageError: the file cannot be written.
    """
    path = folder / FOLDER / f"{source}-{step:08d}.{kind}.parquet"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = io.BytesIO()
        size = TOKEN_ROWS if kind == "tokens" else None
        pq.write_table(table, stream, compression="zstd", row_group_size=size)
        files.replace(path, stream.getvalue())
    return path
