"""Calls of sandboxed functions: what is sent, its limits, and the errors that a call ends with."""

from __future__ import annotations

import hashlib
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from rlite.errors import RliteError
from rlite.runtime.sandbox.child import MAX_ANSWER, CallMessage, same


class SandboxError(RliteError):
    """Failure of a call of user code. `outcome` names the kind of failure in one word."""

    outcome = "error"


class SandboxTimeout(SandboxError, TimeoutError):
    """Time-out of a call. Its process was killed."""

    outcome = "timeout"


class SandboxCrash(SandboxError, RuntimeError):
    """End of the process during the call. The message has the exit code or the signal."""

    outcome = "crash"


class SandboxMemory(SandboxError, MemoryError):
    """Use of more memory than the process's limit, or than the machine has."""

    outcome = "memory"


class SandboxRaised(SandboxError, RuntimeError):
    """Exception raised by the user code. The message begins with the exception and ends with its traceback."""

    outcome = "raised"


class SandboxInvalid(SandboxError, ValueError):
    """Return value of the wrong kind from the user code."""

    outcome = "invalid"


ErrorKinds = Mapping[str, type[SandboxError]]
"""the class that is raised for each outcome"""


def error_kinds(*classes: type[SandboxError]) -> ErrorKinds:
    """Return a table of error classes by their outcomes."""
    return {one.outcome: one for one in classes}


SANDBOX_ERRORS = error_kinds(SandboxTimeout, SandboxCrash, SandboxMemory, SandboxRaised, SandboxInvalid)


CHUNK_SECONDS = 0.005
"""calls are sent in chunks of about this much work; a function whose speed is unknown goes alone"""
MAX_CHUNK = 64
MAX_TIMEOUTS = 64
"""calls of a function in a row that may time out. Then calls fail at once, but for a try now and then."""
NUM_FORKS = 1000
"""calls of a function that run in forks after one has run code made at run time"""


@dataclass(eq=False)
class Code:
    """A pickled function. Equal functions have equal keys."""

    key: bytes
    blob: bytes
    what: str = "the function"
    """name of the function in error messages"""
    errors: ErrorKinds = field(default_factory=lambda: SANDBOX_ERRORS)
    max_answer: int = MAX_ANSWER
    """raw bytes that an answer may have"""
    seconds: float = float("inf")
    """running mean of the duration of a call; unknown at first"""
    is_alone: bool = False
    """set if the function's calls change state that they share with other calls"""
    num_forks: int = 0
    """next calls that run in forks"""
    num_timeouts: int = 0
    """calls in a row that have timed out"""
    next_try: float = 0.0
    """time of the next attempt of a function that hangs"""

    @classmethod
    def of(cls, function: Callable[..., Any], finish: Callable[[Any], Any] = same, **options: Any) -> Code:
        """Return the code of a function.

        `function`: the user's function. It is pickled by cloudpickle.
        """
        blob = cloudpickle.dumps((function, finish))
        return cls(hashlib.blake2b(blob, digest_size=16).digest(), blob, **options)

    def took(self, seconds: float) -> None:
        """Update the mean duration with one call."""
        self.seconds = seconds if self.seconds == float("inf") else 0.8 * self.seconds + 0.2 * seconds


@dataclass(eq=False, slots=True)
class Call:
    """A call, from the queue to its future."""

    code: Code
    arguments: bytes
    """pickled keyword arguments of the function"""
    timeout: float
    """seconds from the function's own start, or from the last value of a generator"""
    memory_limit: int | None = None
    """resident bytes that the process may have"""
    on_piece: Callable[[Any], None] | None = None
    """receives the values of a generator, in the pool's thread"""
    future: Future[Any] = field(default_factory=Future)
    """the unchecked answer, or one of the function's errors"""
    number: int = 0
    """drawn when the call is sent: a process can answer only a call that it was given"""
    was_lost: bool = False
    """a process has ended before it came to this call, perhaps because of another call"""
    is_alone: bool = False
    """true if the call was done in a chunk that changed state"""
    result: Any = None
    """counts when its process is found unchanged"""
    failure: tuple[str, str] | None = None
    """outcome and description; counts as the result does"""
    printed: str = ""
    """text that it has printed"""

    def message(self) -> CallMessage:
        """Return the message that a sandbox process receives for this call."""
        code, is_stream = self.code, self.on_piece is not None
        in_fork = code.num_forks > 0 and not is_stream  # a fork answers once
        code.num_forks -= in_fork
        return self.number, code.key, self.arguments, code.max_answer, is_stream, in_fork

    def is_refused(self) -> bool:
        """Return whether the function hangs. If it does, the call fails at once."""
        code = self.code
        if code.num_timeouts < MAX_TIMEOUTS:
            return False
        if (now := time.monotonic()) >= code.next_try:
            code.next_try = now + 2 * self.timeout
            return False
        self.fail("timeout", f"{code.what} was not called: its last {code.num_timeouts} calls have all timed out")
        return True

    def settle(self) -> None:
        """Give the result or the failure to the caller."""
        self.code.num_timeouts = 0
        if self.failure is not None:
            self.fail(*self.failure)
        elif self.future.set_running_or_notify_cancel():
            self.future.set_result(self.result)

    def fail(self, outcome: str, text: str) -> None:
        """Raise the error of an outcome in the caller."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(self.code.errors[outcome](text))


def take_chunk(queue: deque[Call], most: int) -> list[Call]:
    """Return one call from the queue, or several quick calls with the same memory limit.

    `queue`: waiting calls. The returned calls are removed from it, and cancelled or refused calls too.
    """
    taken: list[Call] = []
    seconds = 0.0
    while queue and len(taken) < min(max(most, 1), MAX_CHUNK):
        call = queue[0]
        seconds += float("inf") if call.is_alone or call.code.is_alone else call.code.seconds
        if taken and (seconds > CHUNK_SECONDS or call.memory_limit != taken[0].memory_limit):
            break
        queue.popleft()
        if not call.future.cancelled() and not call.is_refused():
            taken.append(call)
    return taken


def ending(code: int) -> str:
    """Return a description of how a process ended.

    `code`: exit code. A negative code is a signal's number.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by signal {-code} ({signal.strsignal(-code)})"
