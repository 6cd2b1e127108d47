"""Deadlines for user code in this process. A task that goes on although it was cancelled is abandoned.

`asyncio.timeout` asks its victim: a bare `except:` around an `await` swallows the cancellation, and the caller waits
forever. Here the caller waits beside the task, and not for its end.

Threads for long texts, so that one long message does not freeze the episodes that share an event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakSet

from rlite.runtime.sandbox.calls import ErrorKinds
from rlite.runtime.sandbox.child import describe
from rlite.wording import counted

logger = logging.getLogger(__name__)
T = TypeVar("T")

GRACE = 1.0
"""seconds that a cancelled task has to clean up"""


class Overdue(TimeoutError):
    """User code did not end in time."""


class Abandoned(Overdue):
    """User code did not end in time, and goes on. The text says where it is."""


class UserExit(RuntimeError):
    """User code raised an exception that ends programs, such as SystemExit."""


ABANDONED: WeakSet[asyncio.Task[Any]] = WeakSet()
"""tasks that went on although they were cancelled, and run. Nobody waits for them"""


async def by_deadline(work: Awaitable[T], seconds: float | None, what: str) -> T:
    """Return the result of user code, which runs in a task of its own, or stop waiting for it at its deadline.

    Args:
        work: the user code.
        seconds: until the deadline; None sets none.
        what: name of the user code in messages.

    Raises:
        Abandoned: the code did not end in time, and ignores its cancellation.
        Overdue: the code did not end in time. What it returns later is discarded.
        UserExit: the code raised SystemExit, KeyboardInterrupt or another exception that is no Exception.
        CancelledError: this call was cancelled, or the code cancelled itself.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    waiter = loop.create_future()  # lighter than asyncio.wait
    task.add_done_callback(partial(_release, waiter))
    timer = None if seconds is None else loop.call_later(seconds, _release, waiter)
    try:
        await waiter
    except asyncio.CancelledError:
        await _end(task, what)
        raise
    finally:
        if timer is not None:
            timer.cancel()
    if not task.done():
        where = await _end(task, what)
        text = f"{what} did not end in {seconds:g} s"
        raise Abandoned(f"{text}: {where}") if where else Overdue(text)
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, Exception):
        raise UserExit(f"{what} raised {error!r}") from error
    return task.result()


async def side_by_side(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of coroutines that run at the same time. The first that fails cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def converted(work: Awaitable[T], seconds: float | None, what: str, errors: ErrorKinds) -> T:
    """Return the result of user code by its deadline, and convert its exceptions.

    Args:
        work: the user code.
        seconds: until the deadline; None sets none.
        what: name of the user code in messages.
        errors: the error class of each outcome.

    Raises:
        SandboxError: the code raised an exception, or did not end in time.
    """
    try:
        return await by_deadline(work, seconds, what)
    except Overdue as error:
        raise errors["timeout"](str(error)) from error
    except Exception as error:
        cause = error.__cause__ if isinstance(error, UserExit) and error.__cause__ is not None else error
        raise errors["raised"](f"{what} raised {describe(cause)}") from error


def _release(waiter: asyncio.Future[None], _: object = None) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def _end(task: asyncio.Future[Any], what: str) -> str:
    """Cancel a task, and abandon it if it goes on.

    Returns:
        A text that says where the code runs; "" if it has ended.
    """
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # else asyncio reports it as lost
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=GRACE)
    finally:  # this call may be cancelled, too
        where = _abandon(task, what) if isinstance(task, asyncio.Task) and not task.done() else ""
    return where


def _abandon(task: asyncio.Task[Any], what: str) -> str:
    """Abandon a task. The log says so when 1, 2, 4, 8, ... abandoned tasks run.

    Returns:
        A text that says where the code runs, in one line.
    """
    ABANDONED.add(task)
    task.add_done_callback(ABANDONED.discard)
    place = " > ".join(line.strip() for line in stack_of(task).splitlines())
    where = f"it ignores its cancellation, goes on and was abandoned, at {place}"
    if (count := len(ABANDONED)) & (count - 1) == 0:
        advice = "let asyncio.CancelledError pass (a bare `except:` does not), or run the code in a process"
        logger.warning("%s is over time: %s; %s now; %s", what, where, counted(count, "abandoned task"), advice)
    return where


def stack_of(task: asyncio.Task[Any]) -> str:
    """Return the lines at which a task waits, the innermost last. `Task.get_stack` returns only the outermost line."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while isinstance(awaited, Coroutine):
        if (frame := getattr(awaited, "cr_frame", None)) is not None:
            lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}")
        awaited = getattr(awaited, "cr_await", None)
    return "\n".join(lines)


SHORT_TEXT = 16_384
"""characters that are worked on in the event loop: that takes milliseconds, and keeps requests in their order"""
NUM_THREADS = 4
"""long texts that are worked on at the same time; further ones wait"""


async def beside_loop(num_characters: int, function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, called at once for a short text, else in a thread of a bounded pool.

    Args:
        num_characters: length of the text.
        function: synchronous and thread-safe.
        *arguments: its arguments.
    """
    if num_characters <= SHORT_TEXT:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_pool(os.getpid()), partial(function, *arguments))


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """Return the threads of a process; a forked process has none of its parent's."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="rlite-text")
