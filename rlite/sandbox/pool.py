"""Processes that compute rewards and can be killed.

One thread owns all of it: it starts processes, hands them calls, reads their answers, and kills what is late. Callers
only put calls into a queue and hold a future.

    call:     queued ──> sent ──> started ──> answered ──> settled
                 ^         └─────────┴───────────┴──── its process died or was changed because of another call
    process:  starting ──> idle <──> busy ──> dead (hung, crashed, too large, unclean, or the pool was closed)

A process starts from nothing (no fork: the driver may hold CUDA), never sees the driver's `__main__`, its descriptors
or the variables of its environment that may be secret, and leads a session of its own, so that killing it ends what it
started as well.

Quick calls go together. Their answers count when the process has found nothing to put back after the last of them;
else all but the first, which it began unchanged, are done again alone.
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
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

from rlite.errors import RliteError
from rlite.sandbox import wire
from rlite.sandbox.call import (
    Call,
    CallQueue,
    RewardCode,
    RewardMemory,
    RewardTimeout,
    ending,
)
from rlite.sandbox.child import CLEAN, DIRTY, MEMORY, READY
from rlite.sandbox.foreign import ENDED
from rlite.sandbox.process import LOAD_TIMEOUT, Worker

MEMORY_INTERVAL = 0.02
"""seconds between looks at the memory of a process that has a limit"""
MAX_FAILED_STARTS = 3


class RewardPool:
    """At most `num_processes` processes, started when they are needed; `close()` ends them all.

    Args:
        num_processes: at most so many.
        env_vars: variables of the environment that processes get beside those of `passed_environment`.
    """

    def __init__(self, num_processes: int, env_vars: Collection[str] = ()) -> None:
        self.num_processes = num_processes
        self.env_vars = env_vars
        self.owner = os.getpid()
        self._queue = CallQueue()
        self._unsettled: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._processes: list[Worker] = []
        self._failed_starts = 0
        self._num_oom_kills = _oom_kills()
        self._failure: BaseException | None = None
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._woken = False
        self._bell, self._ringer = socket.socketpair()
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    def submit(
        self, code: RewardCode, arguments: bytes, timeout: float, memory_limit: int | None = None
    ) -> Future[Any]:
        """Compute one reward; the future ends with what its process answers, unchecked, or with a RewardError.

        `timeout` in seconds, `memory_limit` in bytes. Safe in any thread.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                raise RliteError("the reward pool has stopped") from self._failure
            self._unsettled.add(future)
            self._queue.put(Call(code, arguments, timeout, memory_limit, future))
        future.add_done_callback(self._unsettled.discard)
        self._ring()
        return future

    @property
    def is_usable(self) -> bool:
        """Whether it works, and in this process (it does not survive a fork)."""
        return self._failure is None and not self._closing and self.owner == os.getpid()

    def close(self) -> None:
        """Kill every process and fail every call that is still under way."""
        self._closing = True
        self._ring()
        if self.owner == os.getpid():
            self._thread.join(timeout=30)

    def _ring(self) -> None:
        if not self._woken:
            self._woken = True
            with contextlib.suppress(OSError):  # closed: nobody listens any more
                self._ringer.send(b"\0")

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException = RliteError("the reward pool was closed while this reward was computed")
        try:
            while not self._closing:
                self._dispatch()
                now = time.monotonic()
                patience = min((process.deadline for process in self._processes), default=float("inf")) - now
                if any(process.memory_limit is not None for process in self._processes):
                    patience = min(patience, MEMORY_INTERVAL)
                for event, ready in self._selector.select(None if patience == float("inf") else max(patience, 0.0)):
                    if event.data is None:
                        self._bell.recv(4096)
                        self._woken = False
                    elif event.data in self._processes:  # not lost by the event before
                        if ready & selectors.EVENT_WRITE:
                            self._send_on(event.data)
                        self._receive(event.data)
                        if event.fd == event.data.exit_fd and event.data in self._processes:
                            self._drain(event.data)
                self._end_late_ones()
                self._end_large_ones()
        except BaseException as error:  # belongs to everyone who waits
            failure = error
        with self._lock:
            self._failure = failure
        for future in list(self._unsettled):  # wherever their calls were
            if future.set_running_or_notify_cancel():
                future.set_exception(RliteError(str(failure)))
        for process in list(self._processes):
            self._end(process)
        self._selector.close()
        self._bell.close()
        self._ringer.close()

    def _dispatch(self) -> None:
        """Hand waiting calls to idle processes; start processes while there are too few."""
        while True:
            num_waiting = len(self._queue)
            if not num_waiting:
                return
            idle = next((process for process in self._processes if process.is_idle), None)
            if idle is None:
                break
            limit = self._queue.memory_limit
            if limit is not None and idle.memory() > limit:  # others' doing, for which nobody else shall pay
                self._end(idle)
                continue
            self._send(idle, -(-num_waiting // self.num_processes))
        num_starting = sum(not process.is_ready for process in self._processes)
        missing = min(num_waiting - num_starting, self.num_processes - len(self._processes))
        for _ in range(missing):
            self._start()

    def _send(self, process: Worker, fair_share: int) -> None:
        calls = self._queue.take(fair_share)
        if not calls:
            return
        process.give(calls)
        self._send_on(process)

    def _send_on(self, process: Worker) -> None:
        try:
            process.send()
        except OSError:
            self._lost(process)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
        self._selector.modify(process.channel, events, process)

    def _receive(self, process: Worker) -> bool:
        """Read what there is; whether there was something, and the process is still alive."""
        try:
            data = process.channel.recv(1 << 18, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._lost(process)
            return False
        try:
            for message in process.reader.read(data):
                self._heard(process, message)
                if process not in self._processes:
                    return False
        except wire.WireError:  # a function has written to file descriptors that are not its own
            self._lost(process)
        return process in self._processes

    def _drain(self, process: Worker) -> None:
        """The process has ended; its last answers count."""
        while self._receive(process):
            pass
        if process in self._processes:
            self._lost(process)

    def _heard(self, process: Worker, message: Any) -> None:
        """Raises: WireError for a frame that is not due."""
        heard = process.take(message)
        if heard is None:
            return
        kind, value = heard
        if kind == READY:
            self._failed_starts = 0
        elif kind in (CLEAN, DIRTY):
            self._judged(process, kind == CLEAN, value)
        else:
            self._answered(process, kind, value)

    def _answered(self, process: Worker, kind: str, value: Any) -> None:
        call = process.calls.popleft()
        process.is_computing, process.since, process.fork = False, time.monotonic(), None
        if kind == MEMORY:
            self._too_large(process, call, value)
            return
        if kind == ENDED and self._was_oom_killed(value):
            self._too_large(process, call, "the machine has no more")
            return
        call.answer = (kind, value)
        process.answered.append(call)
        if process.is_tainted:
            self._end(process)
            self._requeue(process)

    def _judged(self, process: Worker, is_clean: bool, changed: str | None) -> None:
        """A process has answered all its calls, and says whether it is as it was, or is so again."""
        if len(process.answered) == 1 or changed is None:
            for call in process.answered:
                call.code.took((process.since - process.began) / len(process.answered))
                call.code.is_alone |= changed is not None
                call.settle()
            process.answered.clear()
        if not is_clean:
            self._end(process)
        self._requeue(process)

    def _end_late_ones(self) -> None:
        now = time.monotonic()
        for process in [process for process in self._processes if process.deadline <= now]:
            self._receive(process)  # the answer may be here
            if process not in self._processes or process.deadline > now:
                continue
            if process.unsent:
                self._lost(process)
                continue
            self._end(process)
            if not process.is_ready:
                self._start_failed(f"was not ready in {LOAD_TIMEOUT:g} s")
                continue
            if process.calls:
                self._too_late(process.calls.popleft(), process.is_computing)
            self._requeue(process)

    def _too_late(self, call: Call, is_computing: bool) -> None:
        if is_computing:
            text = f"{call.code.what} ran for more than {call.timeout:g} s; its process was killed"
            call.code.took(call.timeout)
        else:
            text = f"loading {call.code.what} or its arguments took more than {LOAD_TIMEOUT:g} s"
        call.fail(RewardTimeout(text))

    def _end_large_ones(self) -> None:
        for process in list(self._processes):
            limit = process.memory_limit
            if limit is not None and (memory := process.memory()) > limit:
                self._too_large(process, process.calls.popleft(), f"it took {memory / 2**30:.2f} GiB")

    def _too_large(self, process: Worker, call: Call, how: str) -> None:
        """The process goes as well, with what it has not given back."""
        self._end(process)
        call.code.took(call.timeout)
        limit = "" if call.memory_limit is None else f" of at most {call.memory_limit / 2**30:g} GiB"
        call.fail(RewardMemory(f"{call.code.what} ran out of memory{limit}: {how}; its process was killed"))
        self._requeue(process)

    def _lost(self, process: Worker) -> None:
        """The process has ended, or closed its end of the channel, or cannot be understood."""
        code = self._end(process)
        if not process.is_ready:
            self._start_failed(ending(code))
        elif process.calls:
            self._lost_with_calls(process, code)
        else:
            self._requeue(process)

    def _lost_with_calls(self, process: Worker, code: int) -> None:
        call = process.calls[0]
        if self._was_oom_killed(code):
            self._too_large(process, process.calls.popleft(), "the machine has no more")
            return
        if process.is_computing or call.was_lost:
            process.calls.popleft()
            call.code.took(call.timeout)  # slow or dangerous: the next ones go alone
            call.crash(code)
        call.was_lost = True
        self._requeue(process)

    def _was_oom_killed(self, code: int) -> bool:
        if code != -signal.SIGKILL or _oom_kills() <= self._num_oom_kills:
            return False
        self._num_oom_kills += 1
        return True

    def _requeue(self, process: Worker) -> None:
        """Queue what a process has not done again, and what it may have done otherwise than alone.

        The first of several calls was alone: its answer counts.
        """
        for call in process.answered[:1]:
            call.settle()
        for call in process.answered[1:]:
            call.is_alone = True
        again = [*process.answered[1:], *process.calls]
        self._queue.put_back(again)
        process.answered.clear()
        process.calls.clear()

    def _start(self) -> None:
        process = Worker.start(self.env_vars)
        self._processes.append(process)
        for readable in (process.channel, process.exit_fd):
            if readable is not None:
                self._selector.register(readable, selectors.EVENT_READ, process)

    def _start_failed(self, how: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise RliteError(f"reward processes cannot be started: the last of {self._failed_starts} {how}")

    def _end(self, process: Worker) -> int:
        """Kill the process and what it started; returns its exit code. Safe to call again."""
        if process not in self._processes:
            return process.process.returncode or 0
        self._processes.remove(process)
        self._selector.unregister(process.channel)
        if process.exit_fd is not None:
            self._selector.unregister(process.exit_fd)
        return process.end()


def _oom_kills() -> int:
    """Processes that Linux has killed for want of memory, on this machine."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as counters:
        for line in counters:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


_shared: dict[frozenset[str], RewardPool] = {}
_shared_lock = threading.Lock()


def shared_pool(num_processes: int, env_vars: frozenset[str] = frozenset()) -> RewardPool:
    """The pool of this program whose processes have these variables, with room for `num_processes` at least."""
    with _shared_lock:
        pool = _shared.get(env_vars)
        if pool is None or not pool.is_usable:
            pool = _shared[env_vars] = RewardPool(num_processes, env_vars)
        pool.num_processes = max(pool.num_processes, num_processes)
        return pool


@atexit.register
def close_shared_pool() -> None:
    """End all reward processes of this program; the next reward starts new ones."""
    with _shared_lock:
        pools = [*_shared.values()]
        _shared.clear()
    for pool in pools:
        pool.close()
