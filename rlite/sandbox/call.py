"""Calls of rewards, and how they may end."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlite.errors import RliteError
from rlite.sandbox.child import INVALID, MAX_ANSWER, VALUE
from rlite.sandbox.foreign import ENDED

CHUNK_SECONDS = 0.005
"""calls go out in messages of about so much work; a function whose speed is unknown goes alone"""
MAX_CHUNK = 64


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
    max_answer: int = MAX_ANSWER
    """raw bytes that an answer may have"""
    is_alone: bool = False
    """its calls change what they share with others"""

    def took(self, seconds: float) -> None:
        known = self.seconds != float("inf")
        self.seconds = 0.8 * self.seconds + 0.2 * seconds if known else seconds


@dataclass(eq=False, slots=True)
class Call:
    """A call, from the queue to its future."""

    code: RewardCode
    arguments: bytes
    timeout: float
    memory_limit: int | None
    future: Future[Any]
    number: int = 0
    """drawn when it is sent: nobody can answer a call that he was not given"""
    was_lost: bool = False
    """a process has ended before it came to this call, which may have been another's doing"""
    is_alone: bool = False
    """it was done with others that changed what they shared"""
    answer: tuple[str, Any] | None = None
    """which counts when its process is found unchanged"""

    def settle(self) -> None:
        """Give the answer to the one who waits for it."""
        kind, value = self.answer or (INVALID, "nothing")
        what = self.code.what
        if kind == VALUE:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(value)
        elif kind == ENDED:
            self.crash(value)
        elif kind == INVALID:
            self.fail(RewardInvalid(f"{what} returned {value}; expected a finite number"))
        else:
            self.fail(RewardRaised(f"{what} raised {value}"))

    def crash(self, code: Any) -> None:
        """Say how its process has ended."""
        self.fail(RewardCrash(f"the process of {self.code.what} {ending(code)} while it computed"))

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class CallQueue:
    """Calls that wait, first come, first served; safe in any thread."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def memory_limit(self) -> int | None:
        """That of the next call."""
        with self._lock:
            return self._calls[0].memory_limit if self._calls else None

    def put(self, call: Call) -> None:
        with self._lock:
            self._calls.append(call)

    def put_back(self, calls: Sequence[Call]) -> None:
        """Put calls before all others."""
        with self._lock:
            self._calls.extendleft(reversed(calls))

    def take(self, most: int) -> list[Call]:
        """Take those to be sent together: one, or several that are quick and have the same limit."""
        taken: list[Call] = []
        seconds = 0.0
        with self._lock:
            while self._calls and len(taken) < min(max(most, 1), MAX_CHUNK):
                call = self._calls[0]
                seconds += float("inf") if call.is_alone or call.code.is_alone else call.code.seconds
                if taken and (seconds > CHUNK_SECONDS or call.memory_limit != taken[0].memory_limit):
                    break
                self._calls.popleft()
                if not call.future.cancelled():
                    taken.append(call)
        return taken


def ending(code: int) -> str:
    """How a process has ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by signal {-code} ({signal.strsignal(-code)})"
