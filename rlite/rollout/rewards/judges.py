"""Run async reward functions in this process, limit concurrent calls, and check the options of calls."""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Protocol

from rlite.errors import ConfigError
from rlite.rollout.failures import REWARD_ERRORS, RewardTimeout
from rlite.runtime.event_loop import LoopThread, converted

BLOCKED_AFTER = 5.0
"""seconds beyond its time-out after which a call's loop counts as blocked"""


class JudgeLoop:
    """An event loop in a thread, for the calls of one function. A call that blocks delays no other function's calls.

    A thread cannot be killed. A blocked loop is abandoned, and the next call starts another loop.
    """

    def __init__(self, what: str, timeout: float) -> None:
        self._what, self._timeout = what, timeout
        self._thread: LoopThread | None = None

    async def run(self, value: Awaitable[Any]) -> Any:
        """Return the result of the function's awaitable.

        If this call is cancelled, it ends when the awaitable has ended: until then it counts towards a limit.
        """
        ended: Future[None] = Future()

        async def awaited() -> Any:
            try:
                return await converted(value, self._timeout, self._what, REWARD_ERRORS)
            finally:
                ended.set_result(None)

        if (thread := self._thread) is None:
            thread = self._thread = LoopThread("judge-loop")
            weakref.finalize(self, thread.stop)
        result = thread.submit(awaited())
        try:
            async with asyncio.timeout(self._timeout + BLOCKED_AFTER) as limit:
                return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            await asyncio.wait([asyncio.wrap_future(ended)], timeout=BLOCKED_AFTER)
            raise
        except TimeoutError as error:
            if not limit.expired():
                raise
            if self._thread is thread:
                self._thread = None
            told = f"{self._what} ran for more than {self._timeout:g} s and blocks its event loop"
            raise RewardTimeout(f"{told}: with in_process=True it must await, not compute") from error


class Slots:
    """A limit on concurrent calls over all event loops and threads. Calls are served in order of arrival."""

    def __init__(self, limit: int) -> None:
        self._num_free = limit
        self._waiting: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Hold a slot inside the `with` block."""
        turn: Future[None] = Future()
        self._waiting.append(turn)
        self._advance()
        try:
            await asyncio.wrap_future(turn)
            yield
        finally:
            if not turn.cancelled():
                self._advance(num_returned=1)

    def _advance(self, num_returned: int = 0) -> None:
        with self._lock:
            self._num_free += num_returned
            while self._num_free and self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    self._num_free -= 1


class Retrying(Protocol):
    """Policy for repeated attempts: a `tenacity.AsyncRetrying`."""

    def copy(self, *, reraise: bool) -> Retrying:
        """Return a copy with its own state."""

    def __call__(self, fn: Callable[..., Awaitable[Any]], *args: Any) -> Awaitable[Any]:
        """Call a function until it succeeds or the policy gives up."""


def check_options(fn: Any, timeout: float, batch_wait: float, retries: int | Retrying, **counts: int | None) -> None:
    """Check the options of a `RewardFunction`.

    `timeout`: seconds. `batch_wait`: seconds. `**counts`: limits on calls, by name; None sets no limit.
    """
    if not callable(fn):
        raise ConfigError(f"RewardFunction({fn!r}): expected a function")
    if not timeout > 0 or batch_wait < 0:
        raise ConfigError(f"timeout={timeout}, batch_wait={batch_wait}: expected more than 0 s, and at least 0 s")
    for key, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{key}={count}: expected at least 1")
    can_retry = retries >= 0 if isinstance(retries, int) else inspect.iscoroutinefunction(type(retries).__call__)
    if not can_retry:
        raise ConfigError(f"retries={retries!r}: expected a number of at least 0, or a tenacity.AsyncRetrying")
