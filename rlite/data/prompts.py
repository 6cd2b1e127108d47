"""Prompts for rollouts: the form of a row, and rows in an order that a resumed run continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rlite.data.chat.masks import check_messages
from rlite.data.order import Mixture, shuffled
from rlite.data.rows import place_of, rows_digest, stream_of
from rlite.data.streaming.shuffle import ShuffledStream
from rlite.data.tables import NULL, check_text, is_null, type_in_words
from rlite.errors import ConfigError, DataError, StreamedDataError

PROMPT_KEYS = ("messages", "prompt", "input_ids")
QUESTIONS = ("question", "problem", "query", "instruction", "input", "text")
"""names of the prompt's column in the tables of others, the most usual first"""
MAX_ITEM = 200
"""characters of a row's name"""


def check_prompts(rows: Sequence[Mapping[str, Any]], where: str) -> None:
    """Check that every row holds one prompt: `messages`, a list; `prompt`, a text or messages; or `input_ids`.

    Raises:
        DataError: a row does not; the message names row and key.
    """
    for number, row in enumerate(rows):
        at = place_of(rows, number, where)
        if not isinstance(row, Mapping):
            raise DataError(f"{at}: expected an object, found {type(row).__name__}")
        keys = [key for key in PROMPT_KEYS if not is_null(row.get(key))]
        if len(keys) != 1:
            raise DataError(f"{at}: {_not_one_prompt(row, keys, at)}")
        prompt = row[keys[0]]
        if isinstance(prompt, (str, list, tuple)) and not prompt:
            raise DataError(f"{at}: {keys[0]!r} is empty")
        if keys[0] == "messages" or (keys[0] == "prompt" and not isinstance(prompt, str)):
            if keys[0] == "prompt" and not isinstance(prompt, (list, tuple)):
                raise DataError(f"{at}: 'prompt' is {type_in_words(prompt)}; expected a text or a list of messages")
            check_messages(prompt, at, keys[0])
            if prompt[-1]["role"] == "assistant":
                raise DataError(f"{at}: {keys[0]!r} ends with the assistant; expected the prompt alone, to be answered")
        elif isinstance(prompt, str):
            check_text(prompt, f"{at}: {keys[0]!r}")


def _not_one_prompt(row: Mapping[str, Any], keys: Sequence[str], at: str) -> str:
    """Return what is wrong with a row that has no prompt or several, and the option that chooses its column.

    Args:
        row: the row.
        keys: the columns of prompts that the row has.
        at: name of the row in messages; the group of options of its table comes first.
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


class Prompt(dict[str, Any]):
    """A row of the data, with its name in the record of a run.

    Args:
        row: the row.
        item: name of the row.
    """

    def __init__(self, row: Mapping[str, Any], item: str) -> None:
        super().__init__(row)
        self.item = item


def item_name(row: Mapping[str, Any], number: int | str) -> str:
    """Return the name of a row in records: its `id`, else its index in the data, or its place if it is streamed."""
    name = row.get("id")
    return str(number if name is None else name)[:MAX_ITEM]


class PromptStream:
    """Endless batches of rows: each epoch in another order that depends only on seed and epoch.

    Args:
        rows: the table, or the first window of a table that is streamed.
        batch_size: rows of a batch.
        seed: seed of the order.
        mixture: the table's sources; None if there is one.

    Raises:
        ConfigError: a batch would be empty, or larger than the table.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], batch_size: int, seed: int, mixture: Mixture | None = None
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"prompts_per_rollout={batch_size}: expected at least 1")
        stream = stream_of(rows)
        if batch_size > len(rows) and (stream is None or stream.is_whole):
            raise ConfigError(
                f"train_data.prompts_per_rollout={batch_size}: there are {len(rows)} rows, so one rollout would hold a "
                "prompt twice; lower it, or give more rows"
            )
        self._rows = rows
        self._batch_size = batch_size
        self.order = shuffled(len(rows), mixture, seed, partial(rows_digest, rows))
        """order of the rows, unless they are streamed; its `position` counts the rows returned so far"""
        self._stream: ShuffledStream[Mapping[str, Any]] | None = (
            None if stream is None else ShuffledStream(stream, seed)
        )
        self.returned: list[Prompt] = []
        """rows that come before all others: they were returned before, and not used"""

    def next(self, count: int | None = None) -> list[Prompt]:
        """Return the next `batch_size` rows, or `count` of them; a batch may span two epochs."""
        count = self._batch_size if count is None else count
        new = self._take(max(count - len(self.returned), 0))
        first, self.returned = self.returned[:count], self.returned[count:]
        return first + new

    def _take(self, count: int) -> list[Prompt]:
        if self._stream is None:
            return [Prompt(row, item_name(row, n)) for n in self.order.take(count) for row in [self._rows[n]]]
        taken: list[Prompt] = []
        while len(taken) < count:
            try:
                placed = self._stream.take_placed(count - len(taken))
            except StreamedDataError:
                self.returned = taken + self.returned
                raise
            taken += [Prompt(row, item_name(row, f"{file}:{place}")) for (file, place), row in placed]
        return taken

    def __iter__(self) -> Iterator[list[Prompt]]:
        """Yield batches forever; the first has all `returned` rows, if there are some."""
        while True:
            yield self.next(len(self.returned) or None)

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position and a digest of the rows."""
        return (self._stream or self.order).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another stream's position.

        Raises:
            CheckpointError: the state is of other rows.
        """
        (self._stream or self.order).load_state_dict(state)
