"""Processes that compute rewards and can be killed.

One thread owns all of it: it starts processes, hands them calls, reads their answers, and kills what is late. Callers
only put calls into a queue and hold a future.

    call:     queued ──> sent ──> started ──> answered
                 ^         └──── its process died or was killed because of another call
    process:  starting ──> idle <──> busy ──> dead (hung, crashed, too large, or the pool was closed)

A process starts from nothing (no fork: the driver may hold CUDA), never sees the driver's `__main__`, and leads a
session of its own, so that killing it ends what it started as well.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rlite.errors import RliteError
from rlite.rollout.reward_process import INVALID, MEMORY, READY, STARTED, VALUE, Chunk, frame, frames

LOAD_TIMEOUT = 120.0
"""seconds in which a process must be ready, and a function and its arguments loaded"""
SEND_TIMEOUT = 10.0
"""seconds in which an idle process must take a message"""
KILL_TIMEOUT = 5.0
"""seconds in which a killed process must be gone; one that is not is left to the kernel"""
MEMORY_INTERVAL = 0.02
"""seconds between looks at the memory of a process that has a limit"""
MAX_FAILED_STARTS = 3
CHUNK_SECONDS = 0.005
"""calls go out in messages of about so much work; a function whose speed is unknown goes alone"""
MAX_CHUNK = 64

_BOOT = (
    "import json, sys; descriptor, sys.path[:] = json.loads(sys.argv[1]);"
    "from rlite.rollout.reward_process import serve; serve(descriptor)"
)


class RewardError(RliteError):
    """A reward could not be computed. `outcome` says how, in one word."""

    outcome = "error"


class RewardTimeout(RewardError, TimeoutError):
    """The function ran for longer than its time-out; its process was killed."""

    outcome = "timeout"


class RewardCrash(RewardError, RuntimeError):
    """The process ended while it computed; the message has its exit code or signal."""

    outcome = "crash"


class RewardMemory(RewardError, MemoryError):
    """The process took more memory than it may, or than there is."""

    outcome = "memory"


class RewardRaised(RewardError, RuntimeError):
    """The function raised an exception; the message begins with it and has its traceback."""

    outcome = "raised"


class RewardInvalid(RewardError, ValueError):
    """The function returned something else than a finite number."""

    outcome = "invalid"


@dataclass(eq=False)
class RewardCode:
    """A pickled function, under a key that is equal for equal functions."""

    key: bytes
    blob: bytes
    seconds: float = float("inf")
    """running mean of what a call takes; unknown at first"""
    what: str = "the reward function"
    """for error messages"""

    def took(self, seconds: float) -> None:
        known = self.seconds != float("inf")
        self.seconds = 0.8 * self.seconds + 0.2 * seconds if known else seconds


@dataclass(eq=False, slots=True)
class _Call:
    number: int
    code: RewardCode
    arguments: bytes
    timeout: float
    memory_limit: int | None
    future: Future[Any]
    was_lost: bool = False
    """a process has ended before it came to this call, which may have been another's doing"""


@dataclass(eq=False)
class _Process:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    exit_fd: int | None
    """readable when it has ended: what it forked may hold its end of the channel open"""
    since: float
    """when it was started, or was handed the first call that has not been answered, or that call was started"""
    is_ready: bool = False
    is_computing: bool = False
    """the first of `calls` has started"""
    calls: deque[_Call] = field(default_factory=deque)
    keys: set[bytes] = field(default_factory=set)
    """functions that it holds"""
    received: bytearray = field(default_factory=bytearray)

    @property
    def deadline(self) -> float:
        if self.is_ready and not self.calls:
            return float("inf")
        return self.since + (self.calls[0].timeout if self.is_computing else LOAD_TIMEOUT)

    @property
    def memory_limit(self) -> int | None:
        return self.calls[0].memory_limit if self.calls else None

    def memory(self) -> int:
        """Bytes that are resident."""
        try:
            return psutil.Process(self.process.pid).memory_info().rss
        except psutil.Error:  # it has just ended
            return 0


class RewardPool:
    """At most `num_processes` processes, started when they are needed; `close()` ends them all."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self.owner = os.getpid()
        self._queue: deque[_Call] = deque()
        self._lock = threading.Lock()
        self._next_number = 0
        self._processes: list[_Process] = []
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
        """Compute one reward; the future ends with a finite number (or what was `Passed`) or a RewardError.

        `timeout` in seconds, `memory_limit` in bytes. Safe in any thread.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                raise RliteError("the reward pool has stopped") from self._failure
            self._queue.append(_Call(self._next_number, code, arguments, timeout, memory_limit, future))
            self._next_number += 1
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
                for event, _ in self._selector.select(None if patience == float("inf") else max(patience, 0.0)):
                    if event.data is None:
                        self._bell.recv(4096)
                        self._woken = False
                    elif event.data in self._processes:  # not lost by the event before
                        self._receive(event.data)
                        if event.fd == event.data.exit_fd and event.data in self._processes:
                            self._drain(event.data)
                self._end_late_ones()
                self._end_large_ones()
        except BaseException as error:  # belongs to everyone who waits
            failure = error
        with self._lock:
            self._failure = failure
            unanswered = list(self._queue)
            self._queue.clear()
        for process in list(self._processes):
            unanswered += process.calls
            self._end(process)
        for call in unanswered:
            _settle(call, error=RliteError(str(failure)))
        self._selector.close()
        self._bell.close()
        self._ringer.close()

    def _dispatch(self) -> None:
        """Hand waiting calls to idle processes; start processes while there are too few."""
        while True:
            with self._lock:
                num_waiting = len(self._queue)
            if not num_waiting:
                return
            idle = next((process for process in self._processes if process.is_ready and not process.calls), None)
            if idle is None:
                break
            with self._lock:
                limit = self._queue[0].memory_limit if self._queue else None
            if limit is not None and idle.memory() > limit:  # others' doing, for which nobody else shall pay
                self._end(idle)
                continue
            self._send(idle, -(-num_waiting // self.num_processes))
        num_starting = sum(not process.is_ready for process in self._processes)
        missing = min(num_waiting - num_starting, self.num_processes - len(self._processes))
        for _ in range(missing):
            self._start()

    def _send(self, process: _Process, fair_share: int) -> None:
        calls: list[_Call] = []
        seconds = 0.0
        while len(calls) < min(max(fair_share, 1), MAX_CHUNK):
            with self._lock:
                call = self._queue.popleft() if self._queue else None
            if call is None:
                break
            if calls and (seconds + call.code.seconds > CHUNK_SECONDS or call.memory_limit != calls[0].memory_limit):
                with self._lock:
                    self._queue.appendleft(call)
                break
            if not call.future.cancelled():
                calls.append(call)
                seconds += call.code.seconds
        if not calls:
            return
        blobs = {call.code.key: call.code.blob for call in calls if call.code.key not in process.keys}
        chunk: Chunk = (blobs, [(call.number, call.code.key, call.arguments, call.memory_limit) for call in calls])
        process.keys |= blobs.keys()
        process.calls.extend(calls)
        process.is_computing, process.since = False, time.monotonic()
        try:
            process.channel.settimeout(SEND_TIMEOUT)  # a thread that a function left behind may hold the lock
            process.channel.sendall(frame(chunk))
            process.channel.settimeout(None)
        except OSError:
            self._lost(process)

    def _receive(self, process: _Process) -> bool:
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
        process.received += data
        try:
            for message in frames(process.received):
                if process in self._processes:
                    self._answered(process, *message)
        except Exception:  # a function has written to file descriptors that are not its own
            self._lost(process)
        return process in self._processes

    def _drain(self, process: _Process) -> None:
        """The process has ended; its last answers count."""
        while self._receive(process):
            pass
        if process in self._processes:
            self._lost(process)

    def _answered(self, process: _Process, kind: str, number: int, seconds: float, result: Any) -> None:
        if kind == READY:
            process.is_ready, self._failed_starts = True, 0
            return
        if process.calls[0].number != number:
            raise ValueError(f"an answer to call {number} instead of {process.calls[0].number}")
        if kind == STARTED:
            process.is_computing, process.since = True, seconds
            return
        call = process.calls.popleft()
        process.is_computing, process.since = False, time.monotonic()
        call.code.took(seconds)
        if kind == VALUE:
            _settle(call, value=result)
        elif kind == INVALID:
            _settle(call, error=RewardInvalid(f"{call.code.what} returned {result}; expected a finite number"))
        elif kind == MEMORY:
            self._too_large(process, call, result)
        else:
            _settle(call, error=RewardRaised(f"{call.code.what} raised {result}"))

    def _end_late_ones(self) -> None:
        now = time.monotonic()
        for process in [process for process in self._processes if process.deadline <= now]:
            self._receive(process)  # the answer may be here
            if process in self._processes and process.deadline <= now:
                self._end(process)
                if not process.is_ready:
                    self._start_failed(f"was not ready in {LOAD_TIMEOUT:g} s")
                    continue
                call = process.calls.popleft()
                if process.is_computing:
                    text = f"{call.code.what} ran for more than {call.timeout:g} s; its process was killed"
                    call.code.took(call.timeout)
                else:
                    text = f"loading {call.code.what} or its arguments took more than {LOAD_TIMEOUT:g} s"
                _settle(call, error=RewardTimeout(text))
                self._requeue(process)

    def _end_large_ones(self) -> None:
        for process in list(self._processes):
            limit = process.memory_limit
            if limit is not None and (memory := process.memory()) > limit:
                self._too_large(process, process.calls.popleft(), f"it took {memory / 2**30:.2f} GiB")

    def _too_large(self, process: _Process, call: _Call, how: str) -> None:
        """The process goes as well, with what it has not given back."""
        self._end(process)
        call.code.took(call.timeout)
        limit = "" if call.memory_limit is None else f" of at most {call.memory_limit / 2**30:g} GiB"
        _settle(call, error=RewardMemory(f"{call.code.what} ran out of memory{limit}: {how}; its process was killed"))
        self._requeue(process)

    def _lost(self, process: _Process) -> None:
        """The process has ended, or closed its end of the channel, or cannot be understood."""
        code = self._end(process)
        how = (
            f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"
        )
        if not process.is_ready:
            self._start_failed(how)
        elif process.calls:
            self._lost_with_calls(process, code, how)

    def _lost_with_calls(self, process: _Process, code: int, how: str) -> None:
        call = process.calls[0]
        if code == -signal.SIGKILL and _oom_kills() > self._num_oom_kills:
            self._num_oom_kills += 1
            self._too_large(process, process.calls.popleft(), "the machine has no more")
            return
        if process.is_computing or call.was_lost:
            process.calls.popleft()
            call.code.took(call.timeout)  # slow or dangerous: the next ones go alone
            _settle(call, error=RewardCrash(f"the process of {call.code.what} {how} while it computed"))
        call.was_lost = True
        self._requeue(process)

    def _requeue(self, process: _Process) -> None:
        """Calls that the process never came to."""
        with self._lock:
            self._queue.extendleft(reversed(process.calls))
        process.calls.clear()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        boot = json.dumps([theirs.fileno(), [path or os.getcwd() for path in sys.path]])
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, boot],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        finally:
            theirs.close()
        exit_fd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
        started = _Process(process, ours, exit_fd, time.monotonic())
        self._processes.append(started)
        for readable in (ours, exit_fd):
            if readable is not None:
                self._selector.register(readable, selectors.EVENT_READ, started)

    def _start_failed(self, how: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise RliteError(f"reward processes cannot be started: the last of {self._failed_starts} {how}")

    def _end(self, process: _Process) -> int:
        """Kill the process and what it started; returns its exit code. No zombie is left. Safe to call again."""
        if process not in self._processes:
            return process.process.returncode or 0
        self._processes.remove(process)
        self._selector.unregister(process.channel)
        process.channel.close()
        if process.exit_fd is not None:
            self._selector.unregister(process.exit_fd)
            os.close(process.exit_fd)
        strays = _descendants(process.process.pid)  # some may have left its session
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or (macOS) a zombie
            os.killpg(process.process.pid, signal.SIGKILL)
        for stray in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stray, signal.SIGKILL)
        try:
            return process.process.wait(timeout=KILL_TIMEOUT)
        except subprocess.TimeoutExpired:  # stuck in the kernel; `subprocess` reaps it when it starts another
            return -signal.SIGKILL


def _descendants(pid: int) -> list[int]:
    """What a process has started, and what that has; none where the system does not say so, or it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _oom_kills() -> int:
    """Processes that Linux has killed for want of memory, on this machine."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as counters:
        for line in counters:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _settle(call: _Call, value: Any = None, error: BaseException | None = None) -> None:
    if not call.future.set_running_or_notify_cancel():
        return
    if error is None:
        call.future.set_result(value)
    else:
        call.future.set_exception(error)


_shared: RewardPool | None = None
_shared_lock = threading.Lock()


def shared_pool(num_processes: int) -> RewardPool:
    """The pool of this program, with room for `num_processes` at least."""
    global _shared
    with _shared_lock:
        if _shared is None or not _shared.is_usable:
            _shared = RewardPool(num_processes)
        _shared.num_processes = max(_shared.num_processes, num_processes)
        return _shared


@atexit.register
def close_shared_pool() -> None:
    """End all reward processes of this program; the next reward starts new ones."""
    global _shared
    with _shared_lock:
        pool, _shared = _shared, None
    if pool is not None:
        pool.close()
