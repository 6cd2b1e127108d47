"""Worker groups: calls on many workers at once, with time-outs that name the late and errors that name the dead.

submit ──> waiting ──> all answered ──────────────> results, in rank order
              │
              ├── a worker raised ── peers end within the grace ──> its exception; the group goes on
              │          └── peers are stuck in a collective ─────> its exception; their groups are stopped
              ├── a worker died ──────────────────────────────────> WorkerDied; its group is stopped
              └── time is up ─────────────────────────────────────> CallTimeout that names the late ranks
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

import cloudpickle

from rlite.cluster.host import Outcome, WorkerContext, WorkerKey, worker_name
from rlite.cluster.placement import Device
from rlite.errors import CallTimeout, RliteError, WorkerDied, WorkerError

PEER_GRACE_S = 4.0
"""how long the peers of a failed rank may go on before they count as stuck in a collective"""


class WorkerHandle(Protocol):
    """The seam to a launcher: how one worker is reached.

    The futures resolve to an `Outcome`, or raise WorkerDied when the process is gone.
    """

    process: Any
    """identity of the process that hosts the worker"""

    def create(self, key: WorkerKey, factory: bytes, context: WorkerContext) -> Future[Outcome]: ...

    def call(self, key: WorkerKey, method: str, args: tuple, kwargs: dict) -> Future[Outcome]: ...

    def apply(self, keys: tuple[WorkerKey | None, ...], function: bytes, args: tuple) -> Future[Outcome]: ...

    def stop(self, key: WorkerKey) -> None: ...

    @property
    def death(self) -> Future[Any]:
        """Ends, with WorkerDied, when the process is gone."""
        ...


class WorkerGroup:
    """Workers 0..n-1 of one owner, each on its device. Created by a launcher's `start`."""

    def __init__(
        self,
        name: str,
        devices: Sequence[Device],
        handles: Sequence[WorkerHandle],
        call_timeout: float,
        order: threading.RLock | None = None,
    ):
        self.name = name
        self.devices = tuple(devices)
        self.handles = tuple(handles)
        self.call_timeout = call_timeout
        self.order = order or threading.RLock()
        """held while one call is submitted to several workers, so that all see calls in the same order"""
        self.failure: RliteError | None = None
        self._stopped = False

    def __len__(self) -> int:
        return len(self.handles)

    def key(self, rank: int) -> WorkerKey:
        return (self.name, rank)

    def describe(self, rank: int) -> str:
        return worker_name(self.name, rank, self.devices[rank])

    def create(
        self, factory: Callable[[WorkerContext], Any], contexts: Sequence[WorkerContext], timeout: float
    ) -> None:
        """Make every worker, or none; the factory travels pickled by value where it has to."""
        blob = cloudpickle.dumps(factory)
        try:
            with self.order:
                handles = enumerate(self.handles)
                futures = {rank: handle.create(self.key(rank), blob, contexts[rank]) for rank, handle in handles}
            self.gather(futures, what="start", timeout=timeout)
        except BaseException:
            self.stop()
            raise

    def submit(self, rank: int, method: str, args: tuple = (), kwargs: dict | None = None) -> Future[Outcome]:
        """Start one call on one worker. Calls on a worker run one at a time, in the order they were submitted."""
        self.check()
        return self.handles[rank].call(self.key(rank), method, args, kwargs or {})

    def call(
        self,
        method: str,
        calls: Sequence[tuple[tuple, dict]],
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call `method` on `ranks` (default all), each with its own arguments, and wait for all results."""
        ranks = range(len(self)) if ranks is None else ranks
        with self.order:
            futures = {rank: self.submit(rank, method, *call) for rank, call in zip(ranks, calls, strict=True)}
        return self.gather(futures, what=method, timeout=timeout)

    def broadcast(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call `method` on every worker with the same arguments."""
        return self.call(method, [(args, kwargs)] * len(self), timeout=timeout)

    def gather(self, futures: dict[int, Future[Outcome]], what: str, timeout: float | None = None) -> list[Any]:
        """Wait for submitted calls (rank -> future); results in the order of `futures`. Raises: as `collect`."""
        calls = [PendingCall(self, rank, future) for rank, future in futures.items()]
        return collect(calls, what, self.call_timeout if timeout is None else timeout)

    def fail(self, error: RliteError) -> None:
        """Stop the group; every later call raises this error."""
        self.failure = error
        self.stop()

    def check(self) -> None:
        """Raise if the group cannot serve calls any more."""
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)
        if self._stopped:
            raise WorkerError(f"{self.name} was released; build the engine again")

    def stop(self) -> None:
        """End every worker; safe to call again."""
        if self._stopped:
            return
        self._stopped = True
        for rank, handle in enumerate(self.handles):
            with contextlib.suppress(RliteError):  # a worker that is already gone needs no stopping
                handle.stop(self.key(rank))


@dataclass(frozen=True)
class PendingCall:
    """A call under way on one worker."""

    group: WorkerGroup
    rank: int
    answer: Future[Outcome]

    @property
    def name(self) -> str:
        return self.group.describe(self.rank)


def collect(calls: Sequence[PendingCall], what: str, timeout: float) -> list[Any]:
    """Wait for calls on workers of one or more groups; their results, in order. See the module's drawing.

    Raises: the first remote exception, with its type; WorkerDied; CallTimeout naming the workers that are late.
    """
    deadline = time.monotonic() + timeout
    groups = dict.fromkeys(call.group for call in calls)
    deaths = {(group, rank): handle.death for group in groups for rank, handle in enumerate(group.handles)}
    pending = list(calls)
    while pending:
        left = max(deadline - time.monotonic(), 0)
        wait([call.answer for call in pending] + [*deaths.values()], timeout=left, return_when=FIRST_COMPLETED)
        done: list[PendingCall] = []
        waiting: list[PendingCall] = []
        for call in pending:
            (done if call.answer.done() else waiting).append(call)
        pending = waiting
        _raise_deaths(deaths, done, pending, what)
        for call in done:
            if (error := call.answer.exception()) is not None:
                raise error
            if call.answer.result().error is not None:
                wait([peer.answer for peer in pending], timeout=PEER_GRACE_S)
                _raise_deaths(deaths, pending, pending, what)  # then the death is the cause of the error
                _stop_stuck(pending, f"{what} raised on {call.name}")
                call.answer.result().unwrap(call.name)
        if pending and time.monotonic() >= deadline:
            late = tuple(call.name for call in pending)
            raise CallTimeout(
                f"{what}: no answer within {timeout:g} s from {len(late)} of {len(calls)} workers: {'; '.join(late)}. "
                "Give it more time (timeout=, or call_timeout= in rlite.init) or look at what these workers are doing.",
                late,
            )
    return [call.answer.result().unwrap(call.name) for call in calls]


def _raise_deaths(
    deaths: dict[tuple[WorkerGroup, int], Future[Any]],
    ended: Sequence[PendingCall],
    pending: Sequence[PendingCall],
    what: str,
) -> None:
    """Raise WorkerDied if a process is gone, and stop its group, and the groups of peers that wait for it."""
    dead = [worker for worker, death in deaths.items() if death.done()]
    for call in ended:
        if call.answer.done() and isinstance(call.answer.exception(), WorkerDied):
            dead.append((call.group, call.rank))
    if not dead:
        return
    names = tuple(dict.fromkeys(group.describe(rank) for group, rank in dead))
    stopped = dict.fromkeys(group for group, _ in dead)
    error = WorkerDied(
        f"{what}: worker process ended: {'; '.join(names)}. "
        f"{', '.join(group.name for group in stopped)} was stopped; build the engine again.",
        names,
    )
    for group in stopped:
        group.fail(error)
    others = [call for call in pending if call.group not in stopped]
    wait([call.answer for call in others], timeout=PEER_GRACE_S)
    _stop_stuck(others, str(error))
    raise error


def _stop_stuck(pending: Sequence[PendingCall], cause: str) -> None:
    """Stop the groups of workers that still wait, in a collective that will never complete."""
    stuck = [call for call in pending if not call.answer.done()]
    for group in dict.fromkeys(call.group for call in stuck):
        names = "; ".join(call.name for call in stuck if call.group is group)
        group.fail(
            WorkerError(
                f"{cause}, while {names} waited for it in a collective; {group.name} was stopped. "
                "Build the engine again."
            )
        )


def apply_on_processes(
    calls: Iterable[tuple[WorkerGroup, int, tuple[WorkerKey | None, ...], tuple]],
    function: Callable[..., Any],
    groups: Sequence[WorkerGroup],
    what: str,
    timeout: float,
) -> list[Any]:
    """Run `function(*workers, *args)` in several processes at once; each call names a worker, keys and args.

    This is how two groups work together (weight sync): a process that hosts workers of both gets one call.
    """
    blob = cloudpickle.dumps(function)
    with contextlib.ExitStack() as orders:
        for group in sorted(groups, key=lambda group: group.name):  # the same order in every thread
            group.check()
            orders.enter_context(group.order)
        pending = [
            PendingCall(group, rank, group.handles[rank].apply(keys, blob, args)) for group, rank, keys, args in calls
        ]
    return collect(pending, what, timeout)
