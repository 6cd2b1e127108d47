"""Manage processes that run user code and can be killed.

One thread owns the processes. It starts them, gives them calls, reads their answers, and kills processes that are late
or too large. Callers only put calls into a queue and hold a future.

    call:     queued ──> sent ──> started ──> answered ──> settled
                 ^         └─────────┴───────────┴──── its process died or was changed because of another call
    process:  starting ──> idle <──> busy ──> dead (hung, crashed, too large, tainted, or the pool was closed)

A process starts without a fork, because the driver may hold CUDA. It never sees the driver's `__main__`, its
descriptors, or environment variables that may be secret. It leads its own session. Killing the process therefore also
kills its children.

Quick calls travel together in a chunk. If the process has nothing to restore after the last call, all answers count.
Otherwise only the first answer counts, because the first call began in an unchanged process. The other calls run again
alone.

A process is not trusted. The driver decodes frames by `rlite.runtime.sandbox.wire` and never unpickles them. Each
frame must be due, and carry the number drawn for its call when the call was sent. The driver measures the time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import pickle
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import psutil

from rlite.errors import RliteError
from rlite.runtime.sandbox import child, prints, wire
from rlite.runtime.sandbox.calls import NUM_FORKS, Call, ending, take_chunk
from rlite.runtime.sandbox.confine import children, number_in, passed_environment
from rlite.wording import warn_once

logger = logging.getLogger(__name__)
EXIT_CODES = range(1 - signal.NSIG, 256)
"""exit codes of processes; a negative code is a signal's number"""
UNPROTECTED = (
    "no {} here: code in sandbox processes can reach this program; see docs/sandbox.md#what-the-kernel-refuses"
)
KILL_TIMEOUT = 5.0
"""seconds in which a killed process must be gone; one that is not is left to the kernel"""

_BOOT = (
    "import json, sys; driver, descriptor, prints, is_silent, sys.path[:] = json.loads(sys.argv[1]); del sys.argv[1:];"
    "from rlite.runtime.sandbox.confine import keep; keep(driver, descriptor);"
    "from rlite.runtime.sandbox.child import serve; serve(driver, descriptor, prints, is_silent)"
)


@dataclass(eq=False)
class Worker:
    """A sandbox process, with the calls that it was given."""

    process: subprocess.Popen[bytes]
    """the process's keeper on Linux (see `rlite.runtime.sandbox.confine`), which ends as the process does"""
    channel: socket.socket
    exit_fd: int | None
    """readable when the process has ended: its forks may hold its end of the channel open"""
    prints_fd: int
    """file with what its calls have printed"""
    since: float
    """time of the start, of the first call without an answer, or of the start of that call"""
    is_ready: bool = False
    is_computing: bool = False
    """the first of `calls` has started"""
    is_tainted: bool = False
    """true if the process has run code made at run time"""
    calls: deque[Call] = field(default_factory=deque)
    """calls without an answer"""
    answered: list[Call] = field(default_factory=list)
    """calls with an answer, until the process has judged its state"""
    keys: set[bytes] = field(default_factory=set)
    """functions that it holds"""
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    reader: wire.Reader = field(default_factory=lambda: wire.Reader(0))
    began: float = 0.0
    """time at which the first call of the chunk was started"""

    @property
    def readable(self) -> list[Any]:
        """Objects on which the pool waits for the process."""
        return [self.channel] if self.exit_fd is None else [self.channel, self.exit_fd]

    @property
    def is_idle(self) -> bool:
        """True if the process is ready and has no calls."""
        return self.is_ready and not self.calls and not self.answered

    @classmethod
    def start(cls, env_vars: Collection[str], is_silent: bool) -> Worker:
        """Return a newly started process.

        `is_silent`: keep what calls print for the driver. Else the process prints where the driver does.
        """
        ours, theirs = socket.socketpair()
        prints_fd, paths = prints.new_file(), [path or os.getcwd() for path in sys.path]
        boot = json.dumps([os.getpid(), theirs.fileno(), prints_fd, is_silent, paths])
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, boot],
                env=passed_environment(os.environ, env_vars),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), prints_fd],
                start_new_session=True,
            )
        exit_fd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
        return cls(process, ours, exit_fd, prints_fd, time.monotonic())

    def give(self, calls: Sequence[Call]) -> None:
        """Begin to send calls, each under a new number."""
        for number, call in enumerate(calls, 1 + secrets.randbits(62)):
            call.number, call.failure = number, None
        blobs = {call.code.key: call.code.blob for call in calls if call.code.key not in self.keys}
        chunk: child.Chunk = (blobs, calls[0].memory_limit, [call.message() for call in calls])
        self.keys |= blobs.keys()
        self.calls.extend(calls)
        self.reader.limit = max(call.code.max_answer for call in calls)
        self.is_computing, self.since = False, time.monotonic()
        self.unsent = memoryview(pickle.dumps(chunk))

    def send(self) -> None:
        """Send as many bytes as the process accepts without blocking.

        A stray thread of a function may hold the process's lock.
        """
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                self.unsent = self.unsent[self.channel.send(self.unsent, socket.MSG_DONTWAIT) :]

    def take(self, message: Any) -> str | None:
        """Handle one frame.

        Returns the kind of the frame if the pool has to act: READY, VALUE (also for RAISED), MEMORY, ENDED or JUDGED.
        Otherwise None.
        """
        call = self.calls[0] if self.calls else None
        due = None if call is None else call.number
        match message:
            case ["started", int() as number, None] if number == due and not self.is_computing:
                self.is_computing, self.since = True, time.monotonic()
                if not self.answered:
                    self.began = self.since
            case ["value", int() as number, value] if call and number == due:
                call.result = value
                return child.VALUE
            case ["judged", 0, bool() as has_changed] if self.answered and call is None:
                if has_changed:
                    self.answered[0].code.is_alone |= len(self.answered) == 1
                    for one in self.answered:
                        one.is_alone = True
                return child.JUDGED
            case ["piece", int() as number, piece] if call and call.on_piece and number == due and self.is_computing:
                self.since = time.monotonic()
                call.on_piece(piece)
            case ["tainted", int() as number, None] if call and number == due and not self.is_tainted:
                self.is_tainted, call.code.num_forks = True, NUM_FORKS
            case ["raised", int() as number, str() as text] if call and number == due:
                call.failure = "raised", f"{call.code.what} raised {child.printable(text)}"
                return child.VALUE
            case ["ended", int() as number, int() as code] if call and number == due and code in EXIT_CODES:
                call.result = code
                return child.ENDED
            case ["memory", int() as number, str() as text] if call and number == due:
                call.result = child.printable(text)
                return child.MEMORY
            case ["ready", 0, str() as lacking] if not self.is_ready:
                self.is_ready = True
                if lacking:
                    warn_once(logger, UNPROTECTED.format(lacking))
                return child.READY
            case _:
                raise wire.WireError("unexpected message from the sandbox process")
        return None

    def read_prints(self) -> None:
        """Give its calls what they have printed."""
        found = prints.read_prints(self.prints_fd)
        for call in (*self.answered, *self.calls) if found else ():
            call.printed = child.printable(found.get(call.number, ""))

    def end(self) -> int:
        """Kill the process and everything that it started, without leaving a zombie.

        Returns the exit code of the process.
        """
        self.channel.close()
        os.close(self.prints_fd)
        if self.exit_fd is not None:
            os.close(self.exit_fd)
        if sys.platform == "linux":
            self.process.terminate()  # its keeper ends everything else first
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(timeout=KILL_TIMEOUT)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or (macOS) a zombie
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            return self.process.wait(timeout=KILL_TIMEOUT)
        except subprocess.TimeoutExpired:  # stuck in the kernel; `subprocess` reaps it when it starts another
            return -signal.SIGKILL

    def memory(self) -> int:
        """Return the bytes that the process or its largest child takes: resident ones, and those of anonymous files."""
        kept = children(self.process.pid)
        return max(map(_memory, (self.process.pid, *kept, *(fork for pid in kept for fork in children(pid)))))


def _memory(pid: int) -> int:
    try:
        resident = psutil.Process(pid).memory_info().rss
    except psutil.Error:  # it has just ended
        return 0
    held = _anonymous_files(pid)
    mapped = number_in(f"/proc/{pid}/status", "RssShmem") * 1024 if held else 0  # these are resident
    return resident + max(held - mapped, 0)


def _anonymous_files(pid: int) -> int:
    """Return the bytes of the files without a name (`memfd_create`) that a process has open. Each counts once."""
    sizes: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(entry.path).startswith("/memfd:"):
                    state = os.stat(entry.path)
                    sizes[state.st_ino] = state.st_blocks * 512
    return sum(sizes.values())


LOAD_TIMEOUT = 120.0
"""seconds in which a process must be ready, and a function and its arguments loaded"""
SEND_TIMEOUT = 10.0
"""seconds in which an idle process must take a message, and judge its state after its last answer"""
MEMORY_INTERVAL = 0.02
"""seconds between two looks at the memory of processes that have a limit"""


Failure = tuple[str, str]
"""outcome and text of the end of the current call of a process that exceeds a limit: timeout, memory; empty if the
process itself failed, which is lost"""


def deadline(worker: Worker) -> float:
    """Return the time of the monotonic clock, in seconds, by which a process must act next; infinity if it is idle."""
    if worker.is_idle:
        return float("inf")
    if worker.unsent or (worker.is_ready and not worker.calls):
        return worker.since + SEND_TIMEOUT
    return worker.since + (worker.calls[0].timeout if worker.is_computing else LOAD_TIMEOUT)


def seconds_to_next_check(workers: Sequence[Worker], now: float) -> float | None:
    """Return how long the pool may wait for processes; None if none has a limit."""
    patience = min(map(deadline, workers), default=float("inf")) - now
    if any(worker.calls and worker.calls[0].memory_limit is not None for worker in workers):
        patience = min(patience, MEMORY_INTERVAL)
    return None if patience == float("inf") else max(patience, 0.0)


def time_failure(worker: Worker, now: float) -> Failure | None:
    """Return the failure of a process that is over time, None if it is in time."""
    if deadline(worker) > now:
        return None
    if not worker.is_ready or worker.unsent or not worker.calls:
        return "", f"was not ready in {LOAD_TIMEOUT:g} s"
    call = worker.calls[0]
    if worker.is_computing:
        return "timeout", f"{call.code.what} ran for more than {call.timeout:g} s; its process was killed"
    return "timeout", f"loading {call.code.what} or its arguments took more than {LOAD_TIMEOUT:g} s"


def out_of_memory(call: Call, how: str) -> Failure:
    """Return the failure of a call that took too much memory."""
    limit = "" if call.memory_limit is None else f" of at most {call.memory_limit / 2**30:g} GiB"
    return "memory", f"{call.code.what} ran out of memory{limit}: {how}; its process was killed"


MAX_FAILED_STARTS = 3


class SandboxPool:
    """A pool of at most `num_processes` processes, started on demand. `close()` ends all of them.

    `num_processes`: maximum number of processes. It may be raised later. `is_silent`: keep what calls print for the
    driver. Else the processes print where the driver does.
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
        self._is_closing = self._is_woken = False
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="sandbox-pool", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> Future[Any]:
        """Queue one call. Safe in any thread."""
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
                self._end_late_and_large_ones()
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
        for event, ready in self._selector.select(seconds_to_next_check(self._workers, time.monotonic())):
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
            worker = Worker.start(self._env_vars, self._is_silent)
            self._workers.append(worker)
            for readable in worker.readable:
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
            worker.read_prints()
            if len(worker.answered) == 1 or not worker.answered[0].is_alone:
                for call in worker.answered:
                    call.code.took((worker.since - worker.began) / len(worker.answered))
                    call.settle()
                worker.answered.clear()
            self._requeue(worker)
        elif kind == child.MEMORY:
            self._end(worker, *out_of_memory(worker.calls[0], worker.calls[0].result))
        elif kind is not None:
            call = worker.calls[0]
            if kind == child.ENDED:
                call.failure = self._describe_crash(call, call.result)
            worker.answered.append(worker.calls.popleft())
            worker.is_computing, worker.since = False, time.monotonic()
            if worker.is_tainted:
                self._end(worker)

    def _end_late_and_large_ones(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if time_failure(worker, now)]:
            self._receive(worker)  # the answer may be here
            failure = time_failure(worker, time.monotonic()) if worker in self._workers else None
            if failure is not None and failure[0]:
                self._end(worker, *failure)
            elif failure is not None:
                self._lost(worker, failure[1])

        for worker in list(self._workers):
            limit = worker.calls[0].memory_limit if worker.calls else None
            if limit is not None and (memory := worker.memory()) > limit:
                self._end(worker, *out_of_memory(worker.calls[0], f"it took {memory / 2**30:.2f} GiB"))

    def _lost(self, worker: Worker, how: str = "") -> None:
        """Kill a process that ended itself, closed its channel, sent an invalid frame, or is late outside of a call.

        `how`: what happened to it; default: its exit code.
        """
        if worker not in self._workers:
            return
        code = self._kill(worker)
        if not worker.is_ready:
            self._num_failed_starts += 1
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                times, how = self._num_failed_starts, how or ending(code)
                raise RliteError(f"sandbox processes cannot be started: the last of {times} {how}")
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
        worker.read_prints()
        for readable in worker.readable:
            self._selector.unregister(readable)
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
    """Return this program's pool whose processes have these environment variables."""
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
