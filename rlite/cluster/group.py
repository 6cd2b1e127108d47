"""Worker groups: calls on many workers at once, with time-outs that name late workers and errors that name dead ones.

submit ──> waiting ──> all answered ──────────────> results, in rank order
              │
              ├── a worker raised ── peers end within the grace ──> its exception; the group goes on
              │          └── peers are stuck in a collective ─────> its exception; their replicas are stopped
              ├── a worker died ──────────────────────────────────> WorkerDied; its replica is stopped
              └── time is up ─────────────────────────────────────> CallTimeout that names the late ranks

The workers of a replica live and die together. A group is one replica unless its owner calls `divide`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import cloudpickle

from rlite.cluster.host import Outcome, Whereabouts, WorkerContext, WorkerKey, worker_name
from rlite.cluster.placement import Device
from rlite.errors import FORKED, CallTimeout, RliteError, WorkerDied, WorkerError
from rlite.observability import stats_tracker, trace

logger = logging.getLogger(__name__)

UNEVEN_S = 30.0
"""how long after the first return of a replica's workers it is looked at where the others are"""
LOOK_S = 2.0
"""how long a worker may take to say where it is"""
PEER_GRACE_S = 4.0
"""how long the peers of a failed rank may go on before they count as stuck in a collective"""


class WorkerHandle(Protocol):
    """Seam to a launcher: access to one worker.

    Futures resolve to an `Outcome`, or raise WorkerDied when the process is gone.
    """

    process: Any
    """identity of the process that hosts the worker"""

    def create(self, key: WorkerKey, factory: bytes, context: WorkerContext) -> Future[Outcome]:
        """Make the worker `key` by calling the pickled factory with its context.

        Args:
            key: group name and rank.
            factory: pickled function of the context.
            context: the worker's place.
        """

    def call(self, key: WorkerKey, method: str, args: tuple, kwargs: dict) -> Future[Outcome]:
        """Call a method of a worker.

        Args:
            key: group name and rank.
            method: name of the method.
            args: positional arguments.
            kwargs: keyword arguments.
        """

    def apply(self, keys: tuple[WorkerKey | None, ...], function: bytes, args: tuple) -> Future[Outcome]:
        """Call a pickled function with workers of the process.

        Args:
            keys: the workers, its first arguments; None stays None.
            function: the pickled function.
            args: its further arguments.
        """

    def look(self) -> Future[Whereabouts]:
        """Return the position of the call under way, without waiting for the call."""
        ...

    def stop(self, key: WorkerKey) -> None:
        """End the worker `key`."""

    @property
    def death(self) -> Future[Any]:
        """Future that raises WorkerDied when the process is gone."""
        ...


class WorkerGroup:
    """Workers 0..n-1 of one owner, each on its device. A launcher's `start` creates it."""

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
        """why no worker serves any more"""
        self.losses: dict[int, RliteError] = {}
        """why a replica serves no more, by its number"""
        self.replica_size = len(self.handles)
        self.reporters: Collection[int] = range(len(self.handles))
        """the ranks whose statistics count; the others compute the same as one of them"""
        self._losing = threading.Lock()
        self._stopped = False
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self.handles)

    def key(self, rank: int) -> WorkerKey:
        """Return the key of a rank's worker."""
        return (self.name, rank)

    def divide(self, replica_size: int) -> None:
        """Make every `replica_size` neighbouring ranks a replica.

        No collective joins two replicas, so each survives the others.
        """
        self.replica_size = replica_size

    def replica_of(self, rank: int) -> range:
        """Return the ranks that live and die with `rank`."""
        first = rank - rank % self.replica_size
        return range(first, first + self.replica_size)

    def describe(self, rank: int) -> str:
        """Return the worker's name for messages."""
        return worker_name(self.name, rank, self.devices[rank])

    def create(
        self, factory: Callable[[WorkerContext], Any], contexts: Sequence[WorkerContext], timeout: float
    ) -> None:
        """Make every worker, or none.

        Args:
            factory: called with the worker's context in its process; pickled by value if necessary.
            contexts: one per rank.
            timeout: seconds for all workers.
        """
        blob = cloudpickle.dumps(factory)
        try:
            with self.order:
                handles = enumerate(self.handles)
                futures = {rank: handle.create(self.key(rank), blob, contexts[rank]) for rank, handle in handles}
                for rank, answer in futures.items():
                    self.draw(rank, "start", answer)
            self.gather(futures, what="start", timeout=timeout)
        except BaseException:
            self.stop()
            raise

    def submit(
        self, rank: int, method: str, args: tuple = (), kwargs: dict | None = None, what: str | None = None
    ) -> Future[Outcome]:
        """Start one call on one worker. A worker runs its calls one at a time, in order of submission.

        Args:
            rank: the worker.
            method: name of its method.
            args: positional arguments.
            kwargs: keyword arguments.
            what: name of the call in messages; default: the method.

        Returns:
            The call's future.
        """
        self.check([rank])
        answer = self.handles[rank].call(self.key(rank), method, args, kwargs or {})
        self.draw(rank, what or method, answer)
        return answer

    def draw(self, rank: int, what: str, answer: Future[Outcome]) -> None:
        """Show this call in its worker's row of the trace, if tracing is on.

        Args:
            rank: the worker.
            what: name of the call.
            answer: the call's future.
        """
        if trace.is_on():
            answer.add_done_callback(partial(_draw, (self.name, f"rank {rank} on {self.devices[rank]}"), what))

    def call(
        self,
        method: str,
        calls: Sequence[tuple[tuple, dict]],
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
        what: str | None = None,
        reporters: Collection[int] | None = None,
    ) -> list[Any]:
        """Call `method` on several workers, each with its own arguments, and wait for all results.

        Args:
            method: name of the workers' method.
            calls: (args, kwargs) for each rank.
            ranks: the workers; default: all.
            timeout: seconds; default: the session's `call_timeout`.
            what: name of the call in messages; default: the method.
            reporters: the ranks whose statistics count.

        Returns:
            One result per rank.
        """
        ranks = range(len(self)) if ranks is None else ranks
        self.check(ranks)  # before the first of them is called
        with self.order:
            futures = {
                rank: self.submit(rank, method, *call, what=what) for rank, call in zip(ranks, calls, strict=True)
            }
        return self.gather(futures, what=what or method, timeout=timeout, reporters=reporters)

    def broadcast(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call `method` on every worker with the same arguments.

        Args:
            method: name of the workers' method.
            *args: positional arguments.
            timeout: seconds; default: the session's `call_timeout`.
            **kwargs: keyword arguments.

        Returns:
            One result per rank.
        """
        return self.call(method, [(args, kwargs)] * len(self), timeout=timeout)

    def gather(
        self,
        futures: dict[int, Future[Outcome]],
        what: str,
        timeout: float | None = None,
        reporters: Collection[int] | None = None,
    ) -> list[Any]:
        """Wait for submitted calls; errors are those of `collect`.

        Args:
            futures: rank -> future.
            what: name of the calls in messages.
            timeout: seconds; default: the session's `call_timeout`.
            reporters: the ranks whose statistics count.

        Returns:
            The results, in the order of `futures`.
        """
        counted = self.reporters if reporters is None else reporters
        calls = [PendingCall(self, rank, future, rank in counted) for rank, future in futures.items()]
        return collect(calls, what, self.call_timeout if timeout is None else timeout)

    def lose(self, ranks: Iterable[int], error: RliteError) -> None:
        """Stop the replicas of these ranks; calls on them raise `error`. With its last replica the group has failed."""
        with self._losing:
            lost = {rank // self.replica_size for rank in ranks} - self.losses.keys()
            self.losses |= dict.fromkeys(lost, error)
            if self.failure is None and len(self.losses) * self.replica_size == len(self):
                self.failure = _of_all(error, self.losses.values())
        if self.failure is not None:
            self.stop()
            return
        for replica in lost:
            self._stop(self.replica_of(replica * self.replica_size))

    def check(self, ranks: Iterable[int] = ()) -> None:
        """Check that the group, and each of `ranks`, can serve calls.

        Raises:
            RliteError: this is a forked child.
            WorkerError: the group was released; or the error with which the group or the rank's replica was lost.
        """
        if os.getpid() != self._pid:
            raise RliteError(f"{self.name} {FORKED}")
        lost = [self.losses[rank // self.replica_size] for rank in ranks if rank // self.replica_size in self.losses]
        for failure in (self.failure, *lost):
            if failure is not None:
                raise type(failure)(*failure.args)
        if self._stopped:
            raise WorkerError(f"{self.name} was released; build the engine again")

    def is_serving(self, rank: int) -> bool:
        """Return True if calls on this rank are accepted."""
        return not self._stopped and self.failure is None and rank // self.replica_size not in self.losses

    def stop(self) -> None:
        """End every worker. Safe to call again."""
        if self._stopped or os.getpid() != self._pid:
            return
        self._stopped = True
        self._stop(range(len(self)))

    def _stop(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(RliteError):  # a worker that is already gone needs no stopping
                self.handles[rank].stop(self.key(rank))


def _of_all(last: RliteError, losses: Iterable[RliteError]) -> RliteError:
    """Return the error of a group whose last replica is lost. If it is a death, it names the earlier dead, too."""
    dead = dict.fromkeys(name for loss in losses if isinstance(loss, WorkerDied) for name in loss.workers)
    before = [name for name in dead if isinstance(last, WorkerDied) and name not in last.workers]
    return WorkerDied(f"{last} Gone before it: {'; '.join(before)}.", tuple(dead)) if before else last


Replica = tuple[WorkerGroup, int]
"""a replica of a group, by its number"""


@dataclass(frozen=True)
class PendingCall:
    """A call under way on one worker."""

    group: WorkerGroup
    rank: int
    answer: Future[Outcome]
    is_reporter: bool = False
    """what it tells stats_tracker counts"""

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.group.describe(self.rank)

    @property
    def replica(self) -> Replica:
        """The replica of the worker."""
        return self.group, self.rank // self.group.replica_size


def collect(calls: Sequence[PendingCall], what: str, timeout: float) -> list[Any]:
    """Wait for calls on workers of one or more groups. The module's drawing shows the outcomes.

    Args:
        calls: the calls.
        what: name of the calls in messages.
        timeout: seconds.

    Returns:
        The results, in the order of `calls`.

    Raises:
        CallTimeout: time is up; the error names the late workers.
        WorkerDied: a process is gone.
        error: the first exception that a worker raised, with its own type.
    """
    deadline = time.monotonic() + timeout
    called = dict.fromkeys((call.group, rank) for call in calls for rank in call.group.replica_of(call.rank))
    deaths = {(group, rank): group.handles[rank].death for group, rank in called}
    has_collective = len({call.group for call in calls}) > 1  # of several replicas
    uneven = _UnevenReturns(what, calls, has_collective)
    pending = list(calls)
    while pending:
        left = max(min(deadline, uneven.look_at) - time.monotonic(), 0)
        wait([call.answer for call in pending] + [*deaths.values()], timeout=left, return_when=FIRST_COMPLETED)
        done: list[PendingCall] = []
        waiting: list[PendingCall] = []
        for call in pending:
            (done if call.answer.done() else waiting).append(call)
        pending = waiting
        _raise_deaths(deaths, done, pending, what, has_collective)
        for call in done:
            if (error := call.answer.exception()) is not None:
                raise error
            if call.answer.result().error is not None:
                peers = [peer for peer in pending if has_collective or peer.replica == call.replica]
                wait([peer.answer for peer in peers], timeout=PEER_GRACE_S)
                # if somebody died, that is the cause of the error
                _raise_deaths(deaths, pending, pending, what, has_collective)
                _stop_stuck(peers, f"{what} raised on {call.name}")
                call.answer.result().unwrap(call.name)
        uneven.check(pending)
        if pending and time.monotonic() >= deadline:
            late = tuple(call.name for call in pending)
            raise CallTimeout(
                f"{what}: no answer within {timeout:g} s from {len(late)} of {len(calls)} workers: {'; '.join(late)}. "
                "Give it more time (timeout=, or call_timeout= in rlite.init) or look at what these workers are doing.",
                late,
            )
    results = [call.answer.result().unwrap(call.name) for call in calls]
    for call in calls:
        if call.is_reporter and (recorded := call.answer.result().recorded) is not None:
            stats_tracker.add(recorded)
    return results


class _UnevenReturns:
    """Early warning about workers that wait in a collective for peers that have already returned."""

    def __init__(self, what: str, calls: Sequence[PendingCall], has_collective: bool) -> None:
        self._what = what
        self._calls = calls
        self._has_collective = has_collective
        self._has_said = False
        self.look_at = math.inf
        """when to look at the workers, by time.monotonic()"""

    def check(self, pending: Sequence[PendingCall]) -> None:
        """Look at workers whose peers returned `UNEVEN_S` ago."""
        late, peers = self._split(pending)
        if self._has_said or not late or not peers:
            return
        now = time.monotonic()
        if self.look_at == math.inf:
            self.look_at = now + UNEVEN_S
        elif now >= self.look_at:
            self.look_at = now + UNEVEN_S
            self._look(late, peers)

    def _split(self, pending: Sequence[PendingCall]) -> tuple[list[PendingCall], list[PendingCall]]:
        """Return the pending calls whose peers have returned, and the calls of those peers."""
        if self._has_collective:
            return list(pending), [call for call in self._calls if call.answer.done()]
        waiting = {call.replica for call in pending}
        peers = [call for call in self._calls if call.answer.done() and call.replica in waiting]
        returned = {call.replica for call in peers}
        return [call for call in pending if call.replica in returned], peers

    def _look(self, late: Sequence[PendingCall], peers: Sequence[PendingCall]) -> None:
        looks = [(call, call.group.handles[call.rank].look()) for call in late]
        wait([look for _, look in looks], timeout=LOOK_S)
        found = [(call, look.result()) for call, look in looks if look.done() and look.exception() is None]
        stuck = [(call, at.place) for call, at in found if at.is_collective]
        if not stuck:  # at work, as far as anyone can tell
            return
        self._has_said, self.look_at = True, math.inf
        places = "; ".join(f"{call.name} in {place}" for call, place in stuck)
        logger.warning(
            "%s: returned on %s; for %g s and more waits in a collective: %s. Each rank has to come to the same "
            "collectives, equally often and in the same order: look for an early return, or a branch on the rank or on "
            "data that differs between ranks.",
            self._what,
            "; ".join(call.name for call in peers),
            UNEVEN_S,
            places,
        )


def _draw(track: trace.Track, what: str, answer: Future[Outcome]) -> None:
    """Add the call, which ends now, to the trace, with the timings recorded inside it."""
    if answer.exception() is not None:
        return
    outcome, ended = answer.result(), time.perf_counter()
    began = ended - outcome.seconds
    spans = outcome.recorded.spans if outcome.recorded is not None else ()
    inner = [(name, began + start, began + end) for name, start, end in spans]
    raised = {} if outcome.error is None else {"raised": type(outcome.error).__name__}
    trace.complete(what, began, ended, track, inner, **raised)


def _raise_deaths(
    deaths: dict[tuple[WorkerGroup, int], Future[Any]],
    ended: Sequence[PendingCall],
    pending: Sequence[PendingCall],
    what: str,
    has_collective: bool,
) -> None:
    """Raise WorkerDied if a process is gone, after stopping its replica and the replicas of peers that wait for it.

    Args:
        deaths: future of each worker's death.
        ended: calls that have ended.
        pending: calls that have not.
        what: name of the calls in messages.
        has_collective: True if replicas wait for each other.

    Raises:
        error: WorkerDied with the names of all dead workers.
    """
    dead = [worker for worker, death in deaths.items() if death.done()]
    for call in ended:
        if call.answer.done() and isinstance(call.answer.exception(), WorkerDied):
            dead.append((call.group, call.rank))
    if not dead:
        return
    for group, _ in dead:
        if group.failure is not None and not isinstance(group.failure, WorkerDied):
            group.check()  # whoever ended the processes said why
    by_group: dict[WorkerGroup, list[int]] = {}
    for group, rank in dict.fromkeys(dead):
        by_group.setdefault(group, []).append(rank)
    names = tuple(group.describe(rank) for group, ranks in by_group.items() for rank in ranks)
    stopped = "; ".join(_stopped(group, ranks) for group, ranks in by_group.items())
    error = WorkerDied(f"{what}: worker process ended: {'; '.join(names)}. {stopped}", names)
    for group, ranks in by_group.items():
        group.lose(ranks, error)
    lost = {(group, rank // group.replica_size) for group, ranks in by_group.items() for rank in ranks}
    if has_collective:
        others = [call for call in pending if call.replica not in lost]
        wait([call.answer for call in others], timeout=PEER_GRACE_S)
        _stop_stuck(others, str(error))
    raise error


def _stopped(group: WorkerGroup, dead: Sequence[int]) -> str:
    """Return a text about what becomes of a group without these ranks."""
    replicas = {rank // group.replica_size for rank in dead} | group.losses.keys()
    if len(replicas) * group.replica_size == len(group):
        return f"{group.name} was stopped; build the engine again."
    return (
        f"Replica {', '.join(map(str, sorted(replicas)))} of {group.name} was stopped, the others go on; what needs "
        "all of them does not, until the engine is released and built again."
    )


def _stop_stuck(pending: Sequence[PendingCall], cause: str) -> None:
    """Stop the replicas of workers that still wait in a collective that will never complete."""
    stuck = [call for call in pending if not call.answer.done()]
    for group in dict.fromkeys(call.group for call in stuck):
        ranks = [call.rank for call in stuck if call.group is group]
        names = "; ".join(group.describe(rank) for rank in ranks)
        group.lose(
            ranks,
            WorkerError(f"{cause}, while {names} waited for it in a collective. {_stopped(group, ranks)}"),
        )


def apply_on_processes(
    calls: Sequence[tuple[WorkerGroup, int, tuple[WorkerKey | None, ...], tuple]],
    function: Callable[..., Any],
    groups: Sequence[WorkerGroup],
    what: str,
    timeout: float,
) -> list[Any]:
    """Run `function(*workers, *args)` in several processes at once.

    Two groups work together this way (weight sync): a process that hosts workers of both gets one call.

    Args:
        calls: for each process a group and rank that names it, the keys of its workers, and arguments.
        function: pickled by value if necessary.
        groups: all groups that take part.
        what: name of the calls in messages.
        timeout: seconds.

    Returns:
        One result per call.
    """
    blob = cloudpickle.dumps(function)
    with contextlib.ExitStack() as orders:
        for group in sorted(groups, key=lambda group: group.name):  # the same order in every thread
            group.check(rank for called, rank, _, _ in calls if called is group)
            orders.enter_context(group.order)
        pending = [
            PendingCall(group, rank, group.handles[rank].apply(keys, blob, args)) for group, rank, keys, args in calls
        ]
        for call in pending:
            call.group.draw(call.rank, what, call.answer)
    return collect(pending, what, timeout)
