"""The replica of the SGLang executor: the driver's streams of tokens from one server.

While the replica is paused, requests wait here, and so do tokens that were on their way: callers see a token boundary.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any, cast

from rlite.backends.serving.http import ANSWER_S, CALL_S, LOST, Endpoint
from rlite.backends.serving.streams import LOOK_S, AnswerStream, StreamedReplica
from rlite.backends.sglang.client import ScoringClient, TokenStream, generate_body
from rlite.backends.sglang.server import OPTIONAL, SglangOptions
from rlite.backends.sglang.worker import SglangWorker
from rlite.errors import RliteError, WorkerError
from rlite.runtime.replicas.replica import Capabilities, InferenceBackend, InFlightRequest, OnFailure
from rlite.runtime.replicas.workers import RankChoice, WorkerSet
from rlite.types import PromptLogprobs, TokenChunk

STOPPED_S = 3.0
"""seconds for a worker to tell why its server ended"""


class SglangReplica(StreamedReplica):
    """Listens to one server. Its thread ends when the engine closes the replica or the server is lost.

    `workers`: workers of the replica; the first one owns the server. `on_failure`: called with the requests in flight
    when the server is lost.
    """

    _client: ScoringClient

    def __init__(self, workers: WorkerSet, options: SglangOptions, on_failure: OnFailure) -> None:
        self._scoring: set[asyncio.Future[list[PromptLogprobs]]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._held: list[tuple[TokenChunk, AnswerStream]] = []
        endpoint = cast(Endpoint, workers.ask(SglangWorker.endpoint))
        super().__init__(workers, endpoint, options.stall_timeout_s, on_failure)

    def pause(self) -> None:
        """Let the server retract its requests. Tokens that arrive from now on wait for `resume`."""
        if self._within(self._hold()):
            self._control("/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        """Continue after `pause`."""
        if self._is_paused and self.failure is None:
            self._control("/continue_generation", {})
            super().resume()

    def prompt_logprobs(self, prompts: Sequence[list[int]], num_top: int) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens."""
        scoring = asyncio.run_coroutine_threadsafe(self._score_all(prompts, num_top), self._loop)
        try:
            while self._thread.is_alive():
                if scoring in wait([scoring], LOOK_S).done:  # `_watch` ends what takes too long
                    return scoring.result()
        except Exception:
            self.check()
            raise
        finally:
            scoring.cancel()
        raise RliteError("the inference engine was released while prompts were scored")

    def _control(self, path: str, body: dict[str, Any]) -> None:
        """Call the server. If it does not answer, the replica is lost."""
        try:
            self._endpoint.call(path, body)
        except WorkerError as error:
            self._within(self._lose(error))

    def _close(self) -> None:
        self.resume()  # an attached server serves others too
        super()._close()
        with contextlib.suppress(RliteError):  # a dead worker has taken its server along
            replace(self.workers, timeout=CALL_S).ask(SglangWorker.stop)

    # -- in the event loop ---------------------------------------------------------------------------------------

    def _connect(self) -> ScoringClient:
        return ScoringClient(self._endpoint)

    @property
    def _is_busy(self) -> bool:
        return bool(self._tasks or self._scoring)

    def _stream_of(self, request: InFlightRequest) -> TokenStream:
        return TokenStream(request.remaining_request(), request.versions, routing=self._endpoint.routing)

    async def _ask(self, stream: AnswerStream) -> None:
        limits = self._endpoint.max_model_len, self._endpoint.vocab_size
        async with self._client.post("/generate", generate_body(stream.request, stream.name, *limits)) as response:
            await self._receive(response.content, stream)

    def _deliver(self, chunk: TokenChunk, stream: AnswerStream) -> None:
        self._heard = time.monotonic()
        if self._is_paused:
            self._held.append((chunk, stream))
        else:
            self._take(chunk, stream)

    def _forget(self, numbers: Collection[int]) -> None:
        super()._forget(numbers)
        self._held = [(chunk, stream) for chunk, stream in self._held if chunk.request_id not in numbers]

    def _abandon(self, stream: AnswerStream) -> None:
        self._background.add(task := self._loop.create_task(self._abort(stream.name)))
        task.add_done_callback(self._background.discard)

    async def _abort(self, name: str) -> None:
        """Ask the server to end a request without a caller. The server would notice the closed stream only later."""
        with contextlib.suppress(WorkerError):  # then it ends with its stream, or with the server
            await asyncio.to_thread(self._endpoint.call, "/abort_request", {"rid": name}, ANSWER_S)

    async def _hold(self) -> bool:
        """Hold tokens that arrive from now on.

        Returns whether the server has to be paused.
        """
        was_paused, self._is_paused = self._is_paused, True
        return not was_paused and self.failure is None

    async def _go_on(self) -> None:
        held, self._held = self._held, []
        for chunk, stream in held:
            self._take(chunk, stream)
        await super()._go_on()

    async def _score_all(self, prompts: Sequence[list[int]], num_top: int) -> list[PromptLogprobs]:
        self._heard = self._heard if self._is_busy else time.monotonic()
        scoring = asyncio.gather(*(self._score(prompt, num_top) for prompt in prompts))
        self._scoring.add(scoring)
        scoring.add_done_callback(self._scoring.discard)
        return await scoring

    async def _score(self, prompt: list[int], num_top: int) -> PromptLogprobs:
        try:
            scored = await self._client.score(prompt, num_top)
        except LOST as error:
            await self._lose(error)
            raise
        self._heard = time.monotonic()
        return scored

    # -- health --------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        await self._client.look("/ready")

    async def _lose(self, error: Exception) -> None:
        """Give up the server. The engine decides about the requests in flight."""
        reason = str(error) or f"no answer within {ANSWER_S:g} s"
        worker = replace(self.workers, timeout=STOPPED_S)
        try:
            asking: Any = asyncio.to_thread(worker.ask, SglangWorker.server_failure)
            reason = await asyncio.wait_for(asking, STOPPED_S) or reason
        except WorkerError as died:
            return self._fail(died)
        except (TimeoutError, RliteError):
            pass  # the worker waits for the server, too, or the engine is being released
        name = self.workers.group.describe(self.workers.ranks[0])
        self._fail(WorkerError(f"{name}: the SGLang server at {self._endpoint.url} is lost: {reason}"))

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        for scoring in self._scoring:
            scoring.cancel()

    async def _shut(self, error: Exception) -> None:
        ending = [*self._scoring, *self._background]
        await super()._shut(error)
        await asyncio.gather(*ending, return_exceptions=True)


BACKEND = InferenceBackend(
    options=SglangOptions,
    worker=SglangWorker,
    replica=SglangReplica,
    ranks=RankChoice(receives=(0,), returns=0),  # the other ranks hold the devices of SGLang's processes
    num_replicas=lambda options: len(options.addresses) or None,
    capabilities=Capabilities(has_prompt_logprobs=True, extras=frozenset({"kept_ids"}), optional_extras=OPTIONAL),
)
