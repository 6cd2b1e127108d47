"""The pump of one replica: it sends new requests with short calls, and hands the tokens to those who wait.

Workers are synchronous and know nothing of it. Pausing is not calling: generation rests at a token boundary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rlite.engine.base import Executor
from rlite.engine.replica import PumpedWorker
from rlite.engine.workers import Executor
from rlite.errors import DataError, NonFiniteError, RliteError
from rlite.observability import trace
from rlite.types import (
    SequenceRequest,
    StopReason,
    TokenChunk,
)

STEPS_PER_CALL = 8
"""decode steps between two looks at the queue of new requests"""


@dataclass
class Flight:
    """One request on its way: what has arrived so far, and who waits for the end."""

    request: SequenceRequest
    done: Future[Flight] = field(default_factory=lambda: _running_future())
    on_chunk: Callable[[TokenChunk], object] | None = None
    started: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0
    ended: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: StopReason = "abort"
    is_cancelled: bool = False
    """nobody waits for more"""

    def remaining_request(self) -> SequenceRequest:
        """What a replica is asked for: all of it, or what is left of it when another one was lost."""
        return replace(self.request, output_ids=list(self.token_ids)) if self.token_ids else self.request

    @property
    def cost(self) -> int:
        """Tokens that this request may still need; what the router balances."""
        return len(self.request.input_ids) + self.request.gconfig.max_new_tokens - len(self.token_ids)

    def take(self, chunk: TokenChunk) -> bool:
        """Append a chunk; True if nobody waits for another."""
        if chunk.token_ids and not self.token_ids:
            self.first_token = time.perf_counter()
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.sampling_logprobs += chunk.sampling_logprobs
        self.versions += [chunk.version] * len(chunk.token_ids)
        if self.on_chunk is not None:
            try:
                self.on_chunk(chunk)
            except Exception as error:  # whatever it is, it belongs to this request; the replica serves others too
                self.done.set_exception(error)
                return True
        if chunk.finish_reason is None and chunk.error is None:
            return False
        self.ended = time.perf_counter()
        if chunk.error is not None:
            self.done.set_exception((NonFiniteError if chunk.is_nonfinite else DataError)(chunk.error))
        else:
            self.finish_reason = chunk.finish_reason or "abort"
            self.done.set_result(self)
        return True

    def abort(self) -> None:
        """Answer with what has arrived; no worker is asked."""
        version = self.versions[-1] if self.versions else 0
        self.take(
            TokenChunk(
                request_id=self.request.request_id,
                token_ids=[],
                logprobs=[],
                sampling_logprobs=[],
                version=version,
                finish_reason="abort",
            )
        )


def _running_future() -> Future[Flight]:
    """A future that only the pump can end: a task that stops waiting for it must not cancel it under the pump."""
    future: Future[Flight] = Future()
    future.set_running_or_notify_cancel()
    return future


class Pump:
    """Feeds one replica. Consumes: submitted requests. Waits for: requests, and leave to run. Ends with the engine, or
    with its replica: then `on_failure(pump, flights, error)` says what becomes of the requests in flight.
    """

    def __init__(self, executor: Executor, may_run: threading.Event, on_failure: OnFailure) -> None:
        self.executor = executor
        self._on_failure = on_failure
        self.failure: BaseException | None = None
        self._may_run = may_run
        self._changed = threading.Condition()
        self._waiting: list[Flight] = []
        self._running: dict[int, Flight] = {}
        self._cancelled: list[int] = []
        self._closing = False
        self._calling = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name=f"pump of {executor.group.name} {executor.index}", daemon=True
        )
        self._thread.start()

    @property
    def outstanding(self) -> int:
        """Tokens that this replica may still have to read or write."""
        with self._changed:
            return sum(flight.cost for flight in [*self._waiting, *self._running.values()])

    @property
    def num_in_flight(self) -> int:
        with self._changed:
            return len(self._waiting) + len(self._running)

    def submit(self, flights: Sequence[Flight]) -> bool:
        """Take these requests in; False if the replica has failed."""
        with self._changed:
            if self.failure is not None:
                return False
            self._waiting += flights
            self._cancelled += [flight.request.request_id for flight in flights if flight.is_cancelled]
            self._changed.notify()
            return True

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Ask for these requests to end; they answer with stop_reason "abort"."""
        with self._changed:
            here = {flight.request.request_id for flight in [*self._waiting, *self._running.values()]}
            self._cancelled += here.intersection(request_ids)
            self._changed.notify()

    def cancel_all(self) -> None:
        with self._changed:
            self.cancel([flight.request.request_id for flight in [*self._waiting, *self._running.values()]])

    @contextmanager
    def between_calls(self) -> Iterator[None]:
        """No call is under way inside; the caller has cleared the permission to run before."""
        with self._calling:
            yield

    def flush_cancelled(self) -> None:
        """Deliver cancellations at once, while the pump is held."""
        with self._calling:
            with self._changed:
                new, cancelled = self._take() if self._cancelled else ([], [])
            if cancelled:
                self._try_to_advance(new, cancelled, 0)

    def drop_all(self, error: BaseException) -> None:
        """End every request in flight with `error`; the replica itself goes on."""
        with self._changed:
            self._cancelled += self._running
            flights, self._waiting, self._running = [*self._waiting, *self._running.values()], [], {}
        end_all(flights, error)

    def close(self) -> None:
        """No further call begins; `join` waits for the one under way."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self) -> None:
        """Wait until a closed pump has ended; what is in flight then ends with an error."""
        self._may_run.set()
        self._thread.join(timeout=60)
        self._fail(RliteError("the inference engine was released while this request was in flight"))

    def _run(self) -> None:
        def has_to_look() -> bool:
            return bool(self._has_ended or self._waiting or self._running or self._cancelled)

        while True:
            with self._changed:
                self._changed.wait_for(has_to_look)
                if self._has_ended:
                    return
            if not self._may_run.is_set():
                with trace.span("held"):
                    self._may_run.wait()
            with self._calling:
                if not self._may_run.is_set():
                    continue
                with self._changed:
                    if self._has_ended:
                        return
                    new, cancelled = self._take()
                self._try_to_advance(new, cancelled, STEPS_PER_CALL)

    @property
    def _has_ended(self) -> bool:
        return self._closing or self.failure is not None

    def _try_to_advance(self, new: Sequence[Flight], cancelled: list[int], steps: int) -> None:
        try:
            self._advance(new, cancelled, steps)
        except Exception as error:  # the replica's, or a worker's own: it belongs to everyone who waits
            self._fail(error, cancelled)

    def _take(self) -> tuple[list[Flight], list[int]]:
        new, cancelled = self._waiting, self._cancelled
        self._waiting, self._cancelled = [], []
        self._running.update({flight.request.request_id: flight for flight in new})
        return new, cancelled

    def _advance(self, new: Sequence[Flight], cancelled: list[int], steps: int) -> None:
        requests = [flight.remaining_request() for flight in new]
        chunks = self.executor.ask(PumpedWorker.advance, requests, cancelled, steps)
        for chunk in chunks:
            flight = self._running.get(chunk.request_id)
            if flight is not None and flight.take(chunk):
                with self._changed:
                    del self._running[chunk.request_id]
                    if chunk.finish_reason is None and chunk.error is None:  # the worker has not ended it
                        self._cancelled.append(chunk.request_id)

    def _fail(self, error: Exception, cancelled: Sequence[int] = ()) -> None:
        """Take in nothing more. Requests whose end was asked for have it now; the others are the owner's."""
        with self._changed:
            self.failure = self.failure or error
            gone = {*self._cancelled, *cancelled}
            flights = [*self._waiting, *self._running.values()]
            self._waiting, self._running, self._cancelled = [], {}, []
            self._changed.notify()
        for flight in flights:
            if flight.is_cancelled or flight.request.request_id in gone:
                flight.abort()
        self._on_failure(self, [flight for flight in flights if not flight.done.done()], error)


OnFailure = Callable[[Pump, list[Flight], Exception], None]


def end_all(flights: Sequence[Flight], error: BaseException) -> None:
    """Let whoever waits for one of these requests have this error."""
    for flight in flights:
        if not flight.done.done():
            flight.done.set_exception(error)
