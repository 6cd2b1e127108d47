"""Random numbers that depend on what is generated, not on when: keyed by seed, policy version, item, sample, turn."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from rlite.rollout.collector.draws import Draw, Draws, WrittenAnswer, chunks_of, copied
from rlite.rollout.episode import Episode
from rlite.rollout.workflow import RolloutError
from rlite.types import AsyncInference, LLMRequest, LLMResponse, OnChunk, TokenChunk

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

    A request that truncates asks for `kept_ids`, if the episode is trained on and the engine offers them.

    Args:
        engine: generates; its other attributes are available, too.
        sample: the episode's number in its group.
        group_seed: see `group_seed`.
        tokens: counts the generated tokens, by episode.
        affinity: replaces the `rid` of all requests: siblings share a replica, which prefills their prompt once.
        is_trained_on: whether the episode is trained on.
        episode: records the waits for the engine.
        keeps_tokens: whether the episode also records the tokens.
        first_sample: number of the group's first episode among those of its item.
        draws: of the episode's attempts.
    """

    def __init__(
        self,
        engine: AsyncInference,
        sample: int,
        group_seed: int | None = None,
        tokens: Counter[int] | None = None,
        affinity: str | None = None,
        is_trained_on: bool = True,
        episode: Episode | None = None,
        keeps_tokens: bool = False,
        first_sample: int = 0,
        draws: Draws | None = None,
    ) -> None:
        self._engine = engine
        self._has_kept_ids = is_trained_on and "kept_ids" in getattr(engine, "extras", ())
        self._affinity = affinity
        self._episode = episode or Episode(time.monotonic())
        self._keeps_tokens = keeps_tokens
        self._tokens = Counter() if tokens is None else tokens
        self._tokens[sample] = 0
        self._sample, self._place = sample, first_sample + sample
        self._seed = None if group_seed is None else mix(group_seed, sample)
        self._turns = itertools.count()
        self._draws = draws or Draws()
        self._waiting: set[asyncio.Task[Any] | None] = set()
        self._is_over = False

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]  # workflows may use an engine's other attributes
        return getattr(self._engine, name)

    async def agenerate(self, request: LLMRequest, on_chunk: OnChunk | None = None) -> LLMResponse:
        """Return the engine's answer to a request with this episode's seed."""
        await self._check_open()
        with self._turn(request) as (draw, count):

            def note(chunk: TokenChunk) -> None:
                count(chunk)
                if on_chunk is not None:
                    on_chunk(chunk)

            if draw.answer is not None:
                for chunk in chunks_of(draw.answer):
                    note(chunk)
                kept = copied(draw.answer)
                return replace(kept, input_tokens=list(request.input_ids), metadata=dict(request.metadata))
            response = await self._engine.agenerate(self._own(request, draw.seed), note)
            if response.stop_reason != "abort":
                draw.answer = copied(response)
            return response

    async def stream(self, request: LLMRequest) -> AsyncIterator[TokenChunk]:
        """Yield the engine's answer to a request with this episode's seed."""
        await self._check_open()
        with self._turn(request) as (draw, count):
            if draw.answer is not None:
                for chunk in chunks_of(draw.answer):
                    count(chunk)
                    yield chunk
                return
            written = WrittenAnswer()
            async with aclosing(self._engine.stream(self._own(request, draw.seed))) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    count(chunk)
                    draw.answer = written.take(chunk)
                    yield chunk

    def end(self) -> None:
        """End the attempt: its requests under way are cancelled, and further ones are refused."""
        self._is_over = True
        for task in self._waiting:
            if task is not None:
                task.cancel()

    async def _check_open(self) -> None:
        """Refuse requests after the attempt's end. The delay keeps a loop that ignores errors from turning quickly.

        Raises:
            RolloutError: The attempt has ended.
        """
        if self._is_over:
            await asyncio.sleep(REFUSAL_DELAY)
            raise RolloutError("the attempt at this episode has ended; its requests are no longer answered")

    @contextmanager
    def _turn(self, request: LLMRequest) -> Iterator[tuple[Draw, Callable[[TokenChunk], None]]]:
        """Record a wait for the engine.

        Args:
            request: the engine answers it inside of the block.

        Yields:
            The draw of the request, and a function that takes the tokens as they arrive.
        """
        draw = self._draws.begin(request, self._seed_of(request), self._engine.get_version())
        is_kept, task = draw.answer is not None, asyncio.current_task()

        def count(chunk: TokenChunk) -> None:
            self._tokens[self._sample] += len(chunk.token_ids)
            draw.has_begun |= bool(chunk.token_ids)
            if write is not None:
                write(chunk)

        turn = self._episode.attempt.turn(request.input_ids) if self._keeps_tokens else nullcontext()
        self._waiting.add(task)
        try:
            with self._episode.span("generate"), turn as write:
                yield draw, count
        except (asyncio.CancelledError, GeneratorExit):
            draw.has_begun = True
            raise
        finally:
            self._waiting.discard(task)
            if not is_kept:
                self._draws.end(draw, self._engine.get_version())

    def _seed_of(self, request: LLMRequest) -> int | None:
        turn, seed = next(self._turns), request.gconfig.seed
        if seed is None:
            return None if self._seed is None else mix(self._seed, turn)
        return mix(seed, self._place) if self._place > 0 else seed

    def _own(self, request: LLMRequest, seed: int | None) -> LLMRequest:
        extras = request.extras
        if self._has_kept_ids and request.gconfig.is_truncating and "kept_ids" not in extras:
            extras = (*extras, "kept_ids")
        rid = self._affinity or request.rid
        if (seed, extras, rid) == (request.gconfig.seed, request.extras, request.rid):
            return request
        return replace(request, gconfig=replace(request.gconfig, seed=seed), rid=rid, extras=extras)
