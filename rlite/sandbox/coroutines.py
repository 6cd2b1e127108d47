"""Where async reward functions run that need no process, and how many calls run at once."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

from rlite.sandbox.loop import LoopThread

BLOCKED_AFTER = 5.0
"""seconds beyond its time-out after which a call's loop counts as blocked"""


class Expired(Exception):
    """A call's time is up."""


class LoopBlocked(Expired):
    """The loop has not even seen it."""


class RewardLoop:
    """An event loop in a thread, for the calls of one function. One that blocks holds up these alone.

    A thread cannot be killed: a loop that is blocked is left alone, and the next call begins another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None

    async def run(self, awaitable: Awaitable[Any], timeout: float) -> Any:
        """Its result. Raises: what it raises; Expired after `timeout` seconds from its start; LoopBlocked."""
        thread = self._running()
        done: Future[Any] = Future()
        thread.call(lambda: _start(thread, awaitable, timeout, done))
        try:
            async with asyncio.timeout(timeout + BLOCKED_AFTER) as limit:
                return await asyncio.wrap_future(done)
        except TimeoutError as error:
            if not limit.expired():
                raise
            with self._lock:
                if self._thread is thread:
                    self._thread = None
            raise LoopBlocked from error

    def _running(self) -> LoopThread:
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread("reward-loop", lambda death: None)
                weakref.finalize(self, self._thread.stop)
            return self._thread


def _start(thread: LoopThread, awaitable: Awaitable[Any], timeout: float, done: Future[Any]) -> None:
    async def run() -> None:
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                result = await awaitable
        except asyncio.CancelledError:
            done.cancel()
            raise
        except BaseException as error:  # belongs to the one who waits
            if done.set_running_or_notify_cancel():
                done.set_exception(Expired() if isinstance(error, TimeoutError) and limit.expired() else error)
        else:
            if done.set_running_or_notify_cancel():
                done.set_result(result)

    task = thread.start_task(run())
    done.add_done_callback(lambda future: thread.call(task.cancel) if future.cancelled() else None)


class Slots:
    """At most `limit` at once, over all event loops and threads; first come, first served."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Hold a slot."""
        turn: Future[None] = Future()
        with self._lock:
            if self._free:
                self._free -= 1
                turn.set_result(None)
            else:
                self._waiting.append(turn)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1
