"""Columnar tables: Parquet and Arrow files, and what the `datasets` library reads.

Damage in such a file can kill the process that reads it. A process of its own reads it, checks each batch of rows, and
hands it on as Arrow's stream format; this one touches the file not at all.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlite.errors import ConfigError, DataError, did_you_mean
from rlite.sandbox.stream import StreamError, stream

ROWS = 1024
"""of a batch"""


def read_columnar(kind: str, path: str, where: str, *options: Any) -> list[dict[str, Any]]:
    """The rows of a table whose objects all have the same keys: null stands for a key that one lacked.

    In messages and tools such nulls go, or a template would write them out as arguments of a call.

    Args:
        kind: parquet, arrow or dataset.
        path: of the file or folder, or the name of a dataset.
        where: for messages.
        options: of a dataset: whether it is saved, whether it is a folder, and the split or None.

    Raises:
        DataError: it is damaged, with the rows before the damage.
        ConfigError: there is no such dataset or split, or the datasets library is missing.
    """
    rows: list[dict[str, Any]] | None = None
    try:
        pieces = io.BufferedReader(_Pieces(stream(f"{__name__}:send_{kind}", path, where, *options)))
        with pa.ipc.open_stream(pieces) as batches:
            rows = []
            for batch in batches:
                batch.validate(full=True)
                rows += map(_without_added_nulls, batch.to_pylist())
        return rows
    except (StreamError, DataError, pa.ArrowException) as error:
        place = f"{where}: " if rows is None else f"{where}, row index {len(rows)} or one after it: "
        raise DataError(f"{place}{_KINDS[kind]}: {error}") from error


_KINDS = {"parquet": "not a Parquet file", "arrow": "not an Arrow file", "dataset": "cannot be read"}


def _without_added_nulls(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, **{name: _without_nulls(row[name]) for name in ("messages", "tools") if name in row}}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


class _Pieces(io.RawIOBase):
    """An iterator of bytes as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """What Arrow raises because of a damaged file is a DataError."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise DataError(str(error)) from error


# -- in the process that reads -------------------------------------------------------------------------------------


def send_parquet(path: str, where: str) -> Iterator[bytes]:
    """Yield a Parquet file in Arrow's stream format. Raises: DataError."""
    with _damage():
        file = pq.ParquetFile(path)
        yield from _sent(file.schema_arrow, file.iter_batches(ROWS))


def send_arrow(path: str, where: str) -> Iterator[bytes]:
    """Yield an Arrow file, of either format, in the stream format. Raises: DataError."""
    with _damage(), pa.memory_map(path) as file:
        try:
            reader = pa.ipc.open_file(file)
        except pa.ArrowInvalid:  # without a footer: the stream format, which `datasets` writes
            file.seek(0)
            stream_reader = pa.ipc.open_stream(file)
            yield from _sent(stream_reader.schema, stream_reader)
        else:
            yield from _sent(reader.schema, map(reader.get_batch, range(reader.num_record_batches)))


def send_dataset(name: str, where: str, is_saved: bool, is_folder: bool, split: str | None) -> Iterator[bytes]:
    """Yield one split of what the `datasets` library reads: its folders, folders of data files, and the hub.

    Raises: ConfigError; DataError.
    """
    try:
        datasets = importlib.import_module("datasets")  # here: it takes seconds, and most tables are files
    except ImportError as error:
        what = "a folder" if is_folder else "no file, and to look it up on the Hugging Face hub"
        raise ConfigError(f"{where}: {what} needs the datasets library: pip install 'rlite[data]'") from error
    try:
        found = datasets.load_from_disk(name) if is_saved else datasets.load_dataset(name)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        what = "cannot be read" if is_folder else "no such file or folder, and no dataset of the Hugging Face hub"
        raise ConfigError(f"{where}: {what}: {error}") from error
    if not isinstance(found, Mapping):  # one table, saved without splits
        found = {"train": found}
    split = split or (next(iter(found)) if len(found) == 1 else "train")
    if split not in found:
        path = where.rpartition("@")[2] if "@" in where else where.partition("=")[2]
        raise ConfigError(f"{where}: no split {split!r}; {did_you_mean(split, found)}; write SPLIT@{path}")
    with _damage():
        table = found[split].with_format("arrow")
        batches = (batch for part in table.iter(ROWS) for batch in part.to_batches())
        yield from _sent(table.features.arrow_schema, batches)


def _sent(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema) as writer:
        yield _taken(sink)
        for batch in batches:
            batch.validate(full=True)
            for start in range(0, batch.num_rows, ROWS):
                writer.write_batch(batch.slice(start, ROWS))
                yield _taken(sink)
    yield _taken(sink)


def _taken(sink: io.BytesIO) -> bytes:
    data = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return data
