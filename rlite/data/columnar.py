"""Read columnar tables: Parquet and Arrow files, and tables of the `datasets` library.

A damaged file can kill the process that reads it. Therefore a sandbox process reads the file, checks each batch of
rows, and sends it in Arrow's stream format. This process never opens the file.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlite.errors import ConfigError, DataError, did_you_mean
from rlite.sandbox.child import printable
from rlite.sandbox.errors import SandboxError
from rlite.sandbox.function import stream

ROWS = 1024
"""rows of a batch"""
PIECE = 1 << 20
"""bytes that the reader sends at a time"""
MESSAGE_COLUMNS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected", "tools")
"""columns that may hold messages"""


def read_columnar(kind: str, path: Path, where: str, *options: Any, first: int = 0) -> list[dict[str, Any]]:
    """Return the rows of a table. All rows have the same keys, and null stands for a key that an object lacked.

    In messages and tools such nulls are removed. Otherwise a template would render them as arguments of a call. Texts
    of Arrow's JSON type, the type of `datasets.Json`, are read as JSON.

    Args:
        kind: parquet, parquet rows, arrow or dataset.
        path: path of the file or folder, or the name of a dataset.
        where: description of the table for error messages.
        *options: for a dataset: whether it is saved, whether it is a folder, the split or None, and the subset or None.
            For parquet rows: the numbers of the rows to read, which ascend.
        first: number of the first row that is read, for error messages.

    Returns:
        The rows as dicts.

    Raises:
        DataError: the table is damaged. The message gives the number of rows before the damage.
        ConfigError: there is no such dataset or split, or the datasets library is missing.
    """
    rows: list[dict[str, Any]] | None = None
    try:
        pieces = io.BufferedReader(_Pieces(_received(kind, path.as_posix(), where, options)))
        with pa.ipc.open_stream(pieces) as batches:
            rows = []
            for batch in batches:
                batch.validate(full=True)
                rows += map(without_added_nulls, batch.to_pylist())
            pieces.read()  # to the reader's own end
    except (SandboxError, DataError, pa.ArrowException) as error:
        place = f"{where}: " if rows is None else f"{where}, row index {first + len(rows)} or one after it: "
        raise DataError(f"{place}{_KINDS[kind]}: {error}") from error
    for column in batches.schema:
        if _JSON in str(column.type):
            for number, row in enumerate(rows, first):
                row[column.name] = _with_json(row[column.name], column.type, f"{where}, row index {number}")
    return rows


_JSON = "arrow.json"
"""name of Arrow's type of JSON texts"""


def _with_json(value: Any, kind: pa.DataType, where: str) -> Any:
    """Return a value of a type whose JSON texts are read.

    Raises:
        DataError: a text is not valid JSON.
    """
    if value is None or _JSON not in str(kind):
        return value
    if isinstance(value, dict):
        return {name: _with_json(item, kind.field(name).type, where) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_json(item, kind.value_type, where) for item in value]
    try:
        return json.loads(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{where}: a column of JSON holds {value!r:.100}: {error}") from error


_KINDS = {
    "parquet": "not a Parquet file",
    "parquet rows": "not a Parquet file",
    "arrow": "not an Arrow file",
    "dataset": "cannot be read",
}


def without_added_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of Arrow's, whose messages and tools have no key that is null."""
    return {**row, **{name: without_nulls(row[name]) for name in MESSAGE_COLUMNS if name in row}}


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of its objects that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _received(kind: str, path: str, where: str, options: Sequence[Any]) -> Iterator[bytes]:
    """Yield the bytes that the reader sends.

    Raises:
        ConfigError: the reader reported a mistake of the user.
        DataError: the table is damaged, or the reader's answer has the wrong form.
        SandboxError: the reader's process failed.
    """
    is_kept = kind == "parquet rows"  # a few rows at a time, and often
    keywords = {"kind": kind, "path": path, "where": where, "options": list(options)}
    failure = yield from stream(send, f"the reader of {path}", is_kept, **keywords)
    match failure:
        case None:
            return
        case ["ConfigError", str() as text]:
            raise ConfigError(printable(text))
        case ["DataError", str() as text]:
            raise DataError(printable(text))
    raise DataError(f"the reader answered {failure!r:.200}")


class _Pieces(io.RawIOBase):
    """A file of the bytes that an iterator yields."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Return the number of bytes read into the buffer; 0 at the end.

        Raises:
            DataError: the reader sent a value that is not bytes.
        """
        if not self._rest:
            piece = next(self._pieces, b"")
            if not isinstance(piece, bytes):  # the reader is not trusted
                raise DataError(f"the reader sent {piece!r:.200}")
            self._rest = memoryview(piece)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


# -- in the process that reads -------------------------------------------------------------------------------------


def send(kind: str, path: str, where: str, options: Sequence[Any]) -> Generator[bytes, None, list[str] | None]:
    """Yield a table in Arrow's stream format, in pieces.

    Args:
        kind: parquet, parquet rows, arrow or dataset.
        path: path of the file or folder, or the name of a dataset.
        where: description of the table for error messages.
        options: further arguments of the kind.

    Returns:
        The name and the text of a ConfigError, or of a DataError if the table is damaged; None if it was sent.
    """
    try:
        for batch in _SENDERS[kind](path, where, *options):
            for start in range(0, len(batch), PIECE):
                yield batch[start : start + PIECE]
    except ConfigError as error:
        return ["ConfigError", str(error)[:10_000]]
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        return ["DataError", str(error)[:10_000]]
    return None


def _send_parquet(path: str, where: str, numbers: Sequence[int] | None = None) -> Iterator[bytes]:
    """Yield a Parquet file in Arrow's stream format, or rows of it by their numbers, which ascend.

    Numbers past the end of the file are left out.
    """
    file = pq.ParquetFile(path)
    yield from _sent(
        file.schema_arrow, file.iter_batches(ROWS) if numbers is None else _rows_of(file, np.array(numbers))
    )


def _rows_of(file: pq.ParquetFile, numbers: np.ndarray) -> Iterator[pa.RecordBatch]:
    end = 0
    for group in range(file.num_row_groups):
        start, end = end, end + file.metadata.row_group(group).num_rows
        wanted = numbers[(numbers >= start) & (numbers < end)]
        if not wanted.size:
            continue
        for batch in file.iter_batches(ROWS, row_groups=[group]):
            places = wanted[(wanted >= start) & (wanted < start + batch.num_rows)] - start
            if places.size:
                yield batch.take(pa.array(places))
            start += batch.num_rows
            if start > wanted[-1]:
                break


def _send_arrow(path: str, where: str) -> Iterator[bytes]:
    """Yield an Arrow file, of either format, in the stream format."""
    with pa.memory_map(path) as file:
        try:
            reader = pa.ipc.open_file(file)
        except pa.ArrowInvalid:  # without a footer: the stream format, which `datasets` writes
            file.seek(0)
            stream_reader = pa.ipc.open_stream(file)
            yield from _sent(stream_reader.schema, stream_reader)
        else:
            yield from _sent(reader.schema, map(reader.get_batch, range(reader.num_record_batches)))


def _send_dataset(
    name: str, where: str, is_saved: bool, is_folder: bool, split: str | None, subset: str | None
) -> Iterator[bytes]:
    """Yield one split of a dataset: a folder that `datasets` saved, a folder of data files, or a name on the hub.

    Raises:
        ConfigError: there is no such dataset, subset or split, or the datasets library is missing.
    """
    try:
        datasets = importlib.import_module("datasets")  # here: it takes seconds, and most tables are files
    except ImportError as error:
        what = "a folder" if is_folder else "no file, and to look it up on the Hugging Face hub"
        raise ConfigError(f"{where}: {what} needs the datasets library: pip install 'rlite[data]'") from error
    try:
        found = datasets.load_from_disk(name) if is_saved else datasets.load_dataset(name, subset)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, ValueError):  # others are of the network, which would be waited for again
            _check_subset(datasets, name, where, subset)
        what = "cannot be read" if is_folder else "no such file or folder, and no dataset of the Hugging Face hub"
        raise ConfigError(f"{where}: {what}: {error}") from error
    if not isinstance(found, Mapping):  # one table, saved without splits
        found = {"train": found}
    split = split or (next(iter(found)) if len(found) == 1 else "train")
    if split not in found:
        raise ConfigError(f"{where}: no split {split!r}; {did_you_mean(split, found)}; write SPLIT@{_path_in(where)}")
    table = found[split].with_format("arrow")
    batches = (batch for part in table.iter(ROWS) for batch in part.to_batches())
    yield from _sent(table.features.arrow_schema, batches)


def _check_subset(datasets: Any, name: str, where: str, subset: str | None) -> None:
    """Check that a dataset has a subset, or needs none. A dataset that cannot be looked up passes.

    Raises:
        ConfigError: it has no such subset, or several, and none is chosen.
    """
    try:
        known = datasets.get_dataset_config_names(name)
    except Exception:  # what is wrong with the dataset is reported by the caller
        return
    path = _path_in(where).removesuffix(f":{subset}")
    if subset is None and len(known) > 1:
        raise ConfigError(f"{where}: the dataset has the subsets {', '.join(known)}; write {path}:SUBSET")
    if subset is not None and subset not in known:
        near = did_you_mean(subset, known)
        near = near if near.startswith("known") else f"{near} Known: {', '.join(known)}"
        raise ConfigError(f"{where}: no subset {subset!r}; {near}; write {path}:SUBSET")


def _path_in(where: str) -> str:
    """Return the path, without the split, that a table's name in messages holds."""
    return where.rpartition("@")[2] if "@" in where else where.partition("=")[2]


_SENDERS: dict[str, Callable[..., Iterator[bytes]]] = {
    "parquet": _send_parquet,
    "parquet rows": _send_parquet,
    "arrow": _send_arrow,
    "dataset": _send_dataset,
}


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
