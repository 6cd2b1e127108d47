"""Virtual time for the production collector: its event loop and its callers in one thread, by a clock that never waits.

The collector's classes run as they are. Substituted are only the ends that touch the machine: the thread of
`SharedLoop` (callers turn the loop themselves while they wait), the selector of its asyncio loop (it advances the clock
in place of sleeping), and `time.monotonic` and `time.time`. So each run of the same program is the same run.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from rlite.rollout.collector import runner
from rlite.runtime.event_loop import CLOSE_TIMEOUT, LOOK_INTERVAL, SharedLoop

EPOCH = 1_800_000_000.0


class Stuck(Exception):
    """The caller waits, and nothing will ever happen."""


class Clock:
    """The time of one virtual machine, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.offset = EPOCH
        """wall time less `now`: an operator, or NTP, may change it at any time"""
        self.is_over: Callable[[], None] = lambda: None
        """called as time passes; it raises what kills the process"""

    def monotonic(self) -> float:
        """Seconds that only go forward."""
        return self.now

    def wall(self) -> float:
        """Seconds since the epoch, as the machine believes."""
        return self.now + self.offset


class _Selector:
    """Advances the clock instead of sleeping. Nothing but timers ever becomes ready."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.limit, self.next_timer, self.is_idle = clock, math.inf, math.inf, False

    def select(self, timeout: float | None) -> list[Any]:
        self.is_idle = timeout is None
        # exactly the timer's time: a rounded one may be a little before it
        if (timeout is None or timeout > 0) and (until := min(self.next_timer, self.limit)) < math.inf:
            self._clock.now = max(self._clock.now, until)
        return []

    def close(self) -> None:
        pass

    def get_map(self) -> dict[int, Any]:
        return {}


class VirtualEventLoop(asyncio.SelectorEventLoop):
    """An asyncio loop by a clock, which its owner turns."""

    def __init__(self, clock: Clock) -> None:
        self._virtual, self._own = clock, _Selector(clock)
        super().__init__(self._own)  # type: ignore[arg-type]
        self._clock_resolution = 1e-9

    def _make_self_pipe(self) -> None:
        pass

    def _close_self_pipe(self) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def time(self) -> float:
        return self._virtual.now

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """Call after at least a nanosecond: a sleep until a time would else repeat a rest that rounds to 0."""
        return super().call_later(max(delay, 1e-9), callback, *args, context=context)

    def turn(self, limit: float) -> bool:
        """Run what is due, or advance to the next timer, but not beyond a time; False if nothing was left to do."""
        scheduled: list[Any] = self._scheduled  # type: ignore[attr-defined]
        self._own.limit, self._own.next_timer = limit, min((timer.when() for timer in scheduled[:1]), default=math.inf)
        asyncio._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]
        finally:
            asyncio._set_running_loop(None)
        self._virtual.is_over()
        return not self._own.is_idle or bool(self._ready)  # type: ignore[attr-defined]


class _Condition(threading.Condition):
    """A condition whose waiter turns the loop until it is notified."""

    def __init__(self, owner: VirtualLoop) -> None:
        super().__init__()
        self._owner, self.is_notified = owner, False

    def notify_all(self) -> None:
        self.is_notified = True

    def wait(self, timeout: float | None = None) -> bool:
        self.is_notified = False
        clock, loop = self._owner.clock, self._owner.events
        deadline = math.inf if timeout is None else clock.now + timeout
        while not self.is_notified and clock.now < deadline:
            if not loop.turn(deadline) and deadline == math.inf:
                raise Stuck("nothing is left to do, and the caller waits")
        return self.is_notified


class VirtualLoop(SharedLoop):
    """A `SharedLoop` without a thread: its callers turn it.

    Args:
        clock: the time of its machine.
        *arguments: those of `SharedLoop`.
    """

    def __init__(
        self,
        clock: Clock,
        name: str,
        what: str,
        error: type[Exception],
        patience: float,
        block_limit: float | None = None,
    ) -> None:
        self.clock, self.events = clock, VirtualEventLoop(clock)
        self.changed = _Condition(self)
        self.is_closed, self.stopped_by = False, None
        self._what, self._error, self._patience = what, error, patience
        self._wake_conditions = []
        self.look_interval = LOOK_INTERVAL if block_limit is None else min(LOOK_INTERVAL, max(block_limit, 1.0))
        self.close_timeout, self._block_limit = CLOSE_TIMEOUT, block_limit
        self._asked_at, self._is_ending, self._death = None, False, None
        self._loop = self.events
        self._thread: Any = SimpleNamespace(is_alive=lambda: False, ident=0)
        self.longest_sleep = 0.0
        """longest time for which a caller slept although its condition held"""

    def wait_until(
        self, is_settled: Callable[[], bool], deadline: float | None, is_due: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait as `SharedLoop` does, and measure how late the caller is woken."""
        held_at: list[float] = []

        def is_settled_and_noted() -> bool:
            if not (holds := is_settled()):
                held_at.clear()
            elif not held_at:
                held_at.append(self.clock.now)
            return holds

        turn = self.events.turn

        def noting_turn(limit: float) -> bool:
            result = turn(limit)
            is_settled_and_noted()
            return result

        self.events.turn = noting_turn  # type: ignore[method-assign]
        try:
            return super().wait_until(is_settled_and_noted, deadline, is_due)
        finally:
            self.events.turn = turn  # type: ignore[method-assign]
            if held_at:
                self.longest_sleep = max(self.longest_sleep, self.clock.now - held_at[0])

    def sleep(self, seconds: float) -> None:
        """Let time pass in the caller, which does something else meanwhile."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.events.turn(end)
        while self.events._ready:  # type: ignore[attr-defined]  # what is due at this very moment
            self.events.turn(end)

    def close(self) -> None:
        """Cancel the tasks, as the thread does at its end."""
        self.is_closed = self._is_ending = True
        self.clock.is_over = lambda: None
        deadline = self.clock.now + self.close_timeout
        while (tasks := asyncio.all_tasks(self.events)) and self.clock.now < deadline:
            for task in tasks:
                task.cancel()
            self.events.turn(self.clock.now + self.close_timeout / 10)
        for _ in range(3):  # callbacks of tasks that have ended
            self.events.turn(self.clock.now)
        self.events.close()


@contextmanager
def virtual_time(clock: Clock) -> Iterator[Clock]:
    """Let collectors that are made inside of the block run by a clock.

    Yields:
        The clock.
    """
    kept = runner.SharedLoop, time.monotonic, time.time
    runner.SharedLoop = lambda *args: VirtualLoop(clock, *args)  # type: ignore[assignment, misc]
    time.monotonic, time.time = clock.monotonic, clock.wall
    try:
        yield clock
    finally:
        runner.SharedLoop, time.monotonic, time.time = kept  # type: ignore[misc]


def loop_of(collector: Any) -> VirtualLoop:
    """Return the loop of a collector that was made in virtual time."""
    return collector._runner.loop
