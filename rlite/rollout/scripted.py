"""An inference engine that answers from a script: for tests, for benchmarks, for trying out a workflow."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from rlite.types import LLMRequest, LLMResponse, OnChunk, StopReason, TokenChunk

Answer = Callable[[LLMRequest], Sequence[int]] | Sequence[Sequence[int]]


class ScriptedEngine:
    """Implements `AsyncInference` without a model.

    Each token carries the policy version of its moment. `pause` stops the engine's clock.

    Args:
        answer: returns the completion of a request, or raises what `agenerate` raises; or a list of completions, which
            is repeated forever. Completions are cut at the request's `max_new_tokens`.
        latency: seconds that a completion takes, or a function of the request. Tokens are spread evenly over it.
        logprob: log-probability of every token.
        version: policy version at the beginning.
        context_length: limit in tokens that the engine reports for prompt and completion together.
        end_ids: the model's own end tokens, which the engine reports; default: the special tokens of a tokenizer.
    """

    def __init__(
        self,
        answer: Answer,
        latency: float | Callable[[LLMRequest], float] = 0.0,
        logprob: float = -1.0,
        version: int = 0,
        context_length: int | None = None,
        end_ids: Collection[int] = (),
    ) -> None:
        self._script = None if callable(answer) else itertools.cycle([list(tokens) for tokens in answer])
        self._answer, self._latency, self._logprob = answer, latency, logprob
        self.context_length = context_length
        self.end_ids = frozenset(end_ids)
        self._lock = threading.Lock()
        self._paused_at: float | None = None
        self._offset = 0.0
        self._resumed: Future[None] = Future()
        """the end of the latest pause"""
        self._resumed.set_result(None)
        self._versions = [version]
        self._set_at = [float("-inf")]
        self.num_requests = 0

    async def agenerate(self, request: LLMRequest, on_chunk: OnChunk | None = None) -> LLMResponse:
        """Return the script's next answer after its latency; `on_chunk` gets all tokens at once at that moment."""
        tokens, seconds, reason = self._next(request)
        number, started = self.num_requests, self._clock()
        try:
            await self._sleep_until(started + seconds)
        finally:  # also when it is cancelled before
            share = min(1.0, (self._clock() - started) / seconds) if seconds else 1.0
            if on_chunk is not None:
                on_chunk(self._chunk(number, tokens[: int(share * len(tokens))], self.get_version(), reason))
        made_at = [started + seconds * (index + 1) / len(tokens) for index in range(len(tokens))]
        return LLMResponse(
            input_tokens=list(request.input_ids),
            output_tokens=tokens,
            output_logprobs=[self._logprob] * len(tokens),
            output_versions=[self._version_at(moment) for moment in made_at],
            stop_reason=reason,
            latency=seconds,
            ttft=seconds / max(len(tokens), 1),
            sampling_logprobs=[self._logprob] * len(tokens),
            metadata=dict(request.metadata),
        )

    async def stream(self, request: LLMRequest) -> AsyncIterator[TokenChunk]:
        """Yield the script's next answer token by token."""
        tokens, seconds, reason = self._next(request)
        number, started = self.num_requests, self._clock()
        for index, token in enumerate(tokens):
            made_at = started + seconds * (index + 1) / len(tokens)
            await self._sleep_until(made_at)
            is_last = index == len(tokens) - 1
            yield self._chunk(number, [token], self._version_at(made_at), reason if is_last else None)
        if not tokens:
            yield self._chunk(number, [], self.get_version(), reason)

    def _next(self, request: LLMRequest) -> tuple[list[int], float, StopReason]:
        """Return the tokens of the next answer, its latency in seconds, and why it ends."""
        self.num_requests += 1
        tokens = next(self._script) if self._script is not None else list(self._answer(request))  # type: ignore[operator]
        tokens = tokens[: request.gconfig.max_new_tokens]
        seconds = self._latency(request) if callable(self._latency) else self._latency
        return tokens, seconds, "length" if len(tokens) == request.gconfig.max_new_tokens else "stop"

    def _version_at(self, moment: float) -> int:
        with self._lock:
            return self._versions[bisect.bisect_right(self._set_at, moment) - 1]

    def _chunk(self, number: int, tokens: list[int], version: int, reason: StopReason | None) -> TokenChunk:
        logprobs = [self._logprob] * len(tokens)
        both: dict[str, Any] = {"logprobs": logprobs, "sampling_logprobs": logprobs}
        return TokenChunk(request_id=number, token_ids=tokens, version=version, finish_reason=reason, **both)

    def get_version(self) -> int:
        """Return the policy version."""
        return self._versions[-1]

    def set_version(self, version: int) -> None:
        """Let tokens carry this version from now on."""
        now = self._clock()
        with self._lock:
            self._versions.append(version)
            self._set_at.append(now)

    def pause(self) -> None:
        """Stop the clock: no token is generated until `resume()`."""
        now = self._clock()
        with self._lock:
            if self._paused_at is None:
                self._paused_at, self._resumed = now, Future()

    def resume(self) -> None:
        """Let the clock run again."""
        with self._lock:
            if self._paused_at is not None:
                self._offset = time.monotonic() - self._paused_at
                self._paused_at = None
                self._resumed.set_result(None)

    def _clock(self) -> float:
        """Return seconds, without those of pauses."""
        with self._lock:
            return time.monotonic() - self._offset if self._paused_at is None else self._paused_at

    async def _sleep_until(self, moment: float) -> None:
        while True:
            if not self._resumed.done():
                await asyncio.shield(asyncio.wrap_future(self._resumed))  # others wait for it, too
            await asyncio.sleep(max(moment - self._clock(), 0.0))
            if moment <= self._clock():
                return
