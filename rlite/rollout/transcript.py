"""Tokens that an episode has read and written so far, for the record of an episode that gives no trajectory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
        return [{name: columns[name].tolist() for name in _Sequence.NAMES} for columns in self.arrays()]

    @classmethod
    def from_state(cls, state: Sequence[dict[str, list[Any]]]) -> Transcript:
        """Return the transcript that was saved."""
        transcript = cls()
        transcript._sequences = [_Sequence(**columns) for columns in state]
        return transcript


class _Sequence:
    """Tokens in the order in which the model reads and writes them, with version -1 where it only reads."""

    NAMES = ("ids", "versions", "logprobs")

    def __init__(self, ids: Sequence[int] = (), versions: Sequence[int] = (), logprobs: Sequence[float] = ()) -> None:
        # an array takes less memory than a list
        self._ids, self._versions, self._logprobs = array("i", ids), array("i", versions), array("f", logprobs)
        self.is_open = False
        """an answer is arriving"""

    def begins(self, prompt: list[int]) -> bool:
        """Return whether a prompt goes on with this sequence."""
        count = len(self._ids)
        if self.is_open or prompt[count - 1 : count] != self._ids[-1:].tolist():
            return False
        return prompt[:count] == self._ids.tolist()

    def read(self, prompt: list[int]) -> None:
        """Append the tokens of a prompt that are new."""
        new = prompt[len(self._ids) :]
        self._append(new, [-1] * len(new), [0.0] * len(new))

    def write(self, chunk: TokenChunk) -> None:
        """Append tokens of the answer. Engines call this for each token."""
        self._append(chunk.token_ids, [chunk.version] * len(chunk.token_ids), chunk.logprobs)

    def _append(self, ids: Sequence[int], versions: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append tokens, their ids at last: another thread may read meanwhile, and counts by them."""
        self._logprobs.extend(logprobs)
        self._versions.extend(versions)
        self._ids.extend(ids)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the columns, and the mask of the tokens that the model wrote."""
        count = len(self._ids)
        versions = np.array(self._versions[:count])
        columns = {"ids": np.array(self._ids[:count]), "versions": versions, "mask": versions >= 0}
        return {**columns, "logprobs": np.array(self._logprobs[:count])}
