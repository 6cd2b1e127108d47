"""Random numbers that depend on what is generated, not on when: keyed by seed, policy version, item, sample, turn."""

from __future__ import annotations

import itertools
from dataclasses import replace

from rlite.types import AsyncInference, LLMRequest, LLMResponse


def mix(seed: int, number: int) -> int:
    """A 63-bit seed from two numbers (splitmix64)."""
    mask = 2**64 - 1
    z = (seed * 0x9E3779B97F4A7C15 + number + 0x632BE59BD9B4E019) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


class SeededInference:
    """An engine for one episode: each of its requests without a seed gets one, from the episode's and its turn."""

    def __init__(self, engine: AsyncInference, seed: int) -> None:
        self._engine = engine
        self._seed = seed
        self._turns = itertools.count()

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]  # workflows may use what this engine has besides
        return getattr(self._engine, name)

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        turn = next(self._turns)
        if request.gconfig.seed is None:
            request = replace(request, gconfig=replace(request.gconfig, seed=mix(self._seed, turn)))
        return await self._engine.agenerate(request)

    def get_version(self) -> int:
        return self._engine.get_version()

    def pause(self) -> None:
        self._engine.pause()

    def resume(self) -> None:
        self._engine.resume()
