"""Worker groups: calls on many workers at once, with time-outs that name the late and errors that name the dead.

submit ──> waiting ──> all answered ──────────────> results, in rank order
              │
              ├── a worker raised ── peers end within the grace ──> its exception; the group goes on
              │          └── peers are stuck in a collective ─────> its exception; the group is stopped
              ├── a worker died ──────────────────────────────────> WorkerDied; the group is stopped
              └── time is up ─────────────────────────────────────> CallTimeout that names the late ranks
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
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
        """Make every worker; the factory travels pickled by value where it has to."""
        blob = cloudpickle.dumps(factory)
        futures = {
            rank: handle.create(self.key(rank), blob, contexts[rank]) for rank, handle in enumerate(self.handles)
        }
        self.gather(futures, what="start", timeout=timeout)

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
        """Wait for submitted calls (rank -> future); results in the order of `futures`.

        Raises: the first remote exception, with its type; WorkerDied; CallTimeout naming the ranks that are late.
        """
        timeout = self.call_timeout if timeout is None else timeout
        self._await(futures, what, time.monotonic() + timeout, timeout)
        return [future.result().unwrap(self.describe(rank)) for rank, future in futures.items()]

    def _await(self, futures: dict[int, Future[Outcome]], what: str, deadline: float, timeout: float) -> None:
        """Return when all futures hold a value; handle the first that does not as the module's drawing says."""
        pending = dict(futures)
        while pending:
            deaths = {rank: self.handles[rank].death for rank in range(len(self))}
            left = deadline - time.monotonic()
            wait([*pending.values(), *deaths.values()], timeout=max(left, 0), return_when=FIRST_COMPLETED)
            dead = [rank for rank, death in deaths.items() if death.done()]
            for rank, future in list(pending.items()):
                if not future.done():
                    continue
                del pending[rank]
                error = future.exception()
                if isinstance(error, WorkerDied):
                    dead.append(rank)
                elif error is not None:
                    raise error
                elif future.result().error is not None and not dead:
                    self._after_error(rank, future.result(), pending, what)
            if dead:
                self._after_death(sorted(set(dead)), what)
            if pending and time.monotonic() >= deadline:
                late = tuple(self.describe(rank) for rank in pending)
                raise CallTimeout(
                    f"{what} on {self.name}: no answer within {timeout:g} s from {len(late)} of {len(futures)} workers: "
                    f"{'; '.join(late)}. Give it more time (timeout=) or look at what these ranks are doing.",
                    late,
                )

    def _after_error(self, rank: int, outcome: Outcome, pending: dict[int, Future[Outcome]], what: str) -> None:
        """One rank raised: let its peers end; if they cannot, they sit in a collective that will never complete."""
        wait(pending.values(), timeout=PEER_GRACE_S)
        stuck = tuple(self.describe(peer) for peer, future in pending.items() if not future.done())
        if stuck:
            self._fail(
                WorkerError(
                    f"{what} raised on {self.describe(rank)} while {'; '.join(stuck)} waited for it in a collective; "
                    f"{self.name} was stopped. Build the engine again."
                )
            )
        elif any(isinstance(f.exception(), WorkerDied) for f in pending.values()):
            return  # the death is the cause; the caller's loop reports it
        outcome.unwrap(self.describe(rank))

    def _after_death(self, dead: list[int], what: str) -> None:
        names = tuple(self.describe(rank) for rank in dead)
        error = WorkerDied(
            f"{what}: worker process ended: {'; '.join(names)}. {self.name} was stopped; build the engine again.", names
        )
        self._fail(error)
        raise error

    def _fail(self, error: RliteError) -> None:
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


def apply_on_processes(
    calls: Iterable[tuple[WorkerHandle, tuple[WorkerKey | None, ...], tuple, str]],
    function: Callable[..., Any],
    groups: Sequence[WorkerGroup],
    what: str,
    timeout: float,
) -> list[Any]:
    """Run `function(*workers, *args)` in several processes at once; each call names a handle, keys, args and a name.

    This is how two groups work together (weight sync): a process that hosts workers of both gets one call.
    """
    blob = cloudpickle.dumps(function)
    names = {}
    futures = {}
    with contextlib.ExitStack() as orders:
        for group in groups:
            group.check()
            orders.enter_context(group.order)
        for number, (handle, keys, args, name) in enumerate(calls):
            names[number] = name
            futures[number] = handle.apply(keys, blob, args)
    deadline = time.monotonic() + timeout
    pending = set(futures.values())
    deaths = [handle.death for group in groups for handle in group.handles]
    while pending:
        done, _ = wait([*pending, *deaths], timeout=max(deadline - time.monotonic(), 0), return_when=FIRST_COMPLETED)
        for group in groups:
            dead = [rank for rank, handle in enumerate(group.handles) if handle.death.done()]
            if dead:
                group._after_death(dead, what)
        for number, future in futures.items():
            if future in pending and future.done() and future.exception() is None:
                future.result().unwrap(names[number])
        pending -= done
        if pending and time.monotonic() >= deadline:
            late = tuple(names[number] for number, future in futures.items() if future in pending)
            raise CallTimeout(f"{what}: no answer within {timeout:g} s from {'; '.join(late)}", late)
    return [future.result().unwrap(names[number]) for number, future in futures.items()]
