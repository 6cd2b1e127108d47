"""Manage processes that run user code and can be killed.

One thread owns the processes. It starts them, gives them calls, reads their answers, and kills processes that are late
or too large, as `limits` decides. Callers only put calls into a queue and hold a future.

    call:     queued ──> sent ──> started ──> answered ──> settled
                 ^         └─────────┴───────────┴──── its process died or was changed because of another call
    process:  starting ──> idle <──> busy ──> dead (hung, crashed, too large, tainted, or the pool was closed)

A process starts without a fork, because the driver may hold CUDA. It never sees the driver's `__main__`, its
descriptors, or environment variables that may be secret. It leads its own session. Killing the process therefore also
kills its children.

Quick calls travel together in a chunk. If the process has nothing to restore after the last call, all answers count.
Otherwise only the first answer counts, because the first call began in an unchanged process. The other calls run again
alone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

from rlite.errors import RliteError
from rlite.runtime.sandbox import child, process, wire
from rlite.runtime.sandbox.calls import Call, ending, take_chunk
from rlite.runtime.sandbox.confine import number_in
from rlite.runtime.sandbox.process import Worker

MAX_FAILED_STARTS = 3


class SandboxPool:
    """A pool of at most `num_processes` processes, started on demand. `close()` ends all of them.

    Args:
        num_processes: maximum number of processes. It may be raised later.
        env_vars: environment variables that processes receive in addition to those of `passed_environment`.
        is_silent: discard the standard output and standard error of the processes.
    """

    def __init__(self, num_processes: int, env_vars: Collection[str] = (), is_silent: bool = True) -> None:
        self.num_processes = num_processes
        self._env_vars, self._is_silent = env_vars, is_silent
        self._owner = os.getpid()
        self._queue: deque[Call] = deque()
        self._unsettled: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._num_failed_starts = 0
        self._num_oom_kills = _count_oom_kills()
        self._failure: BaseException | None = None
        self._is_closing = False
        self._is_woken = False
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="sandbox-pool", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> Future[Any]:
        """Queue one call. Safe in any thread.

        Returns:
            The call's future.

        Raises:
            RliteError: the pool has stopped.
        """
        with self._lock:
            if self._failure is not None:
                raise RliteError("the sandbox has stopped") from self._failure
            self._unsettled.add(call.future)
            self._queue.append(call)
        call.future.add_done_callback(self._unsettled.discard)
        self._wake()
        return call.future

    @property
    def is_usable(self) -> bool:
        """True if the pool works and belongs to this process. A pool does not survive a fork."""
        return self._failure is None and not self._is_closing and self._owner == os.getpid()

    def close(self) -> None:
        """Kill every process and fail every call that is still in flight."""
        self._is_closing = True
        self._wake()
        if self._owner == os.getpid():
            self._thread.join(timeout=30)

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(OSError):  # closed: no thread listens
                self._wake_writer.send(b"\0")

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException = RliteError("the sandbox was closed while this call was computed")
        try:
            while not self._is_closing:
                self._dispatch()
                self._wait()
                self._end_late_ones()
                self._end_large_ones()
        except BaseException as error:  # belongs to everyone who waits
            failure = error
        with self._lock:
            self._failure = failure
        for future in list(self._unsettled):  # wherever their calls were
            if future.set_running_or_notify_cancel():
                future.set_exception(RliteError(str(failure)))
        for worker in list(self._workers):
            self._kill(worker)
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _wait(self) -> None:
        """Wait for frames, ends of processes, new calls and deadlines, and handle the frames."""
        for event, ready in self._selector.select(process.seconds_to_next_check(self._workers, time.monotonic())):
            worker = event.data
            if worker is None:
                self._wake_reader.recv(4096)
                self._is_woken = False
            elif worker in self._workers:  # not lost by the event before
                if ready & selectors.EVENT_WRITE:
                    self._send(worker)
                while self._receive(worker) and event.fd == worker.exit_fd:
                    pass  # the last answers of a process that has ended count
                if event.fd == worker.exit_fd:
                    self._lost(worker)

    def _dispatch(self) -> None:
        """Give waiting calls to idle processes, and start processes if there are too few."""
        while num_waiting := len(self._queue):
            idle = next((worker for worker in self._workers if worker.is_idle), None)
            if idle is None:
                break
            limit = self._queue[0].memory_limit
            if limit is not None and idle.memory() > limit:  # kept by an earlier call: this call must not fail for it
                self._end(idle)
            elif calls := take_chunk(self._queue, -(-num_waiting // self.num_processes)):
                idle.give(calls)
                self._send(idle)
        num_starting = sum(not worker.is_ready for worker in self._workers)
        for _ in range(min(num_waiting - num_starting, self.num_processes - len(self._workers))):
            self._start()

    def _start(self) -> None:
        worker = Worker.start(self._env_vars, self._is_silent)
        self._workers.append(worker)
        for readable in (worker.channel, worker.exit_fd):
            if readable is not None:
                self._selector.register(readable, selectors.EVENT_READ, worker)

    def _send(self, worker: Worker) -> None:
        try:
            worker.send()
        except OSError:
            self._lost(worker)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        self._selector.modify(worker.channel, events, worker)

    def _receive(self, worker: Worker) -> bool:
        """Return whether data arrived and the process is still alive. Handle the frames that arrived."""
        if worker not in self._workers:
            return False
        try:
            data = worker.channel.recv(1 << 18, socket.MSG_DONTWAIT)
            for message in worker.reader.read(data):
                self._take(worker, message)
                if worker not in self._workers:
                    return False
        except BlockingIOError:
            return False
        except (OSError, wire.WireError):  # a function has written to file descriptors that are not its own
            data = b""
        if not data:
            self._lost(worker)
        return bool(data)

    def _take(self, worker: Worker, message: Any) -> None:
        """Handle one frame. An unexpected frame raises WireError."""
        kind = worker.take(message)
        if kind == child.READY:
            self._num_failed_starts = 0
        elif kind == child.JUDGED:
            if len(worker.answered) == 1 or not worker.answered[0].is_alone:
                for call in worker.answered:
                    call.code.took((worker.since - worker.began) / len(worker.answered))
                    call.settle()
                worker.answered.clear()
            self._requeue(worker)
        elif kind == child.MEMORY:
            self._end(worker, *process.out_of_memory(worker.calls[0], worker.calls[0].result))
        elif kind is not None:
            call = worker.calls[0]
            if kind == child.ENDED:
                call.failure = self._describe_crash(call, call.result)
            worker.answered.append(worker.calls.popleft())
            worker.is_computing, worker.since = False, time.monotonic()
            if worker.is_tainted:
                self._end(worker)

    def _end_late_ones(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if process.time_failure(worker, now)]:
            self._receive(worker)  # the answer may be here
            failure = process.time_failure(worker, time.monotonic()) if worker in self._workers else None
            if failure is None:
                continue
            if failure.outcome:
                self._end(worker, *failure)
            else:
                self._lost(worker, failure.text)

    def _end_large_ones(self) -> None:
        for worker in list(self._workers):
            if failure := process.memory_failure(worker):
                self._end(worker, *failure)

    def _lost(self, worker: Worker, how: str = "") -> None:
        """Kill a process that ended itself, closed its channel, sent an invalid frame, or is late outside of a call.

        Args:
            worker: the process.
            how: what happened to it; default: its exit code.
        """
        if worker not in self._workers:
            return
        code = self._kill(worker)
        if not worker.is_ready:
            self._start_failed(how or ending(code))
        elif worker.calls and (worker.is_computing or worker.calls[0].was_lost):
            self._blame(worker, *self._describe_crash(worker.calls[0], code))
        elif worker.calls:
            worker.calls[0].was_lost = True
        self._requeue(worker)

    def _describe_crash(self, call: Call, code: int) -> tuple[str, str]:
        """Return the outcome and the description for a process that ended with this exit code."""
        if code == -signal.SIGKILL and _count_oom_kills() > self._num_oom_kills:
            self._num_oom_kills += 1
            return "memory", f"{call.code.what} ran out of memory: the machine has no more; its process was killed"
        return "crash", f"the process of {call.code.what} {ending(code)} while it computed"

    def _start_failed(self, how: str) -> None:
        self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            raise RliteError(f"sandbox processes cannot be started: the last of {self._num_failed_starts} {how}")

    def _end(self, worker: Worker, outcome: str = "", text: str = "") -> None:
        """Kill a process. If an outcome is given, the current call fails with it. Other calls are queued again."""
        self._kill(worker)
        if outcome:
            self._blame(worker, outcome, text)
        self._requeue(worker)

    def _blame(self, worker: Worker, outcome: str, text: str) -> None:
        call = worker.calls.popleft()
        call.code.took(call.timeout)  # slow or dangerous: the next ones go alone
        call.code.num_timeouts = call.code.num_timeouts + 1 if outcome == "timeout" else 0
        call.fail(outcome, text)

    def _kill(self, worker: Worker) -> int:
        """Return the exit code of a process after killing it and everything that it started."""
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        if worker.exit_fd is not None:
            self._selector.unregister(worker.exit_fd)
        return worker.end()

    def _requeue(self, worker: Worker) -> None:
        """Queue the calls that a process has not done, and repeat alone the calls whose result is in doubt.

        The first call of a chunk began in an unchanged process, so its answer counts.
        """
        for call in worker.answered[:1]:
            call.settle()
        for call in worker.answered[1:]:
            call.is_alone = True
        self._queue.extendleft(reversed([*worker.answered[1:], *worker.calls]))
        worker.answered.clear()
        worker.calls.clear()


def _count_oom_kills() -> int:
    """Return how many processes Linux has killed on this machine because memory ran out."""
    return number_in("/proc/vmstat", "oom_kill")


_shared: dict[frozenset[str], SandboxPool] = {}
_shared_lock = threading.Lock()


def shared_pool(num_processes: int, env_vars: frozenset[str] = frozenset()) -> SandboxPool:
    """Return this program's pool whose processes have these environment variables.

    Args:
        num_processes: number of processes that the pool has room for, at least.
        env_vars: names of environment variables that processes receive in addition to the common ones.
    """
    with _shared_lock:
        pool = _shared.get(env_vars)
        if pool is None or not pool.is_usable:
            pool = _shared[env_vars] = SandboxPool(num_processes, env_vars)
        pool.num_processes = max(pool.num_processes, num_processes)
        return pool


@atexit.register
def close_shared_pool() -> None:
    """End all sandbox processes of this program. The next call starts new processes."""
    with _shared_lock:
        pools = [*_shared.values()]
        _shared.clear()
    for pool in pools:
        pool.close()
