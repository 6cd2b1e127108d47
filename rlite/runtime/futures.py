"""Await futures of other threads."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def result_of(future: Future[T]) -> T:
    """Return the result of another thread's future. Cancelling the task cancels the future.

    This does what `asyncio.wrap_future` does. But futures that end at about the same time wake the event loop once
    instead of once each, which costs a system call and a change of threads.

    Args:
        future: the future. Its exception is raised here.

    Raises:
        CancelledError: the task or the future was cancelled.
    """
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[T] = loop.create_future()
    if (mailbox := _mailboxes.get(loop)) is None:
        mailbox = _mailboxes[loop] = _Mailbox()
    future.add_done_callback(lambda done: mailbox.put(waiting, done))
    try:
        return await waiting
    except asyncio.CancelledError:
        future.cancel()
        raise


class _Mailbox:
    """Ended futures of which their event loop has not been notified."""

    def __init__(self) -> None:
        self._ended: deque[tuple[asyncio.Future[Any], Future[Any]]] = deque()
        self._is_woken = False

    def put(self, waiting: asyncio.Future[Any], done: Future[Any]) -> None:
        """Hand over a future that has ended. Called in any thread."""
        self._ended.append((waiting, done))
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
                waiting.get_loop().call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # first: what is put from now on wakes the loop again
        while self._ended:
            waiting, done = self._ended.popleft()
            if waiting.done():
                continue
            if done.cancelled():
                waiting.cancel()
            elif (error := done.exception()) is not None:
                waiting.set_exception(error)
            else:
                waiting.set_result(done.result())


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = weakref.WeakKeyDictionary()
