"""Read tables of rows from files, folders and the Hugging Face hub, before anything is started."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from rlite.data.columnar import read_columnar
from rlite.errors import ConfigError, DataError, did_you_mean, similar_file

Row = dict[str, Any]

JSON_COLUMNS = ("messages", "conversations", "tools", "extra_info")
"""columns whose cells hold JSON where the file has nothing but text (CSV)"""
STRUCTURED_COLUMNS = ("prompt", "response", "completion", "chosen", "rejected")
"""columns whose cells hold a text, or messages as JSON"""
NESTED_COLUMNS = ("history", "reward_model", "input_ids")
"""columns whose cells hold JSON if they look like JSON"""

NULL = "null; drop the row, or fill the column"
NOTHING_RENAMED: Mapping[str, str | None] = {}
_MESSAGES = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
"""keys that a message has"""
_PYTHON_MESSAGES = re.compile(r"\s*\[?\s*\{\s*'(role|from|content|value)'\s*:")

_SUBSET = re.compile(r"(?P<path>.+):(?P<subset>[\w.+-]+)")
_SPLIT = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def read_rows(
    source: str | Path, key: str = "data.path", columns: Mapping[str, str | None] = NOTHING_RENAMED
) -> list[Row]:
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
            raise DataError(
                f"{where}, row index {number}: expected an object of named columns, found {type_in_words(row)}"
            )
    return rows


def check_exists(source: str | Path, key: str) -> None:
    """Check that a table exists if it can only be a file. Arguments are those of `read_rows`.

    Raises:
        ConfigError: there is no such file, or the split has another form.
    """
    where = f"{key}={source}"
    path = parse_path(str(source), where)[1]
    is_missing = not path.is_file() and not path.is_dir()
    if path.suffix in _READERS and is_missing:
        raise ConfigError(f"{where}: no such file{similar_file(path)}")
    if not path.exists() and get_close_matches(path.suffix, _READERS):
        raise ConfigError(f"{where}: no such file{similar_file(path) or f'; {did_you_mean(path.suffix, _READERS)}'}")


def check_columns(row: Mapping[str, Any], columns: Mapping[str, type | tuple[type, ...]], where: str) -> None:
    """Check that a row holds each column in its type.

    Args:
        row: values by column.
        columns: expected type or types of each column.
        where: description of the row for error messages.

    Raises:
        DataError: a column is missing or has the wrong type. The message names the column.
    """
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
    """Check that a text can be tokenised. In JSON a text may hold a lone surrogate.

    Raises:
        DataError: the text holds a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode-escape").decode()
        raise DataError(f"{where} holds a lone surrogate, {half}, at character {error.start}") from error


def parse_path(source: str, where: str) -> tuple[re.Match[str] | None, Path, str | None]:
    """Return the split, the path and the subset that a source names.

    Args:
        source: `split@path:subset`, of which split and subset may be missing.
        where: the table's name in messages.

    Raises:
        ConfigError: the split has another form.
    """
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
            row = parse_json(line, lambda _, number=number: f"{where}, line {number}")  # type: ignore[misc]
            if not isinstance(row, dict):
                raise DataError(f"{where}, line {number}: expected an object, found {type_in_words(row)}")
            yield row


def parse_json(text: str, place: Callable[[int], str]) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the JSON text.
        place: describes the position of an error, a character's index.

    Raises:
        DataError: the text is not valid JSON, is nested too deep, or holds too long a number.
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
        raise DataError(
            f"{place(position)}: a whole number of {length} digits; at most {most} are read: make it a text"
        ) from error


def _deepest(text: str) -> tuple[int, int]:
    """Return the depth of the deepest nesting in a JSON text, and its position."""
    depth, deepest = 0, (0, 0)
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', text):
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
    """Return rows of texts whose JSON is read.

    Args:
        rows: rows of a CSV file.
        names: the table's names of columns -> rlite's.
        where: the table's name in messages.
    """
    return [
        {own: _cell(names.get(own, own), text, f"{where}, row index {n}: {own!r}") for own, text in row.items()}
        for n, row in enumerate(rows)
    ]


def _cell(column: str, text: str, where: str) -> Any:
    """Return the value of a cell.

    Raises:
        DataError: a cell that holds JSON is not valid, or holds messages in Python's notation.
    """
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
    """Return rows that only the `datasets` library can read: its own folders, folders of data files, and the hub.

    Raises:
        ConfigError: there is no such file or folder, or a saved dataset is asked for a subset.
    """
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
