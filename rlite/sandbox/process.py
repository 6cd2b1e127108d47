"""The processes of a reward pool, seen from the driver.

They are not trusted. What a process writes is read as rlite.sandbox.wire says, never unpickled, and each frame must be
the one that is due, for the number that the call was given when it was sent. Time is the driver's.
"""

from __future__ import annotations

import contextlib
import json
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
from typing import Any

import psutil

from rlite.sandbox import wire
from rlite.sandbox.call import Call
from rlite.sandbox.child import HEADER, READY, VALUE, Chunk, shown
from rlite.sandbox.confine import MAX_PASSES, descendants, passed_environment
from rlite.sandbox.foreign import ENDED

LOAD_TIMEOUT = 120.0
"""seconds in which a process must be ready, and a function and its arguments loaded"""
SEND_TIMEOUT = 10.0
"""seconds in which an idle process must take a message, and one that has answered must say how it found itself"""
EXIT_CODES = range(1 - signal.NSIG, 256)
"""of processes; a negative one is that of a signal"""
KILL_TIMEOUT = 5.0
"""seconds in which a killed process must be gone; one that is not is left to the kernel"""

_BOOT = (
    "import json, sys; descriptor, sys.path[:] = json.loads(sys.argv[1]); del sys.argv[1:];"
    "from rlite.sandbox.child import serve; serve(descriptor)"
)


@dataclass(eq=False)
class Worker:
    """A process that computes rewards, seen from the driver."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    exit_fd: int | None
    """readable when it has ended: what it forked may hold its end of the channel open"""
    since: float
    """when it was started, or was handed the first call that has not been answered, or that call was started"""
    is_ready: bool = False
    is_computing: bool = False
    """the first of `calls` has started"""
    calls: deque[Call] = field(default_factory=deque)
    """those without an answer"""
    answered: list[Call] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)
    """functions that it holds"""
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    reader: wire.Reader = field(default_factory=lambda: wire.Reader(0))
    fork: int | None = None
    """the process that computes in its place"""
    is_tainted: bool = False
    began: float = 0.0
    """when the first of the calls under way was started"""

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.calls and not self.answered

    @property
    def deadline(self) -> float:
        if self.is_idle:
            return float("inf")
        if self.unsent or (self.is_ready and not self.calls):
            return self.since + SEND_TIMEOUT
        return self.since + (self.calls[0].timeout if self.is_computing else LOAD_TIMEOUT)

    @property
    def memory_limit(self) -> int | None:
        return self.calls[0].memory_limit if self.calls else None

    @classmethod
    def start(cls, env_vars: Collection[str]) -> Worker:
        """Start one, with these variables of the environment beside the common ones."""
        ours, theirs = socket.socketpair()
        boot = json.dumps([theirs.fileno(), [path or os.getcwd() for path in sys.path]])
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
        first = 1 + secrets.randbits(62)
        for number, call in enumerate(calls, first):
            call.number, call.answer = number, None
        blobs = {call.code.key: call.code.blob for call in calls if call.code.key not in self.keys}
        numbered = [(call.number, call.code.key, call.arguments, call.code.max_answer) for call in calls]
        chunk: Chunk = (blobs, calls[0].memory_limit, numbered)
        payload = pickle.dumps(chunk)
        self.keys |= blobs.keys()
        self.calls.extend(calls)
        self.reader.limit = max(call.code.max_answer for call in calls)
        self.is_computing, self.since = False, time.monotonic()
        self.unsent = memoryview(HEADER.pack(len(payload)) + payload)

    def send(self) -> None:
        """Send what it takes without waiting: a thread that a function left behind may hold its lock."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                self.unsent = self.unsent[self.channel.send(self.unsent, socket.MSG_DONTWAIT) :]

    def take(self, message: Any) -> tuple[str, Any] | None:
        """Take one frame, if it is due: READY, how a call has ended, or CLEAN or DIRTY with what was changed.

        Raises: WireError if it is not.
        """
        due = self.calls[0].number if self.calls else None
        match message:
            case ["started", int() as number, None] if number == due and not self.is_computing:
                self.is_computing, self.since = True, time.monotonic()
                if not self.answered:
                    self.began = self.since
            case ["value", int() as number, value] if number == due:
                return VALUE, value
            case ["invalid" | "raised" | "memory" as kind, int() as number, str() as text] if number == due:
                return kind, shown(text)
            case ["clean" | "dirty" as kind, 0, str() | None as changed] if self.answered and due is None:
                return kind, changed
            case ["forked", int() as number, int() as pid] if number == due and self.fork is None and 1 < pid < 2**31:
                self.fork = pid
            case ["ended", int() as number, int() as code] if number == due and self.fork and code in EXIT_CODES:
                return ENDED, code
            case ["tainted", int() as number, None] if number == due and not self.is_tainted:
                self.is_tainted = self.calls[0].code.is_alone = True
            case ["ready", 0, None] if not self.is_ready:
                self.is_ready = True
                return READY, None
            case _:
                raise wire.WireError("a frame that is not due")
        return None

    def end(self) -> int:
        """Kill the process and what it started; returns its exit code. No zombie is left."""
        self.channel.close()
        if self.exit_fd is not None:
            os.close(self.exit_fd)
        self.process.send_signal(signal.SIGSTOP)  # orphans still come to it, where they are found
        strays: set[int] = set()
        for _ in range(MAX_PASSES):  # some may have left its session, and fork meanwhile
            new = set(descendants(self.process.pid)) - strays
            strays |= new
            for stray in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stray, signal.SIGKILL)
            if not new:
                break
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or (macOS) a zombie
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            return self.process.wait(timeout=KILL_TIMEOUT)
        except subprocess.TimeoutExpired:  # stuck in the kernel; `subprocess` reaps it when it starts another
            return -signal.SIGKILL

    def memory(self) -> int:
        """Bytes that are resident, of the larger of it and its fork."""
        return max(_resident(pid) for pid in (self.process.pid, self.fork) if pid is not None)


def _resident(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:  # it has just ended
        return 0
