"""Run an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any

from rlite.errors import CallTimeout
from rlite.rollout.deadlines import ABANDONED, stack_of
from rlite.wording import counted

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 10.0
"""seconds in which cancelled tasks must end when the loop is stopped"""
LOOK_INTERVAL = 10.0
"""seconds after which a thread that waits looks whether the loop still turns"""


class LoopThread:
    """An event loop that runs until `stop`, or until an exception escapes from it.

    Other threads use `call`, `submit` and `wait`. The loop's own thread uses `start_task` and `die`.

    Args:
        name: name of the thread.
        on_end: called in the loop's thread with the exception that ended the loop, or None.
        look_interval: seconds after which `wait` checks whether the loop still responds.
        close_timeout: seconds in which cancelled tasks must end.
        block_limit: seconds of an episode. Code that blocks the loop for longer is named. `LOOK_INTERVAL` later, the
            thread that waits gets an error. None sets no limit.
    """

    def __init__(
        self,
        name: str,
        on_end: Callable[[BaseException | None], None],
        look_interval: float = LOOK_INTERVAL,
        close_timeout: float = CLOSE_TIMEOUT,
        block_limit: float | None = None,
    ) -> None:
        self._look_interval = look_interval if block_limit is None else min(look_interval, max(block_limit, 1.0))
        self._close_timeout = close_timeout
        self._block_limit = block_limit
        self._asked_at: float | None = None
        """time of the first question that the loop has not answered yet"""
        self._is_ending = False
        self._loop = asyncio.new_event_loop()
        self._on_end = on_end
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
        self._thread.join(timeout=2 * self._close_timeout)

    def wait(self, changed: threading.Condition, seconds: float | None) -> None:
        """Wait on a condition, but no longer than the look interval.

        Args:
            changed: the condition, held by the caller.
            seconds: maximum time to wait; None for no maximum of the caller.

        Raises:
            CallTimeout: see `look`.
        """
        self.look()
        if not changed.wait(self._look_interval if seconds is None else min(seconds, self._look_interval)):
            self.look()

    def result(self, future: Future[Any]) -> Any:
        """Return the result of a future of `submit`, and look after the loop meanwhile.

        Args:
            future: the future.

        Raises:
            CallTimeout: see `look`.
        """
        while not future.done():
            self.look()
            wait([future], timeout=self._look_interval)
        return future.result()

    def look(self) -> None:
        """Ask the loop for an answer. If it has not answered for a look interval, log the code that blocks it.

        Raises:
            CallTimeout: The code has blocked the loop for longer than the limit. A thread cannot be killed.
        """
        if (asked_at := self._asked_at) is None:  # read once: the loop may answer meanwhile
            self._asked_at = time.monotonic()
            self.call(self._answer)
        elif (seconds := time.monotonic() - asked_at) >= self._look_interval and self._thread.is_alive():
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
        self._on_end(self._death)
        deadline = time.monotonic() + self._close_timeout
        while (
            tasks := {task for task in asyncio.all_tasks(self._loop) if task not in ABANDONED}
        ) and time.monotonic() < deadline:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # these leave the loop, other tasks are left
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=self._close_timeout / 10))
        if tasks:
            logger.warning(
                "%s did not end in %g s, though cancelled; a workflow must let asyncio.CancelledError pass, at:\n%s",
                counted(len(tasks), "task"),
                self._close_timeout,
                "\n".join(sorted({stack_of(task) for task in tasks})),
            )
        if tasks := asyncio.all_tasks(self._loop):
            ABANDONED.difference_update(tasks)
            threading.Thread(target=_hold, args=(tasks,), name="abandoned tasks", daemon=True).start()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


def _hold(tasks: set[asyncio.Task[Any]]) -> None:
    """Keep tasks until the program ends: Python would close their coroutines, which a bare `except:` never lets end."""
    threading.Event().wait()
