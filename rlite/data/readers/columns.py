"""Map the columns of a table to prompts and answers: rename columns, recognise the format, and convert each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from rlite.data.readers.formats import FORMATS, SYSTEM_ROLES, Format, RowKind, format_of, known_columns
from rlite.data.readers.tables import NULL, Row, is_null, type_in_words, without_added_nulls
from rlite.data.source import Source
from rlite.errors import ConfigError, DataError, did_you_mean, own_traceback
from rlite.imports import find_function


def normalise(rows: Sequence[Row], kind: RowKind, source: Source) -> tuple[list[Row], str]:
    """Convert rows to rlite's form. All rows have the format of the first row.

    Returns the rows, and the name of their format.
    """
    where, prompt = source.where, source.system_prompt
    if not rows:
        raise DataError(f"{where}: no rows; expected at least one")
    known = known_columns(kind) - {"margin"}
    rows = _renamed(mapped(rows, source), kind, source)
    lacking = [[name for name in known & row.keys() if row[name] is not None and is_null(row[name])] for row in rows]
    # None in place of pandas' NaN
    rows = [row | dict.fromkeys(names) if names else row for row, names in zip(rows, lacking, strict=True)]
    found = format_of(rows[0], kind)
    if found is None and kind == "prompts" and prompt is None:
        return rows, "rows without a prompt"  # an environment may begin by itself
    if found is None:
        raise DataError(_unrecognised(rows[0], kind, source))
    converted = []
    for number, row in enumerate(rows):
        if (other := format_of(row, kind)) is not found:
            raise DataError(_disagreement(rows[0], found, row, other, f"{where}, row index {number}"))
        converted.append(found.convert(row, f"{where}, row index {number}"))
    if prompt is not None:
        converted = [_with_system(row, prompt, found, where) for row in converted]
    unread = {str(name) for row in rows for name in row} - {*found.known}
    is_said = bool(unread) and kind != "prompts"  # rewards and environments read any column
    return converted, f"{found}; columns not read: {', '.join(sorted(unread))}" if is_said else str(found)


def _renamed(rows: Sequence[Row], kind: RowKind, source: Source) -> list[Row]:
    """Return rows with rlite's names of columns."""
    columns, key, where = source.columns, source.key, source.where
    if not columns:
        return list(rows)
    known = known_columns(kind)
    present = {name for row in rows for name in row}
    for name, own in columns.items():
        if kind != "prompts" and name not in known:  # rewards and environments read any column
            raise ConfigError(f"{key}.columns.{name}: no such column is read; {did_you_mean(name, known)}")
        if own is not None and own not in present and all(value_at(row, own) is None for row in rows):
            raise ConfigError(f"{key}.columns.{name}={own}: {where} has no such column; {did_you_mean(own, present)}")
    taken = {name: own for name, own in columns.items() if own is not None}
    moved = {*columns, *taken.values()}

    def renamed(row: Row) -> Row:
        made = {name: value_at(row, own) for name, own in taken.items()}
        return {name: value for name, value in row.items() if name not in moved} | without_added_nulls(made)

    return list(map(renamed, rows))


def value_at(row: Row, path: str) -> Any:
    """Return the value of a column; None if there is none.

    `path`: name of a column, or a path through its objects and lists, such as "data.turns.0.text". A column whose own
    name is the path goes first.
    """
    if row.get(path) is not None:
        return row[path]
    found: Any = row
    for part in path.split("."):
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            found = found.get(part) if isinstance(found, Mapping) else None
    return found


def mapped(rows: Sequence[Row], source: Source) -> Sequence[Row]:
    """Return the rows that the user's function makes of the rows of a table, in their order."""
    if source.map is None:
        return rows
    what, made = f"{source.key}.map={source.map}", []
    function = find_function(source.map, what)
    for number, row in enumerate(rows):
        at = f"{source.where}, row index {number}"
        try:
            found = function(dict(row))
        except Exception as error:  # the user's code may raise anything
            raise DataError(f"{at}: {what} raised {type(error).__name__}: {error}\n{own_traceback(error)}") from error
        if not isinstance(found, Mapping):
            kind = type_in_words(found)
            expected = "expected a dict of columns. Leave rows out of the table itself"
            raise DataError(f"{at}: {what} returned {kind}; {expected}")
        made.append(dict(found))
    return made


def _names(row: Row) -> str:
    return ", ".join(str(name) for name, value in row.items() if value is not None) or "no columns"


def _unrecognised(row: Row, kind: RowKind, source: Source) -> str:
    """Return the message for a first row of no known format: the columns of the nearest format that the row lacks."""
    where, key = source.where, source.key
    present = [str(name) for name, value in row.items() if value is not None]
    if empty := [entry for entry in FORMATS[kind] if {*entry.columns} <= {*row} and not {*entry.columns} <= {*present}]:
        nearest = min(empty, key=lambda entry: len({*entry.columns} - {*present}))
        return f"{where}, row index 0: {_lacks(nearest.columns, row)}; the row has {_names(row)}"
    near = {name: get_close_matches(name, present, n=1) for entry in FORMATS[kind] for name in entry.columns}
    lacking = [entry for entry in FORMATS[kind] if not {*entry.columns} <= {*present}]
    found = {entry: [name for name in entry.columns if near[name]] for entry in lacking}
    nearest = max(lacking, key=lambda entry: (len(found[entry]), len(found[entry]) - len(entry.columns)))
    missing = [name for name in nearest.columns if name not in present]
    known = "; ".join(dict.fromkeys(", ".join(entry.columns) for entry in FORMATS[kind]))
    options = [f"{key}.columns.{name}={own}" for name in missing for own in near[name]]
    why = f"{known}. To name a column of another name: {' '.join(options) or f'{key}.columns.NAME=COLUMN'}"
    return f"{where}, row index 0: {_lacks(missing, row)}; the row has {_names(row)}. Expected one of: {why}"


def _lacks(columns: Sequence[str], row: Row) -> str:
    """Return which of some columns a row lacks, or holds as null."""
    if null := [name for name in columns if name in row and row[name] is None]:
        return f"{' and '.join(map(repr, null))} {'is' if len(null) == 1 else 'are'} {NULL}"
    missing = [name for name in columns if name not in row]
    return f"no {' and no '.join(map(repr, missing))}" if missing else "of no known format"


def _disagreement(first: Row, found: Format, row: Row, other: Format | None, where: str) -> str:
    """Return the message for a row of another format than the first row."""
    what = f"is {other.name} with" if other else f"{_lacks(found.columns, row)}; the row has"
    remedy = "All rows of a table have one format: put the others into a table of their own, and mix the tables"
    return f"{where}: {what} {_names(row)}; row index 0 is {found.name} with {_names(first)}. {remedy}"


def _with_system(row: Row, prompt: str, found: Format, where: str) -> Row:
    """Return a row whose conversation begins with a system message."""
    column = next((name for name in ("messages", "prompt") if isinstance(row.get(name), list)), None)
    if column is None:
        remedy = "leave it out, or make the prompts messages: [{'role': 'user', 'content': ...}]"
        raise ConfigError(f"system_prompt begins conversations, and {where} holds {found.name}; {remedy}")
    if row[column][0]["role"] in SYSTEM_ROLES:
        return row
    return {**row, column: [{"role": "system", "content": prompt}, *row[column]]}
