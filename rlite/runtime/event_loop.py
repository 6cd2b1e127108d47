"""Event loops in threads of their own, and deadlines for user code that runs in them.

`asyncio.timeout` asks its victim: a bare `except:` around an `await` swallows the cancellation, and the caller waits
forever. Here the caller waits beside the task, and not for its end. A task that goes on although it was cancelled is
abandoned.

The module also holds the futures that threads hand to loops, and threads for long texts, so that one long message does
not freeze the episodes that share an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakSet

from rlite.errors import CallTimeout
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

    `seconds`: until the deadline; None sets none.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    waiter = loop.create_future()  # lighter than asyncio.wait
    release, context = partial(_release, waiter), copy_context()  # one for both: thousands of calls wait at a time
    task.add_done_callback(release, context=context)
    timer = None if seconds is None else loop.call_later(seconds, release, context=context)
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

    `seconds`: until the deadline; None sets none.
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

    Returns a text that says where the code runs; "" if it has ended.
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

    Returns a text that says where the code runs, in one line.
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


CLOSE_TIMEOUT = 10.0
"""seconds in which cancelled tasks must end when the loop is stopped"""
LOOK_INTERVAL = 10.0
"""seconds after which a thread that waits looks whether the loop still turns"""


class LoopThread:
    """An event loop that runs until `stop`, or until an exception escapes from it.

    Other threads use `call`, `submit` and `wait`. The loop's own thread uses `start_task` and `die`.

    `name`: name of the thread. `block_limit`: seconds of an episode. Code that blocks the loop for longer is named.
    `LOOK_INTERVAL` later, the thread that waits gets an error. None sets no limit.
    """

    def __init__(self, name: str, block_limit: float | None = None) -> None:
        self.look_interval = LOOK_INTERVAL if block_limit is None else min(LOOK_INTERVAL, max(block_limit, 1.0))
        """seconds after which a thread that waits looks whether the loop still responds"""
        self.close_timeout = CLOSE_TIMEOUT
        """seconds in which cancelled tasks must end"""
        self._block_limit = block_limit
        self._asked_at: float | None = None
        """time of the first question that the loop has not answered yet"""
        self._is_ending = False
        self._loop = asyncio.new_event_loop()
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> None:
        """Schedule a function in the loop. If the loop has ended, the function is never called."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Return the future of a coroutine that runs in the loop. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Return the task of a coroutine that runs in the loop."""
        return self._loop.create_task(coroutine)

    def die(self, error: BaseException) -> None:
        """End the loop with this error."""
        self._death, self._is_ending = error, True
        self._loop.stop()

    def stop(self) -> None:
        """End the loop and cancel its tasks."""
        self._is_ending = True
        self.call(self._loop.stop)

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout=2 * self.close_timeout)

    def result(self, future: Future[Any]) -> Any:
        """Return the result of a future of `submit`, and look after the loop meanwhile."""
        while not future.done():
            self.look()
            wait([future], timeout=self.look_interval)
        return future.result()

    def look(self) -> None:
        """Ask the loop for an answer. If it has not answered for a look interval, log the code that blocks it."""
        if (asked_at := self._asked_at) is None:  # read once: the loop may answer meanwhile
            self._asked_at = time.monotonic()
            self.call(self._answer)
        elif (seconds := time.monotonic() - asked_at) >= self.look_interval and self._thread.is_alive():
            frame = sys._current_frames().get(self._thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)[-4:]) if frame is not None else ""
            blocked = (
                f"a workflow has blocked the rollouts' event loop for more than {seconds:.3g} s; it should await, not "
                f"compute or sleep (asyncio.to_thread, or a process that can be killed), at:\n{stack}"
            )
            if self._block_limit is not None and seconds > self._block_limit + LOOK_INTERVAL:
                raise CallTimeout(f"{blocked}\nthe limit for an episode is {self._block_limit:g} s")
            logger.warning("%s", blocked)

    def _answer(self) -> None:
        self._asked_at = None

    def _ended(self) -> None:
        """Note in the loop's thread that the loop has ended."""

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while True:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # of one task of user code, which has the exception
                logger.debug("user code raised %r in the event loop, which goes on", error)
                if not self._is_ending:
                    continue
            except BaseException as error:  # belongs to the owner, which would wait forever
                self._death = self._death or error
            break
        self._ended()
        deadline = time.monotonic() + self.close_timeout
        while (
            tasks := {task for task in asyncio.all_tasks(self._loop) if task not in ABANDONED}
        ) and time.monotonic() < deadline:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # these leave the loop, other tasks are left
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=self.close_timeout / 10))
        if tasks:
            stacks = "\n".join(sorted({stack_of(task) for task in tasks}))
            logger.warning(
                "%s did not end in %g s, though cancelled; a workflow must let asyncio.CancelledError pass, at:\n%s",
                *(counted(len(tasks), "task"), self.close_timeout, stacks),
            )
        if tasks := asyncio.all_tasks(self._loop):
            ABANDONED.difference_update(tasks)
            # never destroyed: Python would close their coroutines, which a bare `except:` never lets end
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(tasks))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class SharedLoop(LoopThread):
    """An event loop whose state callers in other threads share: a lock, conditions to wait for, an error that stops.

    `name`: name of the thread. `patience`: seconds between two looks of a caller at what becomes true by the clock
    alone.
    """

    def __init__(
        self, name: str, what: str, error: type[Exception], patience: float, block_limit: float | None = None
    ) -> None:
        self.changed = threading.Condition()
        """guards the state; notified when the condition of a caller has become true"""
        self.is_closed = False
        self.stopped_by: BaseException | None = None
        """error that the next caller gets"""
        self._what, self._error, self._patience = what, error, patience
        self._wake_conditions: list[Callable[[], bool]] = []
        super().__init__(name, block_limit)

    def wait_until(
        self, is_settled: Callable[[], bool], deadline: float | None, is_due: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until a condition holds.

        `deadline`: by `time.monotonic()`; None sets no limit. `is_due`: becomes true by the clock alone, and ends the
        wait too. Evaluated in the caller's thread. Returns False if the deadline has passed before.
        """

        def is_over() -> bool:
            return self.stopped_by is not None or self.is_closed or is_settled()

        with self.changed:
            self._wake_conditions.append(is_over)
            try:
                while not (is_over() or is_due()):
                    patience = self._patience
                    if deadline is not None and (patience := min(patience, deadline - time.monotonic())) <= 0:
                        return False
                    self.look()
                    if not self.changed.wait(min(patience, self.look_interval)):
                        self.look()
            finally:
                self._wake_conditions.remove(is_over)
        self.raise_if_stopped()
        return True

    def wake(self) -> None:
        """Wake the callers if the condition of one holds. Needs the lock."""
        if any(is_over() for is_over in self._wake_conditions):
            self.changed.notify_all()

    def stop_callers(self, error: BaseException) -> None:
        """Wake the callers; one of them gets this error. Needs the lock."""
        self.stopped_by = error
        self.changed.notify_all()

    def raise_if_stopped(self) -> None:
        """Raise the error that stopped the callers, once, or an error if the loop has ended."""
        with self.changed:
            if self._death is not None:
                raise self._error(f"{self._what}'s event loop died: {self._death!r}") from self._death
            if self.is_closed:
                raise self._error(f"{self._what} is closed")
            stopped, self.stopped_by = self.stopped_by, None
        if stopped is not None:
            raise stopped

    def close(self) -> None:
        """Cancel the tasks and end the thread. Idempotent."""
        with self.changed:
            is_stopping, self.is_closed = self.is_closed, True
        if not is_stopping:
            self.stop()
        self.join()

    def _ended(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


def deadline_after(seconds: float | None) -> float | None:
    """Return the time by `time.monotonic()` after so many seconds from now; None for no limit."""
    return None if seconds is None else time.monotonic() + seconds


SHORT_TEXT = 16_384
"""characters that are worked on in the event loop: that takes milliseconds, and keeps requests in their order"""
NUM_THREADS = 4
"""long texts that are worked on at the same time; further ones wait"""


async def beside_loop(num_characters: int, function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, called at once for a short text, else in a thread of a bounded pool."""
    if num_characters <= SHORT_TEXT:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_pool(os.getpid()), partial(function, *arguments))


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """Return the threads of a process; a forked process has none of its parent's."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="rlite-text")


async def result_of(future: Future[T]) -> T:
    """Return the result of another thread's future. Cancelling the task cancels the future.

    This does what `asyncio.wrap_future` does. But futures that end at about the same time wake the event loop once
    instead of once each, which costs a system call and a change of threads.

    `future`: the future. Its exception is raised here.
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
