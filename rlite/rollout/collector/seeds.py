"""Random numbers that depend on what is generated, not on when: keyed by seed, policy version, item, sample, turn.

Answers that an episode has drawn. Another attempt gets the same answers, and repeats only the work after them.

A new answer after each failure would select answers: a grader that fails on half of the answers would see up to four of
each episode, and the metrics would count the one that it can grade.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

from rlite.rollout.collector.group import Group
from rlite.rollout.workflow import RolloutError
from rlite.types import AsyncInference, LLMRequest, LLMResponse, OnChunk, TokenChunk

Answer = TypeVar("Answer", bound=LLMResponse | TokenChunk)


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

    _earlier: list[Draw] = field(default_factory=list)
    """draws of earlier attempts that the current attempt has not asked for"""
    _own: list[Draw] = field(default_factory=list)

    def are_other(self, version: int) -> bool:
        """Return whether the current attempt has other answers than an earlier one.

        Args:
            version: current policy version.
        """
        is_missing = any(draw.has_begun for draw in self._earlier)
        return is_missing or any(draw.is_repeated and draw.version != version for draw in self._own)

    def begin_attempt(self) -> None:
        """Offer all draws to the next attempt."""
        self._earlier, self._own = [*self._own, *self._earlier], []

    def begin(self, request: LLMRequest, is_stream: bool, seed: int | None, version: int) -> Draw:
        """Return the draw of an earlier attempt for the same request if it is complete, else a new draw.

        Args:
            request: as the workflow has made it.
            is_stream: it asks for chunks, and not for a response.
            seed: seed of a new draw.
            version: current policy version.
        """
        key = hash((is_stream, tuple(request.input_ids), request.gconfig, tuple(request.extras)))
        draw = Draw(key, seed, None if seed is None and not request.gconfig.greedy else version)
        if (earlier := next((each for each in self._earlier if each.key == key), None)) is not None:
            self._earlier.remove(earlier)
            if earlier.answer is not None:
                draw = earlier
            elif earlier.has_begun:
                draw.seed, draw.is_repeated = earlier.seed, True
                draw.version = version if version == earlier.version else None
        self._own.append(draw)
        return draw


def copied(answer: Answer, kind: type[list[Any]] | type[tuple[Any, ...]] = list) -> Answer:
    """Return an answer, or a chunk of one, with lists of its own.

    Args:
        answer: answer or chunk.
        kind: `tuple` for an answer that is kept, since Python's garbage collector does not look at tuples of numbers.
    """
    own = copy.copy(answer)
    columns = {name: kind(values) for name, values in vars(own).items() if isinstance(values, list | tuple)}
    vars(own).update(columns, extras={name: kind(column) for name, column in answer.extras.items()})
    return own


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


REFUSAL_DELAY = 1.0
"""seconds until a request of an attempt that is over is refused"""


def mix(seed: int, number: int) -> int:
    """Return a 63-bit seed made of two numbers (splitmix64)."""
    mask = 2**64 - 1
    z = (seed * 0x9E3779B97F4A7C15 + number + 0x632BE59BD9B4E019) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


def group_seed(seed: int | None, version: int, position: int) -> int | None:
    """Return the seed of a group, if there is a seed.

    Args:
        seed: the collector's, from its options.
        version: policy version at the submission.
        position: the item's, among the submitted ones. A resumed run submits the same items at the same positions.
    """
    return None if seed is None else mix(mix(seed, version), position)


class SampleInference:
    """The engine as one attempt at an episode sees it: episodes of one item draw different random numbers.

    A request without a seed gets one from the group's seed, the episode's number and the turn, if the group has a seed.
    A request with a seed keeps it in the first episode of its item, and gets a different one in each other episode. A
    request that an earlier attempt has made gets the answer of that attempt, see `Draws`.

    A request that truncates asks for `kept_ids`, if the group is trained on and the engine offers them.

    Args:
        engine: generates; its other attributes are available, too.
        group: the episode's group, whose `tokens` count the generated tokens.
        number: the episode's number in its group.
        draws: of the episode's attempts.
        affinity: replaces the `rid` of all requests: siblings share a replica, which prefills their prompt once.
        keeps_tokens: whether the group's episode also records the tokens.
    """

    def __init__(
        self,
        engine: AsyncInference,
        group: Group,
        number: int,
        draws: Draws,
        affinity: str | None = None,
        keeps_tokens: bool = False,
    ) -> None:
        self._engine, self._group, self._number, self._draws = engine, group, number, draws
        self._has_kept_ids = group.start_order is not None and "kept_ids" in getattr(engine, "extras", ())
        self._affinity = affinity
        self._keeps_tokens = keeps_tokens
        self._sample = group.first_sample + number
        self._seed = None if group.seed is None else mix(group.seed, number)
        self._turns = itertools.count()
        self._is_over = False
        group.tokens[number] = 0

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]  # workflows may use an engine's other attributes
        return getattr(self._engine, name)

    async def agenerate(self, request: LLMRequest, on_chunk: OnChunk | None = None) -> LLMResponse:
        """Return the engine's answer to a request with this episode's seed."""
        await self._check_open()
        with self._turn(request, is_stream=False) as (draw, count):
            note = count if on_chunk is None else partial(_each, (count, on_chunk))
            if isinstance(draw.answer, LLMResponse):
                answer = copied(draw.answer)
                for chunk in chunks_of(answer):
                    note(chunk)
                return replace(answer, metadata=dict(request.metadata))
            response = await self._engine.agenerate(self._own(request, draw.seed), note)
            draw.answer = None if response.stop_reason == "abort" else copied(response, tuple)
            return response

    async def stream(self, request: LLMRequest) -> AsyncIterator[TokenChunk]:
        """Yield the engine's answer to a request with this episode's seed."""
        await self._check_open()
        with self._turn(request, is_stream=True) as (draw, count):
            if isinstance(draw.answer, list):
                for chunk in draw.answer:
                    count(chunk)
                    yield copied(chunk)
                return
            written: list[TokenChunk] = []
            async with aclosing(self._engine.stream(self._own(request, draw.seed))) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    count(chunk)
                    written.append(copied(chunk, tuple))
                    draw.answer = None if chunk.finish_reason in (None, "abort") else written
                    yield chunk

    def end(self) -> None:
        """End the attempt: further requests are refused."""
        self._is_over = True

    async def _check_open(self) -> None:
        """Refuse requests after the attempt's end. The delay keeps a loop that ignores errors from turning quickly.

        Raises:
            RolloutError: The attempt has ended.
        """
        if self._is_over:
            await asyncio.sleep(REFUSAL_DELAY)
            raise RolloutError("the attempt at this episode has ended; its requests are no longer answered")

    @contextmanager
    def _turn(self, request: LLMRequest, is_stream: bool) -> Iterator[tuple[Draw, OnChunk]]:
        """Record a wait for the engine.

        Args:
            request: the engine answers it inside of the block.
            is_stream: by chunks.

        Yields:
            The draw of the request, and a function that takes the tokens as they arrive.

        Raises:
            CancelledError: the wait was cancelled.
            GeneratorExit: the stream was closed.
        """
        draw = self._draws.begin(request, is_stream, self._seed_of(request), self._engine.get_version())
        episode = self._group.episodes[self._number]
        try:
            with episode.span("generate"):
                if not self._keeps_tokens:
                    yield draw, partial(self._count, draw, None)
                    return
                with episode.attempt.turn(request.input_ids) as write:
                    yield draw, partial(self._count, draw, write)
        except (asyncio.CancelledError, GeneratorExit):
            draw.has_begun = True
            raise

    def _count(self, draw: Draw, write: OnChunk | None, chunk: TokenChunk) -> None:
        self._group.tokens[self._number] += len(chunk.token_ids)
        draw.has_begun |= bool(chunk.token_ids)
        if write is not None:
            write(chunk)

    def _seed_of(self, request: LLMRequest) -> int | None:
        turn, seed = next(self._turns), request.gconfig.seed
        if seed is None:
            return None if self._seed is None else mix(self._seed, turn)
        return mix(seed, self._sample) if self._sample > 0 else seed

    def _own(self, request: LLMRequest, seed: int | None) -> LLMRequest:
        extras = request.extras
        if self._has_kept_ids and request.gconfig.is_truncating and "kept_ids" not in extras:
            extras = (*extras, "kept_ids")
        gconfig = request.gconfig if seed == request.gconfig.seed else replace(request.gconfig, seed=seed)
        return replace(request, gconfig=gconfig, rid=self._affinity or request.rid, extras=extras)


def _each(takers: Sequence[OnChunk], chunk: TokenChunk) -> None:
    for take in takers:
        take(chunk)
