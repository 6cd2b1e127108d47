"""The replica of a server over HTTP: the driver's streams of tokens.

An event loop in a thread of its own holds a stream for each request, and hands tokens to their requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import AsyncIterable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlite.backends.serving.http import ANSWER_S, CALL_S, LOST, CallRefused, Endpoint, ServerClient
from rlite.backends.serving.sampler import objection
from rlite.errors import RliteError, WorkerError
from rlite.runtime.replicas.replica import InFlightRequest, OnFailure, WorkerReplica
from rlite.runtime.replicas.workers import T, WorkerSet
from rlite.types import SequenceRequest, TokenChunk

LOOK_S = 1.0
"""seconds between two looks at the server"""


@dataclass
class AnswerStream:
    """State of one request's stream of events."""

    request: SequenceRequest
    versions: list[int]
    """versions of the completion's tokens so far, which may be corrected"""
    is_finished: bool = False
    """the server has ended the request, or never had it"""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, end) of this stream's tokens, as the server reports them at its end"""
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    """unique id of the request on the server"""

    def chunk(self, line: str | bytes, version: int) -> TokenChunk:
        """Return the new tokens of one event.

        `line`: JSON text of the event.
        """
        raise NotImplementedError

    def refusal(self, error: str, is_nonfinite: bool = False) -> TokenChunk:
        """Return the last chunk of a request that the server does not serve."""
        self.is_finished = True
        return TokenChunk(request_id=self.request.request_id, version=0, error=error, is_nonfinite=is_nonfinite)

    def restamp(self) -> None:
        """Correct the versions of tokens that were on their way while the version changed."""
        start = len(self.request.output_ids)
        for index in range(start, len(self.versions)):
            self.versions[index] = next((v for v, end in self.spans if index - start < end), self.versions[index])


def version_of(reported: Any, otherwise: int) -> int:
    """Return the policy version that a server reports as text, or the other one if the text is no number."""
    return int(reported) if str(reported).isdecimal() else otherwise


class StreamedReplica(WorkerReplica):
    """Listens to one server. Its thread ends when the engine closes the replica or the server is lost.

    `stall_timeout_s`: seconds without any token, with requests in flight, after which the server counts as lost.
    `on_failure`: called with the requests in flight when the server is lost.
    """

    def __init__(self, workers: WorkerSet, endpoint: Endpoint, stall_timeout_s: float, on_failure: OnFailure) -> None:
        super().__init__(workers)
        self._endpoint, self._stall_timeout_s, self._on_failure = endpoint, stall_timeout_s, on_failure
        self._version = 0
        # of the event loop's thread alone
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_paused = False
        self._waiting: list[InFlightRequest] = []
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
        """Raise the failure of a worker or a server that no longer serves."""
        super().check()
        if (failure := self.failure) is not None:
            raise type(failure)(*failure.args)

    def submit(self, requests: Sequence[InFlightRequest]) -> bool:
        """Start requests.

        Returns False, with nothing started, if the replica has failed.
        """
        is_added = self._in_flight.add(requests)
        if is_added:
            self._post(self._start, list(requests))
        return is_added

    def cancel(self, request_ids: Collection[int] | None) -> None:
        """End requests with their tokens so far; None ends all."""
        self._post(self._end_cancelled, self._in_flight.cancel(request_ids))

    def pause(self) -> None:
        """End the streams. Their requests wait, and continue from their tokens after `resume`."""
        self._within(self._rest())

    def resume(self) -> None:
        """Continue after `pause`."""
        if self._is_paused and self.failure is None:
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

    def close(self) -> None:
        """Stop listening, and end requests in flight with an error. Safe to call again."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._close()

    def _close(self) -> None:
        self._within(self._shut(RliteError("the inference engine was released while this request was in flight")))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CALL_S)

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

    # -- in the event loop ---------------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._client = self._connect()
        self._watcher = self._loop.create_task(self._watch())

    def _connect(self) -> ServerClient:
        return ServerClient(self._endpoint)

    @property
    def _is_busy(self) -> bool:
        """True if the server owes tokens."""
        return bool(self._tasks)

    def _start(self, requests: Sequence[InFlightRequest], attempt: int = 0) -> None:
        for request in requests:
            number = request.request.request_id
            if request.is_cancelled:
                self._end_cancelled([number])
            elif self._is_paused:
                self._waiting.append(request)
            elif self.failure is None:
                self._heard = self._heard if self._is_busy else time.monotonic()
                self._tasks[number] = self._loop.create_task(self._serve(request, attempt))

    async def _serve(self, request: InFlightRequest, attempt: int) -> None:
        """Receive one request's tokens until it has ended."""
        stream = self._stream_of(request)
        number, limits = stream.request.request_id, (self._endpoint.max_model_len, self._endpoint.vocab_size)
        try:
            if (told := objection(stream.request, *limits)) is not None:
                self._deliver(stream.refusal(told), stream)
            else:
                await self._attempt(request, stream, attempt)
        except asyncio.CancelledError:
            if number in self._tasks:  # it rests, and is not forgotten
                self._waiting.append(request)
            raise
        finally:
            if self._tasks.get(number) is asyncio.current_task():
                del self._tasks[number]
            if not stream.is_finished and self.failure is None:
                self._abandon(stream)

    async def _attempt(self, request: InFlightRequest, stream: AnswerStream, attempt: int) -> None:
        try:
            await self._ask(stream)
        except (CallRefused, *LOST) as error:
            await self._interrupted(request, stream, attempt, error)

    async def _rest(self) -> None:
        self._is_paused, tasks = True, list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _go_on(self) -> None:
        self._is_paused, self._heard = False, time.monotonic()
        waiting, self._waiting = self._waiting, []
        self._start(waiting)

    def _stream_of(self, request: InFlightRequest) -> AnswerStream:
        """Return the stream of what a request lacks."""
        raise NotImplementedError

    async def _ask(self, stream: AnswerStream) -> None:
        """Send a request, and `_receive` its events."""
        raise NotImplementedError

    async def _interrupted(
        self, request: InFlightRequest, stream: AnswerStream, attempt: int, error: Exception
    ) -> None:
        """Refuse a request that the server refused, or give up the server."""
        if isinstance(error, CallRefused):
            self._deliver(stream.refusal(error.message), stream)
        else:
            await self._lose(error)

    def _abandon(self, stream: AnswerStream) -> None:
        """Note that nobody waits for a stream. By default the server sees that it was closed."""

    async def _receive(self, lines: AsyncIterable[bytes], stream: AnswerStream) -> None:
        """Hand the events of one response to its request."""
        async for line in lines:
            if line.startswith(b"data: {"):
                chunk = stream.chunk(line[len(b"data: ") :], self._version)
                self._deliver(chunk, stream)
                if chunk.finish_reason is not None or chunk.error is not None:
                    return
        raise OSError("a stream of tokens broke off")

    def _deliver(self, chunk: TokenChunk, stream: AnswerStream) -> None:
        self._heard = time.monotonic()
        self._take(chunk, stream)

    def _take(self, chunk: TokenChunk, stream: AnswerStream) -> None:
        stream.restamp()
        self._forget(self._in_flight.take([chunk]))

    def _forget(self, numbers: Collection[int]) -> None:
        """End the streams of requests that have ended here."""
        for number in numbers:
            if (task := self._tasks.pop(number, None)) is not None:
                task.cancel()
        self._waiting = [request for request in self._waiting if request.request.request_id not in numbers]

    def _end_cancelled(self, numbers: Collection[int]) -> None:
        self._forget(numbers)
        self._in_flight.take([TokenChunk(request_id=n, version=self._version, finish_reason="abort") for n in numbers])

    # -- health --------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Return if the server is well. An error of `LOST` says that it is not."""
        raise NotImplementedError

    async def _watch(self) -> None:
        """Look at the server again and again, until it is lost."""
        while self.failure is None:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except LOST as error:
                await self._lose(error)
            silent = time.monotonic() - self._heard
            if self._is_busy and not self._is_paused and silent > self._stall_timeout_s:
                await self._lose(WorkerError(f"no token, and no scores of a prompt, for {silent:.0f} s"))

    async def _lose(self, error: Exception) -> None:
        """Give up the server. The engine decides about the requests in flight."""
        reason = str(error) or f"no answer within {ANSWER_S:g} s"
        self._fail(WorkerError(f"the {self._endpoint.kind} at {self._endpoint.url} is lost: {reason}"))

    def _fail(self, error: Exception) -> None:
        if self.failure is None:
            requests = self._in_flight.fail(error)
            self._forget(list(self._tasks))
            self._on_failure(self, requests, error)

    async def _shut(self, error: Exception) -> None:
        ending: list[asyncio.Future[Any]] = [self._watcher, *self._tasks.values()]
        self._fail(error)
        self._watcher.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._client.session.close()
