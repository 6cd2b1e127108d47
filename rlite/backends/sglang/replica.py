"""The replica of the SGLang executor: the driver's streams of tokens from one server.

An event loop in a thread of its own holds a stream for each request, and hands tokens to their requests. While the
replica is paused, requests wait here, and so do tokens that were on their way: callers see a token boundary.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import AsyncIterable, Callable, Collection, Coroutine, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any, cast

from rlite.backends.serving.sampler import objection
from rlite.backends.sglang.client import ANSWER_S, LOST, ServerClient, TokenStream, generate_body
from rlite.backends.sglang.server import CALL_S, OPTIONAL, CallRefused, Endpoint, SglangOptions
from rlite.backends.sglang.worker import SglangWorker
from rlite.errors import RliteError, WorkerError
from rlite.runtime.replicas.replica import Capabilities, InferenceBackend, InFlightRequest, OnFailure, WorkerReplica
from rlite.runtime.replicas.workers import RankChoice, T, WorkerSet
from rlite.types import PromptLogprobs, TokenChunk

LOOK_S = 1.0
"""seconds between two looks at the server"""
STOPPED_S = 3.0
"""seconds for a worker to tell why its server ended"""


class SglangReplica(WorkerReplica):
    """Listens to one server. Its thread ends when the engine closes the replica or the server is lost.

    Args:
        workers: workers of the replica; the first one owns the server.
        options: options of the executor.
        on_failure: called with the requests in flight when the server is lost.
    """

    def __init__(self, workers: WorkerSet, options: SglangOptions, on_failure: OnFailure) -> None:
        super().__init__(workers)
        self._endpoint = cast(Endpoint, workers.ask(SglangWorker.endpoint))
        self._options, self._on_failure = options, on_failure
        self._version = 0
        # of the event loop's thread alone
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._scoring: set[asyncio.Future[list[PromptLogprobs]]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._is_paused = False
        self._waiting: list[InFlightRequest] = []
        self._held: list[tuple[TokenChunk, TokenStream]] = []
        self._heard = time.monotonic()
        self._closing = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        name = f"streams of {workers.group.name} {workers.index}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._within(self._open())

    # -- called by the engine ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the failure of a worker or a server that no longer serves.

        Raises:
            Exception: the failure.
        """
        super().check()
        if (failure := self.failure) is not None:
            raise type(failure)(*failure.args)

    def submit(self, requests: Sequence[InFlightRequest]) -> bool:
        """Start requests.

        Returns:
            False, with nothing started, if the replica has failed.
        """
        is_added = self._in_flight.add(requests)
        if is_added:
            self._post(self._start, list(requests))
        return is_added

    def cancel(self, request_ids: Collection[int] | None) -> None:
        """End requests with their tokens so far; None ends all."""
        self._post(self._end_cancelled, self._in_flight.cancel(request_ids))

    def pause(self) -> None:
        """Let the server retract its requests. Tokens that arrive from now on wait for `resume`."""
        if self._within(self._hold()):
            self._control("/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        """Continue after `pause`."""
        if self._is_paused and self.failure is None:
            self._control("/continue_generation", {})
            self._within(self._go_on())

    def drop(self, error: BaseException) -> None:
        """End every request with this error, here and on the server."""
        dropped = self._in_flight.clear()
        self._post(self._forget, [request.request.request_id for request in dropped])
        for request in dropped:
            request.fail(error)

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on."""
        super().set_version(version)
        self._version = version

    def weights_changed(self, version: int) -> None:
        """Let the server serve newly written weights."""
        super().weights_changed(version)
        self._version = version

    def prompt_logprobs(self, prompts: Sequence[list[int]], num_top: int) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens.

        Args:
            prompts: token ids.
            num_top: number of most likely tokens at each place.

        Returns:
            One entry per prompt.

        Raises:
            WorkerError: the server refused a prompt, or was lost meanwhile.
            RliteError: the engine was released meanwhile.
        """
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

    def close(self) -> None:
        """Stop listening, end requests in flight with an error, and end a server of rlite's own. Safe to call again."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self.resume()  # an attached server serves others too
            self._within(self._shut(RliteError("the inference engine was released while this request was in flight")))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=CALL_S)
            with contextlib.suppress(RliteError):  # a dead worker has taken its server along
                replace(self.workers, timeout=CALL_S).ask(SglangWorker.stop)

    # -- between the threads -------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _post(self, act: Callable[..., object], *args: Any) -> None:
        """Call a function in the event loop, soon."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing is left to act on
            self._loop.call_soon_threadsafe(act, *args)

    def _within(self, act: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine in the event loop."""
        return asyncio.run_coroutine_threadsafe(act, self._loop).result(CALL_S)

    def _control(self, path: str, body: dict[str, Any]) -> None:
        """Call the server. If it does not answer, the replica is lost."""
        try:
            self._endpoint.call(path, body)
        except WorkerError as error:
            self._within(self._lose(error))

    # -- in the event loop ---------------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._client = ServerClient(self._endpoint)
        self._watcher = self._loop.create_task(self._watch())

    @property
    def _is_busy(self) -> bool:
        """True if the server owes tokens or scores."""
        return bool(self._tasks or self._scoring)

    def _start(self, requests: Sequence[InFlightRequest]) -> None:
        for request in requests:
            number = request.request.request_id
            if request.is_cancelled:
                self._end_cancelled([number])
            elif self._is_paused:
                self._waiting.append(request)
            elif self.failure is None:
                self._heard = self._heard if self._is_busy else time.monotonic()
                self._tasks[number] = self._loop.create_task(self._stream(request))

    async def _stream(self, request: InFlightRequest) -> None:
        """Receive one request's tokens until it has ended."""
        sequence, name = request.remaining_request(), uuid.uuid4().hex
        stream = TokenStream(sequence, request.versions, self._endpoint.routing)
        limits = self._endpoint.max_model_len, self._endpoint.vocab_size
        try:
            if (told := objection(sequence, *limits)) is not None:
                self._deliver(stream.refusal(told), stream)
            else:
                async with self._client.generate(generate_body(sequence, name, *limits)) as response:
                    await self._receive(response.content, stream)
        except CallRefused as refused:
            self._deliver(stream.refusal(refused.message), stream)
        except LOST as error:
            await self._lose(error)
        finally:
            if self._tasks.get(sequence.request_id) is asyncio.current_task():
                del self._tasks[sequence.request_id]
            if not stream.is_finished and self.failure is None:
                self._background.add(task := self._loop.create_task(self._abort(name)))
                task.add_done_callback(self._background.discard)

    async def _receive(self, lines: AsyncIterable[bytes], stream: TokenStream) -> None:
        """Hand the events of one response to its request.

        Raises:
            OSError: the stream ended before its request.
        """
        async for line in lines:
            if line.startswith(b"data: {"):
                chunk = stream.chunk(line[len(b"data: ") :], self._version)
                self._deliver(chunk, stream)
                if chunk.finish_reason is not None or chunk.error is not None:
                    return
        raise OSError("a stream of tokens broke off")

    def _deliver(self, chunk: TokenChunk, stream: TokenStream) -> None:
        self._heard = time.monotonic()
        if self._is_paused:
            self._held.append((chunk, stream))
        else:
            self._take(chunk, stream)

    def _take(self, chunk: TokenChunk, stream: TokenStream) -> None:
        stream.restamp()
        self._forget(self._in_flight.take([chunk]))

    def _forget(self, numbers: Collection[int]) -> None:
        """End the streams of requests that have ended here."""
        for number in numbers:
            if (task := self._tasks.pop(number, None)) is not None:
                task.cancel()
        self._waiting = [request for request in self._waiting if request.request.request_id not in numbers]
        self._held = [(chunk, stream) for chunk, stream in self._held if chunk.request_id not in numbers]

    def _end_cancelled(self, numbers: Collection[int]) -> None:
        self._forget(numbers)
        self._in_flight.take([TokenChunk(request_id=n, version=self._version, finish_reason="abort") for n in numbers])

    async def _abort(self, name: str) -> None:
        """Ask the server to end a request without a caller. The server would notice the closed stream only later."""
        with contextlib.suppress(WorkerError):  # then it ends with its stream, or with the server
            await asyncio.to_thread(self._endpoint.call, "/abort_request", {"rid": name}, ANSWER_S)

    async def _hold(self) -> bool:
        """Hold tokens that arrive from now on.

        Returns:
            Whether the server has to be paused.
        """
        was_paused, self._is_paused = self._is_paused, True
        return not was_paused and self.failure is None

    async def _go_on(self) -> None:
        self._is_paused, self._heard = False, time.monotonic()
        held, waiting, self._held, self._waiting = self._held, self._waiting, [], []
        for chunk, stream in held:
            self._take(chunk, stream)
        self._start(waiting)

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

    async def _watch(self) -> None:
        """Look at the server again and again, until it is lost."""
        while self.failure is None:
            await asyncio.sleep(LOOK_S)
            try:
                await self._client.look()
            except LOST as error:
                await self._lose(error)
            silent = time.monotonic() - self._heard
            if self._is_busy and not self._is_paused and silent > self._options.stall_timeout_s:
                await self._lose(WorkerError(f"no token, and no scores of a prompt, for {silent:.0f} s"))

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
        if self.failure is None:
            requests = self._in_flight.fail(error)
            self._forget(list(self._tasks))
            for scoring in self._scoring:
                scoring.cancel()
            self._on_failure(self, requests, error)

    async def _shut(self, error: Exception) -> None:
        ending: list[asyncio.Future[Any]] = [self._watcher, *self._tasks.values(), *self._scoring, *self._background]
        self._fail(error)
        self._watcher.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._client.session.close()


BACKEND = InferenceBackend(
    options=SglangOptions,
    worker=SglangWorker,
    replica=SglangReplica,
    ranks=RankChoice(receives=(0,), returns=0),  # the other ranks hold the devices of SGLang's processes
    num_replicas=lambda options: len(options.addresses) or None,
    capabilities=Capabilities(has_prompt_logprobs=True, extras=frozenset({"kept_ids"}), optional_extras=OPTIONAL),
)
