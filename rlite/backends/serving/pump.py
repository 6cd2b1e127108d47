"""The replica of the embedded executor: a thread that pumps synchronous workers.

Each call sends new requests and runs a few decode steps. The thread hands the tokens to their requests. To pause, the
thread makes no further call, so generation rests at a token boundary.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlite.errors import RliteError
from rlite.observability import trace
from rlite.runtime.replicas.adapters import AdapterWeights
from rlite.runtime.replicas.replica import AdapterWorker, InFlightRequest, OnFailure, ServingWorker, WorkerReplica
from rlite.runtime.replicas.workers import WorkerSet
from rlite.types import PromptLogprobs, SequenceRequest, TokenChunk

STEPS_PER_CALL = 8
"""decode steps between two checks of the queue of new requests"""
PROMPTS_PER_CALL = 32
"""prompts whose log-probabilities one call computes"""


class PumpedWorker(ServingWorker, Protocol):
    """A synchronous worker: it generates tokens only while `advance` runs."""

    def advance(self, new: list[SequenceRequest], aborted: list[int], max_steps: int) -> list[TokenChunk]:
        """Accept requests, end requests, run decode steps, and return the generated tokens."""

    def prompt_logprobs(self, prompts: list[list[int]], num_top: int) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens."""


@dataclass(frozen=True)
class Scoring:
    """Prompts that wait for their log-probabilities."""

    prompts: list[list[int]]
    num_top: int
    adapter: str | None = None
    done: Future[list[PromptLogprobs]] = field(default_factory=Future)


class PumpedReplica(WorkerReplica):
    """A replica whose thread calls its workers while there are requests and it is not paused.

    The thread ends when the engine closes the replica or a call fails.

    `options`: options of the executor; unused. `on_failure`: called with the requests in flight when a call fails.
    """

    def __init__(self, workers: WorkerSet, options: Any, on_failure: OnFailure) -> None:
        super().__init__(workers)
        self._on_failure = on_failure
        self._waiting: list[InFlightRequest] = []
        self._cancelled: list[int] = []
        self._scorings: deque[Scoring] = deque()
        self._changed = threading.Condition()
        self._calling = threading.Lock()
        self._may_run = threading.Event()
        self._may_run.set()
        self._is_closing = False
        name = f"pump of {workers.group.name} {workers.index}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[InFlightRequest]) -> bool:
        """Queue requests for the next call.

        Returns False, with nothing queued, if the replica has failed.
        """
        with self._changed:
            if not self._in_flight.add(requests):
                return False
            self._waiting += requests
            self._cancelled += [request.request.request_id for request in requests if request.is_cancelled]
            self._changed.notify()
            return True

    def cancel(self, request_ids: Collection[int] | None) -> None:
        """Queue cancellations for the next call; None cancels all requests."""
        with self._changed:
            self._cancelled += self._in_flight.cancel(request_ids)
            self._changed.notify()

    def pause(self) -> None:
        """Wait for the current call, make no further call, and end cancelled requests."""
        self._may_run.clear()
        with self._calling:  # the call under way has ended
            with self._changed:
                new, cancelled = self._take() if self._cancelled else ([], [])
            if cancelled:
                self._try_to_advance(new, cancelled, 0)

    def resume(self) -> None:
        """Continue to call the workers."""
        self._may_run.set()

    def drop(self, error: BaseException) -> None:
        """End every request with this error. Later calls end the requests on the workers."""
        with self._changed:
            dropped = self._in_flight.clear()
            unsent = set(self._waiting)
            self._cancelled += [request.request.request_id for request in dropped if request not in unsent]
            self._waiting = []
        for request in dropped:
            request.fail(error)

    def stage_adapter(self, name: str | None, weights: AdapterWeights, version: int) -> bool | None:
        """Make a version of an adapter ready on all workers, between two calls.

        Returns whether it changes a logit; None if no worker knows.
        """
        with self._calling:
            found = self.call(AdapterWorker.stage_adapter, name, weights, version)
        return next((changes for changes in found if changes is not None), None)

    def use_adapter(self, name: str | None, is_kept: bool) -> None:
        """Serve the version that was staged. The replica is paused."""
        self.call(AdapterWorker.use_adapter, name, is_kept)

    def drop_adapter(self, name: str | None) -> None:
        """Forget an adapter, and a version that was staged. The replica is paused."""
        self.call(AdapterWorker.drop_adapter, name)

    def prompt_logprobs(
        self, prompts: Sequence[list[int]], num_top: int, adapter: str | None = None
    ) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens. Calls for a few prompts alternate with decode steps."""
        starts = range(0, len(prompts), PROMPTS_PER_CALL)
        scorings = [Scoring(list(prompts[start : start + PROMPTS_PER_CALL]), num_top, adapter) for start in starts]
        with self._changed:
            if self.failure is not None:
                raise self.failure
            self._scorings += scorings
            self._changed.notify()
        return [scored for scoring in scorings for scored in scoring.done.result()]

    def close(self) -> None:
        """Stop the thread and end requests in flight with an error."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._may_run.set()
        self._thread.join(timeout=60)
        self._fail(RliteError("the inference engine was released while this request was in flight"))

    def _run(self) -> None:
        def has_to_look() -> bool:
            return bool(self._has_ended or self._cancelled or self.num_in_flight or self._scorings)

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
                    is_first = len(new) == len(self._in_flight)
                    scoring = self._scorings.popleft() if self._scorings else None
                if scoring is not None:
                    self._score(scoring)
                # the first requests of a batch do not decode long without the others, which arrive during this call
                if new or cancelled or self.num_in_flight:
                    self._try_to_advance(new, cancelled, 1 if is_first else STEPS_PER_CALL)

    @property
    def _has_ended(self) -> bool:
        return self._is_closing or self.failure is not None

    def _take(self) -> tuple[list[InFlightRequest], list[int]]:
        new, cancelled = self._waiting, self._cancelled
        self._waiting, self._cancelled = [], []
        return new, cancelled

    def _try_to_advance(self, new: Sequence[InFlightRequest], cancelled: list[int], steps: int) -> None:
        requests = [request.remaining_request() for request in new]
        self._deliver(lambda: self.workers.ask(PumpedWorker.advance, requests, cancelled, steps))

    def _deliver(self, ask: Callable[[], Sequence[TokenChunk]]) -> None:
        """Pass the tokens that a call returns to their requests. If the call fails, the replica fails."""
        try:
            left = self._in_flight.take(ask())
        except Exception as error:  # the replica's, or a worker's own: it belongs to everyone who waits
            self._fail(error)
            return
        if left:
            with self._changed:
                self._cancelled += left

    def _score(self, scoring: Scoring) -> None:
        try:
            asked = scoring.prompts, scoring.num_top
            if scoring.adapter is None:
                scored = self.workers.ask(PumpedWorker.prompt_logprobs, *asked)
            else:
                scored = self.workers.ask(AdapterWorker.adapter_logprobs, *asked, scoring.adapter)
        except Exception as error:  # any error belongs to the waiting caller
            scoring.done.set_exception(error)
        else:
            scoring.done.set_result(scored)

    def _fail(self, error: Exception) -> None:
        """Accept no further requests. Cancelled requests end now; the engine decides about the others."""
        requests = self._in_flight.fail(error)
        with self._changed:
            self._waiting, self._cancelled = [], []
            scorings, self._scorings = self._scorings, deque()
            self._changed.notify()
        for scoring in scorings:
            scoring.done.set_exception(error)
        self._on_failure(self, requests, error)
