"""The table of formats: how each is recognised, and its conversion. To read another format, add an entry to FORMATS.

Convert the rows of a table to the form that rlite reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from rlite.data.formats.conversions import (
    SYSTEM_ROLES,
    alpaca,
    alpaca_prompt,
    asked,
    chat,
    completed,
    conversation,
    has_chat,
    has_implicit_prompt,
    implicit_pair,
    labelled,
    pair,
    plain_text,
    prompted_pair,
    sharegpt,
)
from rlite.data.tables import MESSAGE_COLUMNS, NULL, Row, is_null, without_nulls
from rlite.errors import ConfigError, DataError, did_you_mean

RowKind = Literal["demonstrations", "preferences", "unpaired", "prompts"]
"""kinds of rows, for: sft; rm and dpo; kto; ppo"""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of rows."""

    name: str
    """name in the report at the start"""
    columns: tuple[str, ...]
    """columns that every row has"""
    optional: tuple[str, ...] = ()
    """further columns that are read"""
    suits: Callable[[Row], bool] = lambda row: True
    """returns True if a row that has the columns has this format"""
    convert: Callable[[Row, str], Row]
    """row, name of the row in messages -> the row in rlite's form; raises DataError"""

    def fits(self, row: Row) -> bool:
        """Return whether a row has this format."""
        return all(row.get(column) is not None for column in self.columns) and self.suits(row)

    def __str__(self) -> str:
        """Return the name and the columns."""
        return f"{self.name} ({', '.join(self.columns)})"


_ANSWERS = ("response", "completion")
ALPACA_OPTIONAL = ("input", "system", "history")

FORMATS: dict[RowKind, tuple[Format, ...]] = {
    "demonstrations": (
        Format(name="conversations", columns=("messages",), optional=("tools",), convert=conversation),
        Format(
            name="ShareGPT conversations", columns=("conversations",), optional=("system", "tools"), convert=sharegpt
        ),
        *(
            Format(
                name=f"chat prompts and {answer}s",
                columns=("prompt", answer),
                optional=("tools",),
                suits=has_chat("prompt", answer),
                convert=completed(answer),
            )
            for answer in _ANSWERS
        ),
        *(
            Format(name=f"raw prompts and {answer}s", columns=("prompt", answer), convert=completed(answer))
            for answer in _ANSWERS
        ),
        Format(name="Alpaca instructions", columns=("instruction", "output"), optional=ALPACA_OPTIONAL, convert=alpaca),
        Format(name="plain texts", columns=("text",), convert=plain_text),
    ),
    "preferences": (
        Format(
            name="preferences between conversations",
            columns=("chosen", "rejected"),
            optional=("prompt", "tools", "margin"),
            suits=has_implicit_prompt,
            convert=implicit_pair,
        ),
        Format(
            name="preferences after conversations",
            columns=("messages", "chosen", "rejected"),
            optional=("tools", "margin"),
            convert=lambda row, where: pair(row, where, chat(row["messages"], where, "messages")),
        ),
        Format(
            name="preferences after ShareGPT conversations",
            columns=("conversations", "chosen", "rejected"),
            optional=("system", "tools", "margin"),
            convert=lambda row, where: pair(row, where, sharegpt(row, where)["messages"]),
        ),
        Format(
            name="preferences after chat prompts",
            columns=("prompt", "chosen", "rejected"),
            optional=("tools", "margin"),
            suits=has_chat("prompt", "chosen", "rejected"),
            convert=prompted_pair,
        ),
        Format(
            name="raw preferences",
            columns=("prompt", "chosen", "rejected"),
            optional=("margin",),
            convert=prompted_pair,
        ),
        Format(
            name="preferences after Alpaca instructions",
            columns=("instruction", "chosen", "rejected"),
            optional=(*ALPACA_OPTIONAL, "margin"),
            convert=lambda row, where: pair(row, where, alpaca_prompt(row, where)),
        ),
    ),
    "unpaired": (
        Format(
            name="labelled completions of conversations",
            columns=("messages", "completion", "label"),
            optional=("tools",),
            convert=labelled,
        ),
        Format(
            name="labelled chat completions",
            columns=("prompt", "completion", "label"),
            optional=("tools",),
            suits=has_chat("prompt", "completion"),
            convert=labelled,
        ),
        Format(name="labelled raw completions", columns=("prompt", "completion", "label"), convert=labelled),
    ),
    "prompts": (
        Format(
            name="conversations",
            columns=("messages",),
            optional=("tools",),
            convert=asked("messages"),
        ),
        Format(
            name="chat prompts",
            columns=("prompt",),
            suits=has_chat("prompt"),
            optional=("tools",),
            convert=asked("prompt"),
        ),
        Format(name="raw prompts", columns=("prompt",), convert=lambda row, where: row),
        Format(name="tokens", columns=("input_ids",), convert=lambda row, where: row),
        Format(
            name="ShareGPT conversations",
            columns=("conversations",),
            optional=("system",),
            convert=lambda row, where: {
                **{name: value for name, value in row.items() if name != "conversations"},
                **sharegpt(row, where),
            },
        ),
        Format(
            name="Alpaca instructions",
            columns=("instruction",),
            optional=ALPACA_OPTIONAL,
            convert=lambda row, where: {**row, "messages": alpaca_prompt(row, where)},
        ),
    ),
}
"""formats of each kind of rows; a row has the first one that fits"""


def format_of(row: Row, kind: RowKind) -> Format | None:
    """Return the first known format that fits a row; None if there is none."""
    return next((known for known in FORMATS[kind] if known.fits(row)), None)


def normalise(
    rows: Sequence[Row],
    kind: RowKind,
    where: str,
    *,
    columns: Mapping[str, str | None] | None = None,
    system_prompt: str | None = None,
    key: str = "data",
) -> tuple[list[Row], str]:
    """Convert rows to rlite's form. All rows have the format of the first row.

    Args:
        rows: the table.
        kind: what the rows are for.
        where: the table's name in messages, such as "data.path=x.json".
        columns: rlite's names of columns -> the table's names; None hides a column.
        system_prompt: put before conversations that do not begin with a system message of their own.
        key: group of options of the table, for messages.

    Returns:
        The rows, and the name of their format.

    Raises:
        ConfigError: an option names an unknown column, or the system prompt has no conversation to begin.
        DataError: there are no rows, no format is recognised, the rows have different formats, or a row is malformed.
            The message names the row and the column.
    """
    if not rows:
        raise DataError(f"{where}: no rows; expected at least one")
    known = {name for entry in FORMATS[kind] for name in (*entry.columns, *entry.optional)} - {"margin"}
    rows = _without_nan(_renamed(rows, kind, where, columns or {}, key), known)
    found = format_of(rows[0], kind)
    if found is None and kind == "prompts" and system_prompt is None:
        return rows, "rows without a prompt"  # an environment may begin by itself
    if found is None:
        raise DataError(_unrecognised(rows[0], kind, where, key))
    converted = []
    for number, row in enumerate(rows):
        if (other := format_of(row, kind)) is not found:
            raise DataError(_disagreement(rows[0], found, row, other, f"{where}, row index {number}"))
        converted.append(found.convert(row, f"{where}, row index {number}"))
    if system_prompt is not None:
        converted = [_with_system(row, system_prompt, found, where) for row in converted]
    unread = {str(name) for row in rows for name in row} - {*found.columns, *found.optional}
    is_said = bool(unread) and kind != "prompts"  # rewards and environments read any column
    return converted, f"{found}; columns not read: {', '.join(sorted(unread))}" if is_said else str(found)


def _renamed(rows: Sequence[Row], kind: RowKind, where: str, columns: Mapping[str, str | None], key: str) -> list[Row]:
    """Return rows with rlite's names of columns.

    Raises:
        ConfigError: a name is unknown to rlite, or the table has no such column.
    """
    if not columns:
        return list(rows)
    known = {name for entry in FORMATS[kind] for name in (*entry.columns, *entry.optional)}
    present = {name for row in rows for name in row}
    for name, own in columns.items():
        if kind != "prompts" and name not in known:  # rewards and environments read any column
            raise ConfigError(f"{key}.columns.{name}: no such column is read; {did_you_mean(name, known)}")
        if own is not None and own not in present:
            raise ConfigError(f"{key}.columns.{name}={own}: {where} has no such column; {did_you_mean(own, present)}")
    moved = {*columns, *(own for own in columns.values() if own is not None)}
    return [
        {name: value for name, value in row.items() if name not in moved}
        | {name: _cell(name, row.get(own)) for name, own in columns.items() if own is not None}
        for row in rows
    ]


def _cell(column: str, value: Any) -> Any:
    return without_nulls(value) if column in MESSAGE_COLUMNS else value


def _without_nan(rows: list[Row], columns: Collection[str]) -> list[Row]:
    """Return rows whose columns hold null in place of pandas' NaN."""
    lacking = [[name for name in columns if row.get(name) is not None and is_null(row[name])] for row in rows]
    return [row | dict.fromkeys(names) if names else row for row, names in zip(rows, lacking, strict=True)]


def _names(row: Row) -> str:
    return ", ".join(str(name) for name, value in row.items() if value is not None) or "no columns"


def _unrecognised(row: Row, kind: RowKind, where: str, key: str) -> str:
    """Return the message for a first row of no known format: the columns of the nearest format that the row lacks."""
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
    return (
        f"{where}, row index 0: {_lacks(missing, row)}; the row has {_names(row)}. Expected one of: {known}. "
        f"To name a column of another name: {' '.join(options) or f'{key}.columns.NAME=COLUMN'}"
    )


def _lacks(columns: Sequence[str], row: Row) -> str:
    """Return which of some columns a row lacks, or holds as null."""
    if null := [name for name in columns if name in row and row[name] is None]:
        return f"{' and '.join(map(repr, null))} {'is' if len(null) == 1 else 'are'} {NULL}"
    missing = [name for name in columns if name not in row]
    return f"no {' and no '.join(map(repr, missing))}" if missing else "of no known format"


def _disagreement(first: Row, found: Format, row: Row, other: Format | None, where: str) -> str:
    """Return the message for a row of another format than the first row."""
    what = f"is {other.name} with" if other else f"{_lacks(found.columns, row)}; the row has"
    return (
        f"{where}: {what} {_names(row)}; row index 0 is {found.name} with {_names(first)}. All rows of a table "
        "have one format: put the others into a table of their own, and mix the tables"
    )


def _with_system(row: Row, prompt: str, found: Format, where: str) -> Row:
    """Return a row whose conversation begins with a system message.

    Raises:
        ConfigError: the row has no conversation.
    """
    column = next((name for name in ("messages", "prompt") if isinstance(row.get(name), list)), None)
    if column is None:
        raise ConfigError(
            f"system_prompt begins conversations, and {where} holds {found.name}; leave it out, or make the "
            "prompts messages: [{'role': 'user', 'content': ...}]"
        )
    if row[column][0]["role"] in SYSTEM_ROLES:
        return row
    return {**row, column: [{"role": "system", "content": prompt}, *row[column]]}
