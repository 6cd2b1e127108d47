"""Random numbers that depend on what is generated, not on when: keyed by seed, policy version, item, sample, turn."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import replace

from rlite.rollout.episode import Episode
from rlite.types import AsyncInference, LLMRequest, LLMResponse, OnChunk, TokenChunk


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
        seed: the collector's.
        version: policy version at the submission.
        position: the item's, among the submitted ones. A resumed run submits the same items at the same positions.
    """
    return None if seed is None else mix(mix(seed, version), position)


class SampleInference:
    """The engine as one episode of a group sees it: episodes of one group draw different random numbers.

    A request without a seed gets one from the group's seed, the episode's number and the turn, if the group has a seed.
    A request with a seed keeps it in the first episode, and gets a different one in each other episode.

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
    ) -> None:
        self._engine = engine
        self._has_kept_ids = is_trained_on and "kept_ids" in getattr(engine, "extras", ())
        self._affinity = affinity
        self._episode = episode or Episode(time.monotonic())
        self._keeps_tokens = keeps_tokens
        self._tokens = Counter() if tokens is None else tokens
        self._tokens[sample] = 0
        self._sample = sample
        self._seed = None if group_seed is None else mix(group_seed, sample)
        self._turns = itertools.count()

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]  # workflows may use an engine's other attributes
        return getattr(self._engine, name)

    async def agenerate(self, request: LLMRequest, on_chunk: OnChunk | None = None) -> LLMResponse:
        """Return the engine's answer to a request with this episode's seed."""
        with self._turn(request) as count:

            def note(chunk: TokenChunk) -> None:
                count(chunk)
                if on_chunk is not None:
                    on_chunk(chunk)

            return await self._engine.agenerate(self._own(request), note)

    async def stream(self, request: LLMRequest) -> AsyncIterator[TokenChunk]:
        """Yield the engine's answer to a request with this episode's seed."""
        with self._turn(request) as count:
            async with aclosing(self._engine.stream(self._own(request))) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    count(chunk)
                    yield chunk

    @contextmanager
    def _turn(self, request: LLMRequest) -> Iterator[Callable[[TokenChunk], None]]:
        """Record a wait for the engine.

        Args:
            request: the engine answers it inside of the block.

        Yields:
            A function that takes the tokens as they arrive.
        """

        def count(chunk: TokenChunk) -> None:
            self._tokens[self._sample] += len(chunk.token_ids)
            if write is not None:
                write(chunk)

        turn = self._episode.attempt.turn(request.input_ids) if self._keeps_tokens else nullcontext()
        with self._episode.span("generate"), turn as write:
            yield count

    def _own(self, request: LLMRequest) -> LLMRequest:
        turn, seed = next(self._turns), request.gconfig.seed
        if seed is None and self._seed is not None:
            seed = mix(self._seed, turn)
        elif seed is not None and self._sample > 0:
            seed = mix(seed, self._sample)
        extras = request.extras
        if self._has_kept_ids and request.gconfig.is_truncating and "kept_ids" not in extras:
            extras = (*extras, "kept_ids")
        rid = self._affinity or request.rid
        if (seed, extras, rid) == (request.gconfig.seed, request.extras, request.rid):
            return request
        return replace(request, gconfig=replace(request.gconfig, seed=seed), rid=rid, extras=extras)
