"""Answers that an episode has drawn. Another attempt gets the same answers, and repeats only the work after them.

A new answer after each failure would select answers: a grader that fails on half of the answers would see four of each
item, and the metrics would count the one that it likes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

from rlite.types import LLMRequest, LLMResponse, TokenChunk


@dataclass(eq=False)
class Draw:
    """The answer to one request, as far as it is drawn."""

    key: int
    """hash of the request"""
    seed: int | None
    version: int | None
    """policy version of all tokens; None if it has changed meanwhile"""
    is_greedy: bool = False
    has_begun: bool = False
    """tokens have arrived, or the wait for them was cancelled: another answer is not the same draw"""
    is_repeated: bool = False
    """the draw repeats one of an earlier attempt"""
    answer: LLMResponse | None = None
    """the complete answer, in lists of its own"""


@dataclass(eq=False)
class Draws:
    """The draws of one episode over all of its attempts."""

    is_redrawn: bool = False
    """an attempt has drawn other answers in place of earlier ones"""
    _earlier: list[Draw] = field(default_factory=list)
    """draws of earlier attempts that the current attempt has not asked for"""
    _own: list[Draw] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        """True if answers of an earlier attempt are missing in the current one."""
        return self.is_redrawn or any(draw.has_begun for draw in self._earlier)

    def begin_attempt(self) -> None:
        """Offer all draws to the next attempt."""
        self._earlier, self._own = [*self._own, *self._earlier], []

    def begin(self, request: LLMRequest, seed: int | None, version: int) -> Draw:
        """Return the draw of an earlier attempt for the same request if it is complete, else a new draw.

        Args:
            request: as the workflow has made it.
            seed: seed of a new draw.
            version: current policy version.
        """
        gconfig = request.gconfig
        key = hash((tuple(request.input_ids), gconfig, request.extras))
        draw = next((each for each in self._earlier if each.key == key), None)
        if draw is not None:
            self._earlier.remove(draw)
        if draw is None or draw.answer is None:
            earlier, draw = draw, Draw(key, seed, version, gconfig.greedy)
            if earlier is not None and earlier.has_begun:
                draw.seed, draw.is_repeated = earlier.seed, True
                self.is_redrawn |= version != earlier.version or (draw.seed is None and not draw.is_greedy)
        self._own.append(draw)
        return draw

    def end(self, draw: Draw, version: int) -> None:
        """Note the end of a generation, complete or not.

        Args:
            draw: what `begin` returned, without an answer.
            version: current policy version.
        """
        if draw.version != version:
            self.is_redrawn |= draw.is_repeated
            draw.version = None


class WrittenAnswer:
    """Joins the chunks of a stream into an answer."""

    def __init__(self) -> None:
        self._answer = LLMResponse(
            input_tokens=[],
            output_tokens=[],
            output_logprobs=[],
            output_versions=[],
            stop_reason="stop",
            latency=0.0,
            ttft=0.0,
        )

    def take(self, chunk: TokenChunk) -> LLMResponse | None:
        """Return the answer if the chunk completes it."""
        answer = self._answer
        answer.output_tokens.extend(chunk.token_ids)
        answer.output_logprobs.extend(chunk.logprobs)
        answer.output_versions.extend([chunk.version] * len(chunk.token_ids))
        answer.sampling_logprobs.extend(chunk.sampling_logprobs)
        for name, column in chunk.extras.items():
            answer.extras.setdefault(name, []).extend(column)
        if chunk.finish_reason in (None, "abort"):
            return None
        return replace(answer, stop_reason=chunk.finish_reason)


def copied(answer: LLMResponse) -> LLMResponse:
    """Return an answer in lists of its own: workflows may change theirs. It has no prompt."""
    return replace(
        answer,
        input_tokens=[],
        output_tokens=[*answer.output_tokens],
        output_logprobs=[*answer.output_logprobs],
        output_versions=[*answer.output_versions],
        sampling_logprobs=[*answer.sampling_logprobs],
        extras={name: [*column] for name, column in answer.extras.items()},
    )


def chunks_of(answer: LLMResponse) -> Iterator[TokenChunk]:
    """Yield the tokens of an answer, in a chunk for each run of one policy version."""
    begin = 0
    for version, run in groupby(answer.output_versions or [0]):  # an empty answer is one empty chunk
        end = begin + len(list(run))
        own = slice(begin, end)
        yield TokenChunk(
            request_id=0,
            version=version,
            token_ids=answer.output_tokens[own],
            logprobs=answer.output_logprobs[own],
            sampling_logprobs=answer.sampling_logprobs[own],
            finish_reason=answer.stop_reason if end >= len(answer.output_tokens) else None,
            extras={name: column[own] for name, column in answer.extras.items()},
        )
        begin = end
