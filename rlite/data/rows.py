"""The rows of a run: read from one table or from several that are mixed, in the form that rlite reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rlite.data.chat.masks import check_messages
from rlite.data.chat.template import has_chat_template, unread_keys
from rlite.data.mixture import Mixture, shuffled
from rlite.data.prompts import PromptStream
from rlite.data.readers.columns import normalise
from rlite.data.readers.formats import RowKind
from rlite.data.readers.streaming import ShuffledStream, StreamedTable
from rlite.data.readers.tables import NULL, Row, check_text, is_null, read_rows, type_in_words, without_added_nulls
from rlite.data.source import Source, Table
from rlite.errors import ConfigError, DataError

PROMPT_KEYS = ("messages", "prompt", "input_ids")
QUESTIONS = ("question", "problem", "query", "instruction", "input", "text")
"""names of the prompt's column in the tables of others, the most usual first"""
NO_TEMPLATE = "as texts, without the model's chat template (a prompt that is a list of messages is a chat)"

TEXT_COLUMNS = ("prompt", "response", "completion", "chosen", "rejected", "text")
MESSAGE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")


@dataclass(frozen=True)
class Rows(Sequence[Mapping[str, Any]]):
    """Rows in the form that rlite reads."""

    rows: Table
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

    def items(self) -> Table:
        """Return the rows."""
        return self.rows

    def digest(self) -> str:
        """Return a hash of the rows; see `rows_digest`."""
        return rows_digest(self.rows)


def read_source(source: Source, kind: RowKind) -> Rows:
    """Return the rows of a table. Errors are those of `read_rows` and of `normalise`."""
    if source.rows is None:
        return converted(read_rows(source.path, f"{source.key}.path", source.columns), source, kind)
    rows = map(dict, source.rows)
    if hasattr(source.rows, "features"):  # a table of the `datasets` library, as it is in a file
        rows = map(without_added_nulls, rows)
    return converted(list(rows), source, kind)


def streamed_source(source: Source, kind: RowKind, buffer_size: int) -> Rows:
    """Return the first window of a table that is streamed, with the table. Errors are those of `StreamedTable`."""
    table = StreamedTable(source, lambda rows: converted(rows, source, kind), buffer_size)
    return replace(table.first, stream=table)


def converted(rows: Sequence[Row], source: Source, kind: RowKind) -> Rows:
    """Return rows of a table in the form that rlite reads. Errors are those of `normalise`."""
    made, form = normalise(rows, kind, source)
    return Rows(made, form, paths={"": source.path} if source.rows is None else {})


def stream_of(rows: Sequence[Any]) -> StreamedTable[Rows] | None:
    """Return the table of which the rows are the first window; None if they are the whole table."""
    return rows.stream if isinstance(rows, Rows) else None


def prompt_stream(rows: Table, batch_size: int, seed: int, mixture: Mixture | None = None) -> PromptStream:
    """Return the batches of a table's rows.

    `mixture`: the table's sources; None if there is one.
    """
    stream = stream_of(rows)
    if batch_size > len(rows) and (stream is None or stream.is_whole):
        few = f"there are {len(rows)} rows, so one rollout would hold a prompt twice; lower it, or give more rows"
        raise ConfigError(f"train_data.prompts_per_rollout={batch_size}: {few}")
    if stream is not None:
        return PromptStream(rows, batch_size, ShuffledStream(stream, seed))
    order = shuffled(len(rows), mixture, seed, partial(rows_digest, rows))
    return PromptStream(rows.rows if isinstance(rows, Rows) else rows, batch_size, order)


def described(rows: Rows, tokenizer: Any | None) -> str:
    """Return the format of a table in words, with remarks on what could be expected of it and is not done.

    `tokenizer`: renders messages, if it has a chat template; None if there is none.
    """
    empty = [name for name in TEXT_COLUMNS if any(row.get(name) == "" for row in rows)]
    said = [rows.form, *(f"some rows have an empty {name!r}" for name in empty)]
    if tokenizer is not None and has_chat_template(tokenizer):
        if isinstance(rows[0].get("prompt"), str) and rows[0].get("messages") is None:
            said.append(NO_TEMPLATE)
        conversations = (value for row in rows for name in MESSAGE_COLUMNS if isinstance(value := row.get(name), list))
        if unread := unread_keys(tokenizer, conversations):
            said.append(f"keys of messages that the chat template does not read: {', '.join(unread)}")
    return "; ".join(said)


def mixed_rows(parts: Mapping[str, Rows], weights: Mapping[str, float] | None) -> Rows:
    """Return the rows of several sources as one table.

    `weights`: share of each source in an epoch; None: every row occurs once.
    """
    sizes = {name: len(part) for name, part in parts.items()}
    mixture = Mixture(sizes, weights or sizes)
    form = f"a mixture of {mixture}: {'; '.join(f'{name} {part.form}' for name, part in parts.items())}"
    paths = {name: part.paths[""] for name, part in parts.items() if part.paths}
    return Rows([row for part in parts.values() for row in part], form, mixture, paths=paths)


def place_of(rows: Sequence[Any], number: int, where: str) -> str:
    """Return the name of a row in messages, such as "train_data.mixture.math.path=m.jsonl, row index 3"."""
    if isinstance(rows, Rows):
        source, number = ("", number) if rows.mixture is None else rows.mixture.source_of(number)
        where = f"{where}.mixture.{source}" if source else where
        if source in rows.paths and ".path=" not in where:
            where = f"{where}.path={rows.paths[source]}"
    return f"{where}, row index {number}"


def rows_digest(rows: Table) -> str:
    """Return a hash of the rows in their order. Values that JSON cannot hold count by their type only."""
    digest = hashlib.sha256()
    for row in rows:
        text = json.dumps(dict(row), skipkeys=True, default=lambda value: type(value).__name__)
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()


def check_prompts(rows: Table, where: str) -> None:
    """Check that every row holds one prompt: `messages`, a list; `prompt`, a text or messages; or `input_ids`."""
    for number, row in enumerate(rows):
        at = place_of(rows, number, where)
        if not isinstance(row, Mapping):
            raise DataError(f"{at}: expected an object, found {type(row).__name__}")
        keys = [key for key in PROMPT_KEYS if not is_null(row.get(key))]
        if len(keys) != 1:
            raise DataError(f"{at}: {_not_one_prompt(row, keys, at)}")
        key, prompt = keys[0], row[keys[0]]
        if isinstance(prompt, (str, list, tuple)) and not prompt:
            raise DataError(f"{at}: {key!r} is empty")
        if key == "prompt" and not isinstance(prompt, (str, list, tuple)):
            raise DataError(f"{at}: 'prompt' is {type_in_words(prompt)}; expected a text or a list of messages")
        if key == "messages" or (key == "prompt" and not isinstance(prompt, str)):
            check_messages(prompt, at, key)
            if prompt[-1]["role"] == "assistant":
                raise DataError(f"{at}: {key!r} ends with the assistant; expected the prompt alone, to be answered")
        elif isinstance(prompt, str):
            check_text(prompt, f"{at}: {key!r}")


def _not_one_prompt(row: Mapping[str, Any], keys: Sequence[str], at: str) -> str:
    """Return what is wrong with a row that has no prompt or several, and the option that chooses its column.

    `at`: name of the row in messages; the group of options of its table comes first.
    """
    group = at.partition(", row index")[0].partition(".path=")[0]
    told = f"expected exactly one of {', '.join(PROMPT_KEYS)}, found {' and '.join(keys) or 'none'}"
    if keys:
        return f"{told}; {group}.columns.{keys[-1]}=null leaves one out"
    if null := [key for key in PROMPT_KEYS if key in row]:
        return f"{null[0]!r} is {NULL}"
    names = [str(name) for name, value in row.items() if value is not None]
    own = next((name for name in QUESTIONS if name in names), "COLUMN")
    has = ", ".join(names) or "no columns"
    return f"{told}; the row has {has}. To name the column of the prompt: {group}.columns.prompt={own}"
