"""Read tables of rows from files, folders and the Hugging Face hub, before anything is started.

A damaged columnar file (Parquet, Arrow, a table of the `datasets` library) can kill the process that reads it.
Therefore a sandbox process reads the file, checks each batch of rows, and sends it in Arrow's stream format. This
process never opens the file.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlite.errors import ConfigError, DataError, did_you_mean, similar_file
from rlite.runtime.sandbox.calls import SandboxError
from rlite.runtime.sandbox.child import printable
from rlite.runtime.sandbox.function import stream

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

    `*options`: for a dataset: whether it is saved, whether it is a folder, the split or None, and the subset or None.
    For parquet: optionally the numbers of the rows to read, which ascend. Returns the rows as dicts.
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
        raise DataError(f"{place}{_COLUMNAR[kind][1]}: {error}") from error
    for column in batches.schema:
        if _JSON in str(column.type):
            for number, row in enumerate(rows, first):
                row[column.name] = _with_json(row[column.name], column.type, f"{where}, row index {number}")
    return rows


_JSON = "arrow.json"
"""name of Arrow's type of JSON texts"""


def _with_json(value: Any, kind: pa.DataType, where: str) -> Any:
    """Return a value of a type whose JSON texts are read."""
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


def without_added_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of Arrow's, whose messages and tools have no key that is null."""
    return {**row, **{name: without_nulls(row[name]) for name in MESSAGE_COLUMNS if name in row}}


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of its objects that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _received(kind: str, path: str, where: str, options: Sequence[Any]) -> Iterator[bytes]:
    """Yield the bytes that the reader sends."""
    is_kept = kind == "parquet" and bool(options)  # a few rows at a time, and often
    there = os.path.abspath(path) if is_kept else path  # a kept process may have begun in another folder
    keywords = {"kind": kind, "path": there, "where": where, "options": list(options)}
    failure = yield from stream(send, f"the reader of {path}", is_kept, **keywords)
    match failure:
        case None:
            return
        case ["ConfigError" | "DataError" as kind, str() as text]:
            raise (ConfigError if kind == "ConfigError" else DataError)(printable(text))
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
        """Return the number of bytes read into the buffer; 0 at the end."""
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

    Returns the name and the text of a ConfigError, or of a DataError if the table is damaged; None if it was sent.
    """
    try:
        for batch in _COLUMNAR[kind][0](path, where, *options):
            yield from (batch[start : start + PIECE] for start in range(0, len(batch), PIECE))
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
    batches = file.iter_batches(ROWS) if numbers is None else _rows_of(file, np.array(numbers))
    yield from _sent(file.schema_arrow, batches)


def _rows_of(file: pq.ParquetFile, numbers: np.ndarray) -> Iterator[pa.RecordBatch]:
    end = 0
    for group in range(file.num_row_groups):
        start, end = end, end + file.metadata.row_group(group).num_rows
        wanted = numbers[(numbers >= start) & (numbers < end)]
        for batch in file.iter_batches(ROWS, row_groups=[group]) if wanted.size else ():
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
            reader: Any = pa.ipc.open_file(file)
            batches: Any = map(reader.get_batch, range(reader.num_record_batches))
        except pa.ArrowInvalid:  # without a footer: the stream format, which `datasets` writes
            file.seek(0)
            reader = batches = pa.ipc.open_stream(file)
        yield from _sent(reader.schema, batches)


def _send_dataset(
    name: str, where: str, is_saved: bool, is_folder: bool, split: str | None, subset: str | None
) -> Iterator[bytes]:
    """Yield one split of a dataset: a folder that `datasets` saved, a folder of data files, or a name on the hub."""
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
    yield from _sent(table.features.arrow_schema, (batch for part in table.iter(ROWS) for batch in part.to_batches()))


def _check_subset(datasets: Any, name: str, where: str, subset: str | None) -> None:
    """Check that a dataset has a subset, or needs none. A dataset that cannot be looked up passes."""
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


_COLUMNAR: dict[str, tuple[Callable[..., Iterator[bytes]], str]] = {
    "parquet": (_send_parquet, "not a Parquet file"),
    "arrow": (_send_arrow, "not an Arrow file"),
    "dataset": (_send_dataset, "cannot be read"),
}
"""kind of table -> the function that sends it, and what a damaged table is"""


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


Row = dict[str, Any]

JSON_COLUMNS = ("messages", "conversations", "tools", "extra_info")
"""columns whose cells hold JSON where the file has nothing but text (CSV)"""
STRUCTURED_COLUMNS = ("prompt", "response", "completion", "chosen", "rejected")
"""columns whose cells hold a text, or messages as JSON"""
NESTED_COLUMNS = ("history", "reward_model", "input_ids")
"""columns whose cells hold JSON if they look like JSON"""

NULL = "null; drop the row, or fill the column"
_MESSAGES = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
"""keys that a message has"""
_PYTHON_MESSAGES = re.compile(r"\s*\[?\s*\{\s*'(role|from|content|value)'\s*:")

_SUBSET = re.compile(r"(?P<path>.+):(?P<subset>[\w.+-]+)")
_SPLIT = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def read_rows(source: str | Path, key: str = "data.path", columns: Mapping[str, str | None] = {}) -> list[Row]:
    """Return the rows of a table, as dicts.

    Args:
        source: a file, a folder that `datasets` saved or can load, or a dataset's name on the Hugging Face hub. Files
            are `.json` (an array or one object per line), `.jsonl`, `.csv`, `.parquet` and `.arrow`. `split@source`
            chooses a split (default: train, or the only split) or a part of it: `train[:90%]@rows.jsonl`,
            `test[100:200]@org/name`. The only split of a file is train. `source:subset` chooses a subset (a config) of
            a dataset: `test@org/name:subset`. CSV cells are text. Cells of JSON_COLUMNS are read as JSON, and messages
            in STRUCTURED_COLUMNS.
        key: name of the option whose value is `source`, for error messages.
        columns: rlite's names of columns -> the table's names.

    Raises:
        ConfigError: there is no such file, folder, split or dataset, this kind of file cannot be read, or a package for
            it (`rlite[data]`) is missing.
        DataError: the file is damaged, is not a table, or has no rows. The message names the line or row.
    """
    where = f"{key}={source}"
    check_exists(source, key)
    split, path, subset = parse_path(str(source), where)
    if path.is_dir() or not (path.suffix in _READERS or path.exists()):
        rows = _dataset(path, split["name"] if split else None, subset, where)
    elif path.suffix not in _READERS:
        raise ConfigError(f"{where}: {path.suffix or 'no suffix'} is no kind of table; known: {', '.join(_READERS)}")
    elif subset:
        raise ConfigError(f"{where}: a file has no subsets; leave out :{subset}")
    elif split and split["name"] != "train":
        raise ConfigError(f"{where}: a file has the one split train, of which train[:90%]@{path} is a part")
    else:
        rows = _READERS[path.suffix](path, where)
    if path.suffix == ".csv":
        rows = _read_cells(rows, {own: name for name, own in columns.items() if own is not None}, where)
    if split:
        rows = rows[_bound(split["start"], len(rows)) : _bound(split["stop"], len(rows))]
    if not rows:
        raise DataError(f"{where}: no rows; expected at least one")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            found = type_in_words(row)
            raise DataError(f"{where}, row index {number}: expected an object of named columns, found {found}")
    return rows


def check_exists(source: str | Path, key: str) -> None:
    """Check that a table exists if it can only be a file. Arguments are those of `read_rows`."""
    where = f"{key}={source}"
    path = parse_path(str(source), where)[1]
    if path.suffix in _READERS and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{where}: no such file{similar_file(path)}")
    if not path.exists() and get_close_matches(path.suffix, _READERS):
        raise ConfigError(f"{where}: no such file{similar_file(path) or f'; {did_you_mean(path.suffix, _READERS)}'}")


def check_columns(row: Mapping[str, Any], columns: Mapping[str, type | tuple[type, ...]], where: str) -> None:
    """Check that a row holds each column in its type."""
    for column, expected in columns.items():
        value = row.get(column)
        if column in row and is_null(value) and not isinstance(value, expected):
            raise DataError(f"{where}: {column!r} is {NULL}")
        if value is None:
            has = ", ".join(str(name) for name, cell in row.items() if cell is not None) or "nothing"
            raise DataError(f"{where}: no {column!r}; the row has {has}")
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            raise DataError(f"{where}: {column!r} is {type_in_words(value)}; expected {_type_name(expected)}")
        if isinstance(value, str):
            check_text(value, f"{where}: {column!r}")


def is_null(value: Any) -> bool:
    """Return whether a cell holds nothing: null, or pandas' NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def check_text(text: str, where: str) -> None:
    """Check that a text can be tokenised. In JSON a text may hold a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode-escape").decode()
        raise DataError(f"{where} holds a lone surrogate, {half}, at character {error.start}") from error


def parse_path(source: str, where: str) -> tuple[re.Match[str] | None, Path, str | None]:
    """Return the split, the path and the subset that a source names."""
    name, at, rest = source.partition("@")
    split = None
    if at and not Path(source).exists():
        split = _SPLIT.fullmatch(name)
        if not split or not rest:
            raise ConfigError(f"{where}: expected split@path, such as train@org/name or train[:90%]@rows.jsonl")
        source = rest
    subset = None if Path(source).exists() else _SUBSET.fullmatch(source)
    return (split, Path(subset["path"]), subset["subset"]) if subset else (split, Path(source), None)


def _bound(text: str | None, num_rows: int) -> int | None:
    if text is None:
        return None
    return round(num_rows * int(text[:-1]) / 100) if text.endswith("%") else int(text)


def _text(path: Path, where: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start}") from error


def _read_json(path: Path, where: str) -> list[Any]:
    text = _text(path, where)
    if not text.lstrip().startswith("["):  # many .json files hold one object per line
        return list(_json_lines(text, where))
    return parse_json(text, lambda position: f"{where}, line {text.count(chr(10), 0, position) + 1}")


def _json_lines(text: str, where: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() cuts texts at U+2028, too
        if line.strip():
            yield parse_object(line, partial("{}, line {}".format, where, number))


def parse_json(text: str, place: Callable[[int], str]) -> Any:
    """Return the value of a JSON text.

    `text`: the JSON text.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{place(error.pos)}: not valid JSON: {error}") from error
    except RecursionError as error:
        depth, position = _deepest(text)
        raise DataError(f"{place(position)}: JSON that is nested {depth} deep; Python reads less") from error
    except ValueError as error:  # it protects itself from converting them
        most = sys.get_int_max_str_digits()
        digits = re.search(rf"\d{{{most + 1},}}", text)
        position, length = (digits.start(), len(digits[0])) if digits else (0, most + 1)
        long = f"a whole number of {length} digits; at most {most} are read: make it a text"
        raise DataError(f"{place(position)}: {long}") from error


def parse_object(text: str, place: Callable[[], str]) -> Row:
    """Return the object of a JSON text.

    `text`: the JSON text.
    """
    row = parse_json(text, lambda _: place())
    if not isinstance(row, dict):
        raise DataError(f"{place()}: expected an object, found {type_in_words(row)}")
    return row


def _deepest(text: str) -> tuple[int, int]:
    """Return the depth of the deepest nesting in a JSON text, and its position."""
    depth, deepest = 0, (0, 0)
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', text):  # one by one: the text may hold millions
        if token[0] in "[{":
            depth += 1
            deepest = max(deepest, (depth, -token.start()))
        elif token[0] in "]}":
            depth -= 1
    return deepest[0], -deepest[1]


def _read_csv(path: Path, where: str) -> list[Row]:
    limit = csv.field_size_limit(path.stat().st_size + 1)  # a cell may hold a long document
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            rows: list[Row] = []
            for row in reader:
                if None in row or None in row.values():
                    columns = len(reader.fieldnames or ())
                    raise DataError(f"{where}, line {reader.line_num}: expected {columns} cells, as in the first line")
                rows.append(row)
            return rows
    except csv.Error as error:
        raise DataError(f"{where}, line {reader.reader.line_num}: not valid CSV: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start}") from error
    finally:
        csv.field_size_limit(limit)


def _read_cells(rows: Sequence[Row], names: Mapping[str, str], where: str) -> list[Row]:
    """Return rows of texts whose JSON is read."""
    return [
        {own: _cell(names.get(own, own), text, f"{where}, row index {n}: {own!r}") for own, text in row.items()}
        for n, row in enumerate(rows)
    ]


def _cell(column: str, text: str, where: str) -> Any:
    """Return the value of a cell."""
    if column in JSON_COLUMNS:
        return parse_json(text, lambda _: where) if text else None
    if column in STRUCTURED_COLUMNS and _PYTHON_MESSAGES.match(text):
        raise DataError(f"{where} holds messages in Python's notation; write them with json.dumps")
    if column in (*STRUCTURED_COLUMNS, *NESTED_COLUMNS) and text.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            value = json.loads(text)
            return value if column in NESTED_COLUMNS or _are_messages(value) else text
    return text


def _are_messages(value: Any) -> bool:
    """Return whether a value of JSON is a message, or a list of messages."""
    messages = value if isinstance(value, list) else [value]
    return bool(messages) and all(
        isinstance(each, dict) and any(each.keys() >= keys for keys in _MESSAGES) for each in messages
    )


_READERS: dict[str, Callable[[Path, str], list[Any]]] = {
    ".json": _read_json,
    ".jsonl": lambda path, where: list(_json_lines(_text(path, where), where)),
    ".csv": _read_csv,
    ".parquet": partial(read_columnar, "parquet"),
    ".arrow": partial(read_columnar, "arrow"),
}


def _dataset(path: Path, split: str | None, subset: str | None, where: str) -> list[Row]:
    """Return rows that only the `datasets` library can read: its own folders, folders of data files, and the hub."""
    name = path.resolve() if path.is_dir() else path  # `datasets` reads "." as no name
    if not path.is_dir() and not _HUB_NAME.fullmatch(path.as_posix()):
        raise ConfigError(f"{where}: no such file or folder{similar_file(path)}")
    is_saved = any((path / marker).is_file() for marker in ("dataset_dict.json", "state.json"))
    if is_saved and subset:
        raise ConfigError(f"{where}: a folder that datasets saved has no subsets; leave out :{subset}")
    return read_columnar("dataset", name, where, is_saved, path.is_dir(), split, subset)


_TYPE_NAMES = {
    str: "a text",
    list: "a list",
    dict: "an object",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def type_in_words(value: Any) -> str:
    """Return the type of a cell in words, with its value if that is short."""
    if value is None or isinstance(value, (bool, int, float)):
        return f"{type(value).__name__} {value!r}"
    return _TYPE_NAMES.get(type(value), type(value).__name__)


def _type_name(expected: type | Sequence[type]) -> str:
    types = (expected,) if isinstance(expected, type) else expected
    return " or ".join(_TYPE_NAMES.get(one, one.__name__) for one in types)
