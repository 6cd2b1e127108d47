"""The rows of a run: read from one table or from several that are mixed, in the form that rlite reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlite.data.chat.template import has_chat_template, unread_keys
from rlite.data.formats.table import RowKind, normalise
from rlite.data.order import Mixture
from rlite.data.source import Source
from rlite.data.streaming.table import StreamedTable
from rlite.data.tables import Row, read_rows, without_added_nulls

NO_TEMPLATE = "as texts, without the model's chat template (a prompt that is a list of messages is a chat)"

TEXT_COLUMNS = ("prompt", "response", "completion", "chosen", "rejected", "text")
MESSAGE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")


@dataclass(frozen=True)
class Rows(Sequence[Mapping[str, Any]]):
    """Rows in the form that rlite reads."""

    rows: Sequence[Mapping[str, Any]]
    form: str = ""
    """format of the table, in words; "" if it is unknown"""
    mixture: Mixture | None = None
    """the sources of the rows, end to end; None if there is one"""
    stream: StreamedTable[Rows] | None = None
    """the table of which these rows are the first window; None if they are the whole table"""
    paths: Mapping[str, str] = field(default_factory=dict)
    """path of each source by its name, "" for a single table; rows of a program have none"""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        """Return a row, or several."""
        return self.rows[number]

    def items(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows."""
        return self.rows

    def digest(self) -> str:
        """Return a hash of the rows; see `rows_digest`."""
        return rows_digest(self.rows)


def read_source(source: Source, kind: RowKind) -> Rows:
    """Return the rows of a table. Errors are those of `read_rows` and of `normalise`.

    Args:
        source: the table.
        kind: what the rows are for.
    """
    if source.rows is None:
        rows = read_rows(source.path, f"{source.key}.path", source.columns)
    elif hasattr(source.rows, "features"):  # a table of the `datasets` library, as it is in a file
        rows = [without_added_nulls(dict(row)) for row in source.rows]
    else:
        rows = [dict(row) for row in source.rows]
    return converted(rows, source, kind)


def streamed_source(source: Source, kind: RowKind, buffer_size: int) -> Rows:
    """Return the first window of a table that is streamed, with the table. Errors are those of `StreamedTable`.

    Args:
        source: the table.
        kind: what the rows are for.
        buffer_size: items among which the next one is chosen at random.
    """
    table = StreamedTable(source, lambda rows: converted(rows, source, kind), buffer_size)
    return replace(table.first, stream=table)


def converted(rows: Sequence[Row], source: Source, kind: RowKind) -> Rows:
    """Return rows of a table in the form that rlite reads. Errors are those of `normalise`.

    Args:
        rows: rows as the table has them.
        source: the table.
        kind: what the rows are for.
    """
    made, form = normalise(
        rows, kind, source.where, columns=source.columns, system_prompt=source.system_prompt, key=source.key
    )
    return Rows(made, form, paths={"": source.path} if source.rows is None else {})


def stream_of(rows: Sequence[Any]) -> StreamedTable[Rows] | None:
    """Return the table of which the rows are the first window; None if they are the whole table."""
    return rows.stream if isinstance(rows, Rows) else None


def described(rows: Rows, tokenizer: Any | None) -> str:
    """Return the format of a table in words, with remarks on what could be expected of it and is not done.

    Args:
        rows: the table.
        tokenizer: renders messages, if it has a chat template; None if there is none.
    """
    empty = [name for name in TEXT_COLUMNS if any(row.get(name) == "" for row in rows)]
    remarks = [f"some rows have an empty {name!r}" for name in empty]
    if tokenizer is None or not has_chat_template(tokenizer):
        return "; ".join([rows.form, *remarks])
    if isinstance(rows[0].get("prompt"), str) and rows[0].get("messages") is None:
        remarks.append(NO_TEMPLATE)
    conversations = (value for row in rows for name in MESSAGE_COLUMNS if isinstance(value := row.get(name), list))
    if unread := unread_keys(tokenizer, conversations):
        remarks.append(f"keys of messages that the chat template does not read: {', '.join(unread)}")
    return "; ".join([rows.form, *remarks])


def mixed_rows(parts: Mapping[str, Rows], weights: Mapping[str, float] | None) -> Rows:
    """Return the rows of several sources as one table.

    Args:
        parts: rows of each source.
        weights: share of each source in an epoch; None: every row occurs once.

    Raises:
        ConfigError: a source's weight gives it no row in an epoch.
    """
    sizes = {name: len(part) for name, part in parts.items()}
    mixture = Mixture(sizes, weights or sizes)
    form = f"a mixture of {mixture}: {'; '.join(f'{name} {part.form}' for name, part in parts.items())}"
    paths = {name: part.paths[""] for name, part in parts.items() if part.paths}
    return Rows([row for part in parts.values() for row in part], form, mixture, paths=paths)


def place_of(rows: Sequence[Any], number: int, where: str) -> str:
    """Return the name of a row in messages, such as "train_data.mixture.math.path=m.jsonl, row index 3".

    Args:
        rows: the table.
        number: the row's index in the table.
        where: the table's name in messages.
    """
    if isinstance(rows, Rows):
        source, number = ("", number) if rows.mixture is None else rows.mixture.source_of(number)
        where = f"{where}.mixture.{source}" if source else where
        if source in rows.paths and ".path=" not in where:
            where = f"{where}.path={rows.paths[source]}"
    return f"{where}, row index {number}"


def rows_digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a hash of the rows in their order. Values that JSON cannot hold count by their type only."""
    digest = hashlib.sha256()
    for row in rows:
        text = json.dumps(dict(row), skipkeys=True, default=lambda value: type(value).__name__)
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()
