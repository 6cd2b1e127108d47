"""Represent a sandbox process on the driver's side.

The process is not trusted. The driver decodes frames by `rlite.runtime.sandbox.wire` and never unpickles them. Each
frame must be due, and carry the number drawn for its call when the call was sent. The driver measures the time.

Decide when a sandbox process is killed: after too much time or memory. Return the failure of its call.

The pool asks here after each wait, and kills the processes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil

from rlite.runtime.sandbox import child, wire
from rlite.runtime.sandbox.calls import NUM_FORKS, Call
from rlite.runtime.sandbox.confine import children, number_in, passed_environment
from rlite.wording import warn_once

logger = logging.getLogger(__name__)
EXIT_CODES = range(1 - signal.NSIG, 256)
"""exit codes of processes; a negative code is a signal's number"""
UNPROTECTED = (
    "no {} here: code in sandbox processes can reach this program; see docs/rewards.md#what-the-kernel-refuses"
)
KILL_TIMEOUT = 5.0
"""seconds in which a killed process must be gone; one that is not is left to the kernel"""

_BOOT = (
    "import json, sys; driver, descriptor, is_silent, sys.path[:] = json.loads(sys.argv[1]); del sys.argv[1:];"
    "from rlite.runtime.sandbox.keeper import keep; keep(driver, descriptor);"
    "from rlite.runtime.sandbox.child import serve; serve(driver, descriptor, is_silent)"
)


@dataclass(eq=False)
class Worker:
    """A sandbox process, with the calls that it was given."""

    process: subprocess.Popen[bytes]
    """the process's keeper on Linux (see `rlite.runtime.sandbox.keeper`), which ends as the process does"""
    channel: socket.socket
    exit_fd: int | None
    """readable when the process has ended: its forks may hold its end of the channel open"""
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
    def is_idle(self) -> bool:
        """True if the process is ready and has no calls."""
        return self.is_ready and not self.calls and not self.answered

    @classmethod
    def start(cls, env_vars: Collection[str], is_silent: bool) -> Worker:
        """Return a newly started process.

        Args:
            env_vars: names of environment variables that the process receives in addition to the common ones.
            is_silent: discard the process's standard output and standard error.
        """
        ours, theirs = socket.socketpair()
        boot = json.dumps([os.getpid(), theirs.fileno(), is_silent, [path or os.getcwd() for path in sys.path]])
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, boot],
                env=passed_environment(os.environ, env_vars),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        finally:
            theirs.close()
        exit_fd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
        return cls(process, ours, exit_fd, time.monotonic())

    def give(self, calls: Sequence[Call]) -> None:
        """Begin to send calls, each under a new number."""
        for number, call in enumerate(calls, 1 + secrets.randbits(62)):
            call.number, call.failure = number, None
        blobs = {call.code.key: call.code.blob for call in calls if call.code.key not in self.keys}
        messages = [call.message() for call in calls]
        chunk: child.Chunk = (blobs, calls[0].memory_limit, messages)
        payload = pickle.dumps(chunk)
        self.keys |= blobs.keys()
        self.calls.extend(calls)
        self.reader.limit = max(call.code.max_answer for call in calls)
        self.is_computing, self.since = False, time.monotonic()
        self.unsent = memoryview(child.LENGTH.pack(len(payload)) + payload)

    def send(self) -> None:
        """Send as many bytes as the process accepts without blocking.

        A stray thread of a function may hold the process's lock.
        """
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                self.unsent = self.unsent[self.channel.send(self.unsent, socket.MSG_DONTWAIT) :]

    def take(self, message: Any) -> str | None:
        """Handle one frame.

        Args:
            message: the frame's decoded value.

        Returns:
            The kind of the frame if the pool has to act: READY, VALUE (also for RAISED), MEMORY, ENDED or JUDGED.
                Otherwise None.

        Raises:
            WireError: the frame is unexpected.
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

    def end(self) -> int:
        """Kill the process and everything that it started, without leaving a zombie.

        Returns:
            The exit code of the process.
        """
        self.channel.close()
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
    if not (held := _anonymous_files(pid)):
        return resident
    return resident + max(held - number_in(f"/proc/{pid}/status", "RssShmem") * 1024, 0)  # a mapped file is resident


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


class Failure(NamedTuple):
    """The end of the current call of a process that exceeds a limit."""

    outcome: str
    """timeout, memory; empty if the process itself failed, which is lost"""
    text: str


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
        return Failure("", f"was not ready in {LOAD_TIMEOUT:g} s")
    call = worker.calls[0]
    if worker.is_computing:
        return Failure("timeout", f"{call.code.what} ran for more than {call.timeout:g} s; its process was killed")
    return Failure("timeout", f"loading {call.code.what} or its arguments took more than {LOAD_TIMEOUT:g} s")


def memory_failure(worker: Worker) -> Failure | None:
    """Return the failure of a process whose resident memory exceeds its call's limit, None if it does not."""
    limit = worker.calls[0].memory_limit if worker.calls else None
    if limit is None or (memory := worker.memory()) <= limit:
        return None
    return out_of_memory(worker.calls[0], f"it took {memory / 2**30:.2f} GiB")


def out_of_memory(call: Call, how: str) -> Failure:
    """Return the failure of a call that took too much memory.

    Args:
        call: the call.
        how: the observed use of memory, for the message.
    """
    limit = "" if call.memory_limit is None else f" of at most {call.memory_limit / 2**30:g} GiB"
    return Failure("memory", f"{call.code.what} ran out of memory{limit}: {how}; its process was killed")
