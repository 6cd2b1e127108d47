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
from concurrent.futures import Future
from typing import Any

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
    """

    def __init__(
        self,
        name: str,
        on_end: Callable[[BaseException | None], None],
        look_interval: float = LOOK_INTERVAL,
        close_timeout: float = CLOSE_TIMEOUT,
    ) -> None:
        self._look_interval = look_interval
        self._close_timeout = close_timeout
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
        self._death = error
        self._loop.stop()

    def stop(self) -> None:
        """End the loop and cancel its tasks."""
        self.call(self._loop.stop)

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout=2 * self._close_timeout)

    def wait(self, changed: threading.Condition, seconds: float | None) -> None:
        """Wait on a condition, but no longer than the look interval.

        If the loop does not respond during a whole interval, the log shows the code that blocks it.

        Args:
            changed: the condition, held by the caller.
            seconds: maximum time to wait; None for no maximum of the caller.
        """
        answered = threading.Event()
        self.call(answered.set)
        patience = self._look_interval if seconds is None else min(seconds, self._look_interval)
        if not changed.wait(patience) and patience == self._look_interval and not answered.is_set():
            frame = sys._current_frames().get(self._thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)[-4:]) if frame is not None else ""
            logger.warning(
                "a workflow has blocked the rollouts' event loop for more than %g s; it should await, not compute, "
                "at:\n%s",
                patience,
                stack,
            )

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException as error:  # belongs to the owner, which would wait forever
            self._death = self._death or error
        self._on_end(self._death)
        deadline = time.monotonic() + self._close_timeout
        while (tasks := asyncio.all_tasks(self._loop)) and time.monotonic() < deadline:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # these leave the loop, other tasks are left
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=self._close_timeout / 10))
        if tasks:
            logger.warning(
                "%s did not end in %g s, though cancelled; a workflow must let asyncio.CancelledError pass, at:\n%s",
                counted(len(tasks), "task"),
                self._close_timeout,
                "\n".join(sorted({_stack(task) for task in tasks})),
            )
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


def _stack(task: asyncio.Task[Any]) -> str:
    """Return the lines at which a task waits, the innermost last. `Task.get_stack` returns only the outermost line."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while isinstance(awaited, Coroutine):
        if (frame := getattr(awaited, "cr_frame", None)) is not None:
            lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}")
        awaited = getattr(awaited, "cr_await", None)
    return "\n".join(lines)
