"""Prompts to roll out: rows of a file, dealt in a shuffled order that a resumed run takes up where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlite.errors import ConfigError, DataError

PROMPT_KEYS = ("messages", "prompt", "input_ids")


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON array or of a JSONL file. Raises: ConfigError for the file, DataError for a row."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"data.path={str(path)!r}: no such file")
    text = path.read_text(encoding="utf-8")
    where = str(path)
    try:
        if path.suffix == ".jsonl":
            rows = []
            for number, line in enumerate(text.split("\n"), 1):  # splitlines() cuts texts at U+2028, too
                where = f"{path}, line {number}"
                if line.strip():
                    rows.append(json.loads(line))
        else:
            rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path}: expected a list of at least one row")
    return rows


def check_prompts(rows: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise DataError, naming row and key, unless every row holds a prompt in one of PROMPT_KEYS."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"{where}, row {number}: expected an object, found {type(row).__name__}")
        keys = [key for key in PROMPT_KEYS if key in row]
        if len(keys) != 1:
            raise DataError(f"{where}, row {number}: expected exactly one of {', '.join(PROMPT_KEYS)}, found {keys}")
        if not row[keys[0]]:
            raise DataError(f"{where}, row {number}: {keys[0]!r} is empty")


class PromptStream:
    """Batches of rows without end: each epoch in another order, which the seed and the epoch decide.

    `position` counts the rows dealt so far; set it to take up where another stream was.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ConfigError(f"prompts_per_rollout={batch_size}: expected at least 1")
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self.position = 0

    def next(self) -> list[Mapping[str, Any]]:
        """The next `batch_size` rows; a batch may span two epochs."""
        batch = [self._row(number) for number in range(self.position, self.position + self._batch_size)]
        self.position += self._batch_size
        return batch

    def _row(self, number: int) -> Mapping[str, Any]:
        epoch, place = divmod(number, len(self._rows))
        return self._rows[int(self._order(epoch)[place])]

    def _order(self, epoch: int) -> np.ndarray:
        if getattr(self, "_epoch", None) != epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))
        return self._permutation
