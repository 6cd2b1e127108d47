"""Draws of an episode: each attempt leaves its answers to the next attempt, and its tokens to the record.

Another attempt gets the answers that were drawn already, and repeats only the work after them. A new answer after each
failure would select answers: a grader that fails on half of the answers would see up to four of each episode, and the
metrics would count the one that it can grade.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from rlite.data.packs import TokenHistory
from rlite.types import LLMResponse, TokenChunk


@dataclass(eq=False)
class Draw:
    """The answer to one request, as far as it is drawn."""

    key: int
    """hash of the request"""
    seed: int | None
    version: int | None
    """policy version that draws all tokens; None: another generation would draw others"""
    has_begun: bool = False
    """tokens have arrived, or the wait for them was cancelled"""
    is_repeated: bool = False
    """the draw repeats one of an earlier attempt"""
    answer: LLMResponse | list[TokenChunk] | None = None
    """the complete answer in lists of its own, as it was asked for"""


@dataclass(eq=False)
class Draws:
    """The draws of one episode over all of its attempts."""

    earlier: Sequence[Draw] = ()
    """draws of earlier attempts that the current attempt has not asked for"""
    own: list[Draw] = field(default_factory=list)

    def begin_attempt(self) -> None:
        """Offer all draws to another attempt."""
        self.earlier, self.own = [*self.own, *self.earlier], []

    def again(self, draw: Draw, version: int) -> Draw:
        """Return the draw of an earlier attempt for the same request if it is complete, else a new draw.

        `draw`: the new draw. It takes the seed of an earlier draw that has begun.
        """
        if (earlier := next((each for each in self.earlier if each.key == draw.key), None)) is not None:
            self.earlier = [each for each in self.earlier if each is not earlier]
            if earlier.answer is not None:
                return earlier
            if earlier.has_begun:
                draw.seed, draw.is_repeated = earlier.seed, True
                draw.version = version if version == earlier.version else None
        return draw

    def are_other(self, version: int) -> bool:
        """Return whether the current attempt has other answers than an earlier one."""
        is_missing = any(draw.has_begun for draw in self.earlier)
        return is_missing or any(draw.is_repeated and draw.version != version for draw in self.own)


def chunks_of(answer: LLMResponse) -> Iterator[TokenChunk]:
    """Yield the tokens of an answer, in a chunk for each run of one policy version."""
    begin = 0
    for version, run in groupby(answer.output_versions or [0]):  # an empty answer is one empty chunk
        own = slice(begin, begin := begin + len(list(run)))
        yield TokenChunk(
            request_id=0,
            version=version,
            token_ids=answer.output_tokens[own],
            logprobs=answer.output_logprobs[own],
            sampling_logprobs=answer.sampling_logprobs[own],
            finish_reason=answer.stop_reason if begin >= len(answer.output_tokens) else None,
            extras={name: column[own] for name, column in answer.extras.items()},
        )


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

        Yields a function that takes the answer, chunk by chunk.
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
    none = TokenHistory()
    none.read(ids)
    return replace(none, tokens=ids, loss_mask=mask, logprobs=logprobs, versions=versions)
