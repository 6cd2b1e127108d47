"""Worker groups: calls on many workers at once, with time-outs that name late workers and errors that name dead ones.

submit ──> waiting ──> all answered ──────────────> results, in rank order
              │
              ├── a worker raised ── peers end within the grace ──> its exception; the group goes on
              │          └── peers are stuck in a collective ─────> its exception; their replicas are stopped
              ├── a worker died ──────────────────────────────────> WorkerDied; its replica is stopped
              └── time is up ─────────────────────────────────────> CallTimeout that names the late ranks

The workers of a replica live and die together. A group is one replica unless its owner sets `replica_size`.
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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import cloudpickle

from rlite.errors import FORKED, REBUILD, CallTimeout, ConfigError, RliteError, WorkerDied, WorkerError
from rlite.observability import stats_tracker, trace
from rlite.runtime.cluster.host import CallPosition, Outcome, WorkerContext, WorkerFactory, WorkerHost, WorkerKey
from rlite.runtime.cluster.placement import Device

logger = logging.getLogger(__name__)

UNEVEN_S = 30.0
"""seconds after the first return of a replica's workers until the others are inspected"""
LOOK_S = 2.0
"""seconds that a worker may take to report its position"""
PEER_GRACE_S = 4.0
"""seconds that the peers of a failed rank may continue before they count as stuck in a collective"""


def worker_name(group: str, rank: int, device: Device) -> str:
    """Return a worker's name in messages: "train-0 rank 1 on 10.0.0.1/cuda:1"."""
    return f"{group} rank {rank} on {device}"


class WorkerHandle(Protocol):
    """Seam to a launcher: access to the `WorkerHost` of one process."""

    process: Any
    """identity of the process"""
    death: Future[Any]
    """raises WorkerDied when the process is gone"""
    notice: Future[Any]
    """has a result when the process was asked to end by SIGTERM and goes on for a grace period"""

    def submit(self, method: Callable[..., Outcome], *args: Any) -> Future[Outcome]:
        """Call a method of the process's host. The process runs its calls one at a time, in order of submission.

        Returns the outcome; or the future raises WorkerDied when the process is gone.
        """

    def look(self) -> Future[CallPosition]:
        """Return the position of the call under way, without waiting for the call."""

    def keep(self, key: WorkerKey, method: str) -> tuple[Future[Outcome], Any]:
        """Call a worker's method in order, and keep its result outside of the worker's process.

        Returns the outcome, without its value; and a reference to the value, which may be an argument of later calls.
        """
        raise ConfigError("a snapshot outside of the workers needs launcher='ray'")

    def stop(self, key: WorkerKey) -> None:
        """End the worker `key`."""


class AbsentHandle:
    """Handle of a worker that is gone."""

    actor = None
    process = ""

    def __init__(self, name: str) -> None:
        self.death: Future[Any] = Future()
        self.notice: Future[Any] = Future()
        self.death.set_exception(WorkerDied(f"worker process ended: {name}", (name,)))

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return WorkerDied as the answer."""
        return self.death

    aside = look = submit

    def keep(self, key: WorkerKey, method: str) -> tuple[Future[Outcome], Any]:
        """Return WorkerDied as the outcome."""
        return self.death, None

    def stop(self, key: WorkerKey) -> None:
        """Do nothing."""


@dataclass(eq=False, repr=False)
class WorkerGroup:
    """Workers 0..n-1 of one owner, each on its device. A launcher's `start` creates it."""

    name: str
    devices: Sequence[Device]
    handles: Sequence[WorkerHandle]
    call_timeout: float
    order: threading.RLock = field(default_factory=threading.RLock)
    """held while one call is submitted to several workers, so that all see calls in the same order"""
    replica_size: int = 0
    """number of neighbouring ranks that make a replica; 0: all. No collective joins two replicas, so each survives the
    others"""
    reporters: Collection[int] = ()
    """the ranks whose statistics count; the others compute the same as one of them. Default: all"""
    failure: RliteError | None = None
    """reason why no worker serves"""
    losses: dict[int, RliteError] = field(default_factory=dict)
    """reason why a replica no longer serves, by its number"""
    _losing: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False
    _pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self.devices, self.handles = tuple(self.devices), tuple(self.handles)
        self.replica_size = self.replica_size or len(self.handles)
        self.reporters = self.reporters or range(len(self.handles))

    def __len__(self) -> int:
        return len(self.handles)

    def key(self, rank: int) -> WorkerKey:
        """Return the key of a rank's worker."""
        return (self.name, rank)

    def with_replica(self, first: int, devices: Sequence[Device], handles: Sequence[WorkerHandle]) -> WorkerGroup:
        """Return a copy of the group with other processes in one replica's ranks, or with one replica more.

        `first`: first rank of the replica; the number of ranks appends a replica.
        """
        ranks = slice(first, first + len(handles))
        all_devices, all_handles = list(self.devices), list(self.handles)
        all_devices[ranks], all_handles[ranks] = devices, handles
        return WorkerGroup(self.name, all_devices, all_handles, self.call_timeout, replica_size=self.replica_size)

    def take_replica(self, first: int, devices: Sequence[Device], handles: Sequence[WorkerHandle]) -> None:
        """Serve a replica whose workers are ready, in the place of a lost replica or beside the others."""
        with self._losing:
            if self._stopped and self.failure is None:
                self.check()
            whole = self.with_replica(first, devices, handles)
            self.devices, self.handles = whole.devices, whole.handles
            self.losses.pop(first // self.replica_size, None)
            self.failure, self._stopped = None, False

    def offer(self, replica: int, devices: Sequence[Device]) -> None:
        """Give devices to a replica that does not exist yet, or that has left. `take_replica` makes it serve."""
        first = replica * self.replica_size
        handles = [AbsentHandle(worker_name(self.name, first + i, device)) for i, device in enumerate(devices)]
        with self._losing:
            whole = self.with_replica(first, devices, handles)
            self.losses[replica] = WorkerError(f"replica {replica} of {self.name} has not started")
            self.devices, self.handles = whole.devices, whole.handles

    def replica_of(self, rank: int) -> range:
        """Return the ranks that live and die with `rank`."""
        first = rank - rank % self.replica_size
        return range(first, first + self.replica_size)

    def describe(self, rank: int) -> str:
        """Return the worker's name for messages."""
        return worker_name(self.name, rank, self.devices[rank])

    def create(self, factory: WorkerFactory, contexts: Sequence[WorkerContext], timeout: float) -> None:
        """Make workers, all or none.

        `factory`: called with the worker's context in its process; pickled by value if necessary. `contexts`: places of
        the workers to make. Others may serve already. `timeout`: seconds for all workers.
        """
        blob = cloudpickle.dumps(factory)
        try:
            with self.order:
                calls = [
                    self.submit(context.rank, "start", WorkerHost.create, self.key(context.rank), blob, context)
                    for context in contexts
                ]
            collect(calls, "start", timeout, self.reporters)
        except BaseException:
            self._stop([context.rank for context in contexts])
            raise

    def submit(self, rank: int, what: str, method: Callable[..., Outcome], *args: Any) -> PendingCall:
        """Start one call on one worker's process.

        Returns the call under way.
        """
        answer = self.handles[rank].submit(method, *args)
        if trace.is_on():
            answer.add_done_callback(partial(_draw, (self.name, f"rank {rank} on {self.devices[rank]}"), what))
        return PendingCall(self, rank, answer)

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

        `ranks`: the workers; default: all. `timeout`: seconds; default: the session's `call_timeout`. `what`: name of
        the call in messages; default: the method. `reporters`: the ranks whose statistics count; default: those of the
        group. Returns one result per rank.
        """
        ranks = range(len(self)) if ranks is None else ranks
        what = what or method
        self.check(ranks)  # before the first of them is called
        with self.order:
            pending = [
                self.submit(rank, what, WorkerHost.call, self.key(rank), method, *call)
                for rank, call in zip(ranks, calls, strict=True)
            ]
        timeout = self.call_timeout if timeout is None else timeout
        return collect(pending, what, timeout, self.reporters if reporters is None else reporters)

    def keep(self, method: str) -> list[Any]:
        """Call `method` on all workers, and keep the results outside of their processes.

        Returns references to the results, in rank order. They may be arguments of later calls.
        """
        self.check(range(len(self)))
        with self.order:
            kept = [handle.keep(self.key(rank), method) for rank, handle in enumerate(self.handles)]
        collect([PendingCall(self, rank, answer) for rank, (answer, _) in enumerate(kept)], method, self.call_timeout)
        return [reference for _, reference in kept]

    def mark_lost(self, ranks: Iterable[int], error: RliteError) -> None:
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
        """Check that the group, and each of `ranks`, can serve calls."""
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


@dataclass(frozen=True)
class PendingCall:
    """A call under way on one worker."""

    group: WorkerGroup
    rank: int
    answer: Future[Outcome]

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.group.describe(self.rank)


def collect(calls: Sequence[PendingCall], what: str, timeout: float, reporters: Collection[int] = ()) -> list[Any]:
    """Wait for calls on workers of one or more groups. The module's drawing shows the outcomes.

    `timeout`: seconds.
    """
    _Waiter(calls, what).wait(timeout)
    outcomes = [call.answer.result() for call in calls]
    for call, outcome in zip(calls, outcomes, strict=True):
        if call.rank in reporters and outcome.recorded is not None:
            stats_tracker.add(outcome.recorded)
    return [outcome.value for outcome in outcomes]


class _Waiter:
    """One wait for calls. Calls of one team may wait for each other in a collective.

    A team is a replica, or all workers if the calls go to several groups.
    """

    def __init__(self, calls: Sequence[PendingCall], what: str) -> None:
        self._calls, self._what = calls, what
        self._has_one_team = len({call.group for call in calls}) > 1
        called = dict.fromkeys((call.group, rank) for call in calls for rank in call.group.replica_of(call.rank))
        self._deaths = {(group, rank): group.handles[rank].death for group, rank in called}
        self._has_warned = False
        self._look_at = math.inf
        """time.monotonic() at which to inspect workers whose peers have returned"""

    def wait(self, timeout: float) -> None:
        """Return when all calls have ended well; otherwise raise as `collect`."""
        deadline = time.monotonic() + timeout
        while True:
            pending = [call for call in self._calls if not call.answer.done()]
            self._raise_deaths(pending)
            self._raise_error(pending)
            if not pending:
                return
            self._warn_of_uneven_returns(pending)
            if (left := min(deadline, self._look_at) - time.monotonic()) > 0:
                wait([*(call.answer for call in pending), *self._deaths.values()], left, FIRST_COMPLETED)
            elif time.monotonic() >= deadline:
                late = tuple(call.name for call in pending)
                raise CallTimeout(
                    f"{self._what}: no answer within {timeout:g} s from {len(late)} of {len(self._calls)} workers: "
                    f"{'; '.join(late)}. Give it more time (timeout=, or call_timeout= in rlite.init) or look at what "
                    "these workers are doing.",
                    late,
                )

    def _team(self, call: PendingCall) -> tuple[WorkerGroup, int] | None:
        return None if self._has_one_team else (call.group, call.rank // call.group.replica_size)

    def _raise_deaths(self, pending: Sequence[PendingCall]) -> None:
        """Raise WorkerDied if a process is gone, after stopping its replica and replicas of peers that wait for it."""
        dead = [worker for worker, death in self._deaths.items() if death.done()]
        answered = [call for call in self._calls if call.answer.done()]
        dead += [(call.group, call.rank) for call in answered if isinstance(call.answer.exception(), WorkerDied)]
        if not dead:
            return
        by_group: dict[WorkerGroup, list[int]] = {}
        for group, rank in dict.fromkeys(dead):
            if group.failure is not None and not isinstance(group.failure, WorkerDied):
                group.check()  # the reason is known to the group that ended the processes
            by_group.setdefault(group, []).append(rank)
        names = tuple(group.describe(rank) for group, ranks in by_group.items() for rank in ranks)
        stopped = "; ".join(_stopped(group, ranks) for group, ranks in by_group.items())
        error = WorkerDied(f"{self._what}: worker process ended: {'; '.join(names)}. {stopped}", names)
        for group, ranks in by_group.items():
            # a process that was replaced meanwhile ends no other
            group.mark_lost([rank for rank in ranks if group.handles[rank].death is self._deaths[group, rank]], error)
        if self._has_one_team:
            others = [call for call in pending if call.group.is_serving(call.rank)]
            wait([call.answer for call in others], PEER_GRACE_S)
            _stop_stuck(others, str(error))
        raise error

    def _raise_error(self, pending: Sequence[PendingCall]) -> None:
        """Raise the error of a worker, after stopping the replicas of peers that wait for it."""
        for call in self._calls:
            if not call.answer.done():
                continue
            if (error := call.answer.exception()) is not None:
                raise error
            if call.answer.result().error is not None:
                peers = [peer for peer in pending if self._team(peer) == self._team(call)]
                wait([peer.answer for peer in peers], PEER_GRACE_S)
                self._raise_deaths(pending)  # if a worker died, its death is the cause of the error
                _stop_stuck(peers, f"{self._what} raised on {call.name}")
                call.answer.result().result(call.name)

    def _warn_of_uneven_returns(self, pending: Sequence[PendingCall]) -> None:
        """Warn once about workers that wait in a collective for peers that returned `UNEVEN_S` ago."""
        teams = {self._team(call) for call in pending}
        peers = [call for call in self._calls if call.answer.done() and self._team(call) in teams]
        if self._has_warned or not peers:
            self._look_at = math.inf
            return
        now = time.monotonic()
        if now < self._look_at:
            self._look_at = min(self._look_at, now + UNEVEN_S)
            return
        self._look_at = now + UNEVEN_S
        returned = {self._team(call) for call in peers}
        looks = [(call, call.group.handles[call.rank].look()) for call in pending if self._team(call) in returned]
        wait([look for _, look in looks], LOOK_S)
        found = [(call, look.result()) for call, look in looks if look.done() and look.exception() is None]
        stuck = [f"{call.name} in {at.place}" for call, at in found if at.is_collective]
        if not stuck:  # at work, as far as anyone can tell
            return
        self._has_warned = True
        logger.warning(
            "%s: returned on %s; for %g s and more waits in a collective: %s. Each rank has to reach the same "
            "collectives, equally often and in the same order: look for an early return, or a branch on the rank or on "
            "data that differs between ranks.",
            *(self._what, "; ".join(call.name for call in peers), UNEVEN_S, "; ".join(stuck)),
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


def _stopped(group: WorkerGroup, dead: Sequence[int]) -> str:
    """Return a text on the state of a group after the loss of these ranks."""
    replicas = {rank // group.replica_size for rank in dead} | group.losses.keys()
    if len(replicas) * group.replica_size == len(group):
        return f"{group.name} was stopped. {REBUILD}"
    remedy = "calls on all replicas fail until the engine is released and built again."
    return f"Replica {', '.join(map(str, sorted(replicas)))} of {group.name} was stopped, the others go on; {remedy}"


def _stop_stuck(pending: Sequence[PendingCall], cause: str) -> None:
    """Stop the replicas of workers that still wait in a collective that will never complete."""
    stuck = [call for call in pending if not call.answer.done()]
    for group in dict.fromkeys(call.group for call in stuck):
        ranks = [call.rank for call in stuck if call.group is group]
        names = "; ".join(group.describe(rank) for rank in ranks)
        why = f"{cause}, while {names} waited for it in a collective. {_stopped(group, ranks)}"
        group.mark_lost(ranks, WorkerError(why))


ProcessCall = tuple[WorkerGroup, int, tuple[WorkerKey | None, ...], tuple]
"""a group and rank that name a process, the keys of its workers, and arguments"""


def apply_on_processes(
    calls: Sequence[ProcessCall], function: Callable[..., Any], groups: Sequence[WorkerGroup], what: str, timeout: float
) -> list[Any]:
    """Run `function(*workers, *args)` in several processes at once.

    Two groups work together this way (weight sync): a process that hosts workers of both gets one call.

    `timeout`: seconds. Returns one result per call.
    """
    blob = cloudpickle.dumps(function)
    with contextlib.ExitStack() as orders:
        for group in sorted(groups, key=lambda group: group.name):  # the same order in every thread
            group.check(rank for called, rank, _, _ in calls if called is group)
            orders.enter_context(group.order)
        pending = [group.submit(rank, what, WorkerHost.apply, keys, blob, args) for group, rank, keys, args in calls]
    return collect(pending, what, timeout)
