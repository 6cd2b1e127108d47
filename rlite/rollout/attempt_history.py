"""Tokens that an attempt of an episode has read and written so far, for the record of an episode without trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rlite.rollout.trajectories import TokenHistory
from rlite.types import TokenChunk


@dataclass(eq=False)
class AttemptHistory:
    """The requests of one attempt of an episode, and the answers to them as they arrive.

    A request whose prompt begins with an earlier prompt and its answer continues that sequence.
    """

    _sequences: list[TokenHistory] = field(default_factory=list)
    _open: set[TokenHistory] = field(default_factory=set)
    """sequences to which an answer is arriving"""

    @contextmanager
    def turn(self, prompt: list[int]) -> Iterator[Callable[[TokenChunk], None]]:
        """Note a request, whose answer arrives inside of the block.

        Args:
            prompt: ids of its tokens.

        Yields:
            A function that takes the answer, chunk by chunk.
        """
        history = next((each for each in reversed(self._sequences) if self._is_continued(each, prompt)), None)
        if history is None:
            history = TokenHistory()
            self._sequences.append(history)
        history.read(prompt[len(history.tokens) :])
        self._open.add(history)
        try:
            yield partial(_write, history)
        finally:
            self._open.discard(history)

    def arrays(self) -> list[dict[str, np.ndarray]]:
        """Return ids, mask, versions and log-probabilities of each sequence; the model wrote where the mask is true."""
        return [_arrays(each) for each in list(self._sequences) if each.tokens]

    def state_dict(self) -> list[dict[str, list[Any]]]:
        """Return plain values."""
        return [{name: column.tolist() for name, column in columns.items()} for columns in self.arrays()]

    @classmethod
    def from_state(cls, state: Sequence[dict[str, list[Any]]]) -> AttemptHistory:
        """Return the history that was saved."""
        return cls([_history(**columns) for columns in state])

    def _is_continued(self, history: TokenHistory, prompt: list[int]) -> bool:
        """Return whether a prompt begins with a sequence to which no answer is arriving."""
        tokens, count = history.tokens, len(history.tokens)
        # most sequences differ in the last token: it is compared first
        return history not in self._open and prompt[count - 1 : count] == tokens[-1:] and prompt[:count] == tokens


def _write(history: TokenHistory, chunk: TokenChunk) -> None:
    versions = [chunk.version] * len(chunk.token_ids)
    history.write(chunk.token_ids, chunk.logprobs, versions, chunk.finish_reason or "abort")


def _arrays(history: TokenHistory) -> dict[str, np.ndarray]:
    count = len(history.tokens)  # another thread may append meanwhile, the tokens at last
    return {
        "ids": np.array(history.tokens[:count], np.int32),
        "mask": np.array(history.loss_mask[:count], bool),
        "versions": np.array(history.versions[:count], np.int32),
        "logprobs": np.array(history.logprobs[:count], np.float32),
    }


def _history(ids: list[int], mask: list[bool], versions: list[int], logprobs: list[float]) -> TokenHistory:
    return TokenHistory(ids, mask, logprobs, versions, rewards=[0.0] * len(ids), kept_ids=[()] * len(ids))
