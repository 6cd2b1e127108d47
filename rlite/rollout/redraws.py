"""Answers that an episode has drawn. Another attempt gets the same answers, and repeats only the work after them.

A new answer after each failure would select answers: a grader that fails on half of the answers would see up to four of
each episode, and the metrics would count the one that it can grade.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

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

    earlier: list[Draw] = field(default_factory=list)
    """draws of earlier attempts that the current attempt has not asked for"""
    own: list[Draw] = field(default_factory=list)

    def begin_attempt(self) -> None:
        """Offer all draws to another attempt."""
        self.earlier, self.own = [*self.own, *self.earlier], []

    def again(self, draw: Draw, version: int) -> Draw:
        """Return the draw of an earlier attempt for the same request if it is complete, else a new draw.

        Args:
            draw: the new draw. It takes the seed of an earlier draw that has begun.
            version: current policy version.
        """
        if (earlier := next((each for each in self.earlier if each.key == draw.key), None)) is not None:
            self.earlier.remove(earlier)
            if earlier.answer is not None:
                return earlier
            if earlier.has_begun:
                draw.seed, draw.is_repeated = earlier.seed, True
                draw.version = version if version == earlier.version else None
        return draw

    def are_other(self, version: int) -> bool:
        """Return whether the current attempt has other answers than an earlier one.

        Args:
            version: current policy version.
        """
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
