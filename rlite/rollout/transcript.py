"""Tokens that an episode has read and written so far, for the record of an episode that gives no trajectory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from rlite.types import TokenChunk


class Transcript:
    """The requests of one attempt of an episode, and the answers to them as they arrive.

    A request whose prompt begins with an earlier prompt and its answer goes on with that sequence.
    """

    def __init__(self) -> None:
        self._sequences: list[_Sequence] = []

    @contextmanager
    def turn(self, prompt: list[int]) -> Iterator[_Sequence]:
        """Note a request, whose answer arrives inside of the block.

        Args:
            prompt: ids of its tokens.

        Yields:
            The sequence that takes the answer.
        """
        sequence = next((each for each in reversed(self._sequences) if each.begins(prompt)), None)
        if sequence is None:
            sequence = _Sequence()
            self._sequences.append(sequence)
        sequence.read(prompt)
        sequence.is_open = True
        try:
            yield sequence
        finally:
            sequence.is_open = False

    def arrays(self) -> list[dict[str, np.ndarray]]:
        """Return ids, mask, versions and log-probabilities of each sequence; the model wrote where the mask is true."""
        return [columns for each in list(self._sequences) if len((columns := each.arrays())["ids"])]

    def state_dict(self) -> list[dict[str, list[Any]]]:
        """Return plain values."""
        return [{name: columns[name].tolist() for name in _Sequence.TYPES} for columns in self.arrays()]

    @classmethod
    def from_state(cls, state: Sequence[dict[str, list[Any]]]) -> Transcript:
        """Return the transcript that was saved."""
        transcript = cls()
        transcript._sequences = [_Sequence(**columns) for columns in state]
        return transcript


class _Sequence:
    """Tokens in the order in which the model reads and writes them, with version -1 where it only reads."""

    TYPES: ClassVar = {"ids": "i", "versions": "i", "logprobs": "f"}
    """columns with their types; an array takes less memory than a list"""

    def __init__(self, **columns: list[Any]) -> None:
        self._columns = {name: array(kind, columns.get(name, ())) for name, kind in self.TYPES.items()}
        self.is_open = False
        """an answer is arriving"""

    def begins(self, prompt: list[int]) -> bool:
        """Return whether a prompt goes on with this sequence."""
        ids = self._columns["ids"]
        count = len(ids)
        if self.is_open or prompt[count - 1 : count] != ids[-1:].tolist():
            return False
        return prompt[:count] == ids.tolist()

    def read(self, prompt: list[int]) -> None:
        """Append the tokens of a prompt that are new."""
        new = prompt[len(self._columns["ids"]) :]
        self._append(logprobs=[0.0] * len(new), versions=[-1] * len(new), ids=new)

    def write(self, chunk: TokenChunk) -> None:
        """Append tokens of the answer."""
        versions = [chunk.version] * len(chunk.token_ids)
        self._append(logprobs=chunk.logprobs, versions=versions, ids=chunk.token_ids)

    def _append(self, **columns: Sequence[Any]) -> None:
        """Append values to columns, to the ids at last: another thread may read meanwhile, and counts by them."""
        for name, values in columns.items():
            self._columns[name].extend(array(self.TYPES[name], values))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the columns, and the mask of the tokens that the model wrote."""
        count = len(self._columns["ids"])
        columns = {name: np.array(values[:count]) for name, values in self._columns.items()}
        return {**columns, "mask": columns["versions"] >= 0}
