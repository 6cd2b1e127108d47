"""The collector: runs workflows beside the training program and hands over whole groups.

    caller's thread                       the collector's thread, one event loop
    submit ──> lane.waiting ──admit──> running: episodes, each attempted until it succeeds or its retries are spent
    wait   <── ready        <──accept──   │
               lost, with a reason   <────┘ raised too often, returned None, not accepted, cancelled

The loop consumes waiting groups. It is unblocked by: a submission, a group that ends, a higher policy version (seen at
the next call), `resume`. Callers wait for groups that are ready, or for an error that means there will be none.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from rlite.errors import CallTimeout, ConfigError, DataError
from rlite.observability import stats_tracker
from rlite.rollout.batch import pad_trajectories
from rlite.rollout.episodes import ENGINE_FAILURES, EpisodeFailed, run_episodes
from rlite.rollout.options import CollectorOptions
from rlite.rollout.reward_pool import close_shared_pool
from rlite.rollout.seeds import mix
from rlite.rollout.staleness import RolloutCounters, capacity
from rlite.rollout.workflow import RolloutError, RolloutWorkflow
from rlite.types import AsyncInference

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 10.0
"""seconds after which a caller that waits looks whether the event loop still turns"""
CLOSE_TIMEOUT = 10.0
"""seconds in which cancelled episodes must end when the collector is closed"""
NUM_NAMED = 5
"""groups that a message lists by name"""

Item = Mapping[str, Any]
ShouldAccept = Callable[[TensorDict], bool]


@dataclass(eq=False, slots=True)
class _Group:
    """One submitted item. Life as in `staleness`; `trajectories` when accepted, `reason` when rejected."""

    id: int
    data: Item
    workflow: RolloutWorkflow
    size: int
    lane: _Lane
    should_accept: ShouldAccept | None = None
    seed: int | None = None
    started: float | None = None
    task: asyncio.Task[None] | None = None
    trajectories: list[TensorDict] | None = None
    reason: str | None = None
    error: BaseException | None = None

    @property
    def has_ended(self) -> bool:
        return self.trajectories is not None or self.reason is not None

    def __str__(self) -> str:
        state = "waiting" if self.started is None else f"running for {time.monotonic() - self.started:.1f} s"
        return f"group {self.id} ({state})"


@dataclass(eq=False)
class _Lane:
    """Groups under one rule of admission, and their counters."""

    counters: RolloutCounters = field(default_factory=RolloutCounters)
    waiting: deque[_Group] = field(default_factory=deque)
    running: dict[int, _Group] = field(default_factory=dict)
    ready: dict[int, _Group] = field(default_factory=dict)


_open_collectors: set[RolloutCollector] = set()


class RolloutCollector:
    """Runs workflows on an engine, in an event loop of its own. Made once, closed at the end.

    `rollout_batch` is synchronous: exactly these items, now. `submit` and `wait`, and `prepare_batch` over them, let
    generation run ahead of training by at most `max_head_offpolicyness` weight updates. Groups are whole or dropped.

    An episode that raises is attempted again, `request_retries` times; then its group is dropped with that reason
    (`lost` counts the reasons). When everything fails, the call in progress raises RolloutError with the reason; so it
    does at once when the engine cannot serve.
    """

    def __init__(self, engine: AsyncInference, options: CollectorOptions | None = None) -> None:
        self.engine = engine
        self.options = options or CollectorOptions()
        self.lost: Counter[str] = Counter()
        """groups that were dropped, by reason"""
        self.failed_attempts: Counter[str] = Counter()
        """episodes that raised, by the exception's name or the reward's outcome"""
        self._batch_size = self.options.consumer_batch_size
        self._now = _Lane()  # rollout_batch: nobody trains meanwhile, so nothing gets old
        self._ahead = _Lane()  # submit: bounded by the capacity formula
        if self._batch_size is not None:
            self._ahead.counters = RolloutCounters.at_version(engine.get_version(), self._batch_size)
        self._ids = itertools.count()
        self._num_failures = 0
        self._num_rejections = 0
        self._reported = (0, 0)
        self._is_paused = False
        self._is_closed = False
        self._stopped: BaseException | None = None
        self._death: BaseException | None = None
        self._source: tuple[Iterable[Any], Iterator[Any]] | None = None
        self._changed = threading.Condition()
        self._wishes: list[Callable[[], bool]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rollout-collector", daemon=True)
        self._thread.start()
        _open_collectors.add(self)

    # -- what callers use ----------------------------------------------------------------------------------------

    @property
    def counters(self) -> RolloutCounters:
        """Of the groups that were submitted to run ahead."""
        with self._changed:
            return self._ahead.counters

    def submit(
        self, data: Item, workflow: RolloutWorkflow, group_size: int = 1, should_accept: ShouldAccept | None = None
    ) -> int:
        """Let one item run when capacity allows; returns the id of its group. `wait` hands it over."""
        return self._submit(self._ahead, [data], workflow, group_size, should_accept)[0].id

    def wait(self, count: int, timeout: float | None = None) -> TensorDict:
        """The `count` oldest groups that are ready, as one padded batch, in the order of their submission.

        Raises: CallTimeout after `timeout` seconds, which names the groups that are late; RolloutError if so many will
            never be ready.
        """
        if count < 1:
            raise ConfigError(f"wait({count}): expected at least 1 group")
        lane = self._ahead

        def is_settled() -> bool:
            return len(lane.ready) >= count or not self._can_progress(lane) or self._num_expected(lane) < count

        self._sleep_until(is_settled, timeout, lambda: [*lane.running.values(), *lane.waiting])
        with self._changed:
            if len(lane.ready) < count:
                raise RolloutError(self._why_not(lane, count))
        return self._consume(count)

    def rollout_batch(
        self, data: Sequence[Item], workflow: RolloutWorkflow, group_size: int = 1, timeout: float | None = None
    ) -> TensorDict:
        """Run every item now, `group_size` times each, and return one padded batch.

        Rows come in the order of the data, the siblings of a group side by side, with `group_ids` [N]. Groups that
        were dropped are missing; `lost` counts them.

        Raises: RolloutError if no group is left, or the run was stopped; CallTimeout, which names the groups that are
            late, and then all of them are cancelled.
        """
        groups = self._submit(self._now, data, workflow, group_size, None)
        unfinished = list(groups)

        def is_settled() -> bool:
            while unfinished and unfinished[-1].has_ended:  # one look per change, not one at each group
                unfinished.pop()
            return not unfinished

        try:
            self._sleep_until(is_settled, timeout, lambda: [group for group in groups if not group.has_ended])
        except BaseException:
            self._cancel(groups)
            raise
        with self._changed:
            whole = [group for group in groups if group.trajectories is not None]
            for group in whole:
                del self._now.ready[group.id]
            self._now.counters = self._now.counters.consume(len(whole))
        if not whole:
            failed = next((group for group in groups if group.error is not None), groups[0])
            raise RolloutError(f"none of {len(groups)} groups was finished: {failed.reason}") from failed.error
        return self._batch(whole)

    def prepare_batch(
        self,
        loader: Iterable[Any],
        workflow: RolloutWorkflow,
        should_accept: ShouldAccept | None = None,
        group_size: int = 1,
        timeout: float | None = None,
    ) -> TensorDict:
        """The next consumer batch, while items from `loader` keep running ahead.

        Args:
            loader: yields items or lists of items; begun again at its end. Its place is kept from call to call.
            should_accept: called with a group's padded TensorDict; a group that it refuses is replaced.

        Raises: CallTimeout; RolloutError if generation may not run ahead any further, because the policy version has
            not moved since the last batch.
        """
        lane = self._ahead
        if self._source is None or self._source[0] is not loader:
            self._source = (loader, self._endless(loader))
        while True:
            with self._changed:
                needs_items = self._batch_size is None or len(lane.waiting) < self._batch_size
                is_ready = self._batch_size is not None and len(lane.ready) >= self._batch_size
            if is_ready:
                break
            if needs_items:
                self._submit(lane, self._next_items(), workflow, group_size, should_accept)
                continue
            size = self._batch_size or 1

            def is_settled(size: int = size) -> bool:
                return len(lane.ready) >= size or len(lane.waiting) < size or not self._can_progress(lane)

            self._sleep_until(is_settled, timeout, lambda: list(lane.running.values()))
            with self._changed:
                if len(lane.ready) < size and not self._can_progress(lane):
                    raise RolloutError(self._why_not(lane, size))
        return self._consume(self._batch_size or 1)

    def pause(self) -> None:
        """Start no more groups, and let generation rest at a token boundary."""
        with self._changed:
            self._is_paused = True
        self.engine.pause()

    def resume(self) -> None:
        """Go on after `pause()`."""
        self.engine.resume()
        with self._changed:
            self._is_paused = False
        self._poke()

    def close(self) -> None:
        """Cancel what runs and end the thread, and with the last collector the reward processes. Safe to call again."""
        with self._changed:
            is_stopping, self._is_closed = self._is_closed, True
        if not is_stopping:
            self._call_in_loop(self._loop.stop)
        self._thread.join(timeout=2 * CLOSE_TIMEOUT)
        _open_collectors.discard(self)
        if not _open_collectors:
            close_shared_pool()

    # -- in the caller's thread ----------------------------------------------------------------------------------

    def _submit(
        self,
        lane: _Lane,
        items: Sequence[Item],
        workflow: RolloutWorkflow,
        group_size: int,
        should_accept: ShouldAccept | None,
    ) -> list[_Group]:
        if not isinstance(workflow, RolloutWorkflow):
            raise ConfigError(f"workflow={workflow!r}: expected an instance of a RolloutWorkflow")
        if group_size < 1:
            raise ConfigError(f"group_size={group_size}: expected at least 1")
        if not len(items):
            raise DataError("the batch of data items is empty; expected at least one")
        for index, item in enumerate(items):
            if not isinstance(item, Mapping):
                raise DataError(f"data item {index} is {type(item).__name__}: expected a mapping")
        self._raise_if_stopped()
        groups = [
            _Group(next(self._ids), item, workflow, group_size, lane, should_accept, self._seed(lane, index))
            for index, item in enumerate(items)
        ]
        with self._changed:
            lane.waiting.extend(groups)
            lane.counters = lane.counters.submit(len(groups))
        self._poke()
        return groups

    def _seed(self, lane: _Lane, index: int) -> int | None:
        """Of an item's group: a resumed run gives the same to the same place of the same `rollout_batch`."""
        if self.options.seed is None:
            return None
        number = index if lane is self._now else lane.counters.submitted + index
        return mix(mix(self.options.seed, self.engine.get_version()), number)

    def _consume(self, count: int) -> TensorDict:
        with self._changed:
            oldest = sorted(self._ahead.ready)[:count]
            groups = [self._ahead.ready.pop(id) for id in oldest]
            self._ahead.counters = self._ahead.counters.consume(count)
        return self._batch(groups)

    def _batch(self, groups: Sequence[_Group]) -> TensorDict:
        trajectories = [trajectory for group in groups for trajectory in group.trajectories or ()]
        ids = [group.id for group in groups for _ in group.trajectories or ()]
        batch = pad_trajectories(trajectories, ids)
        with stats_tracker.scope("rollout"):
            losses = self.lost.total(), self.failed_attempts.total()
            num_lost, num_failed = (now - then for now, then in zip(losses, self._reported, strict=True))
            self._reported = losses
            stats_tracker.scalar(num_groups=len(groups), num_lost=num_lost, num_failed_attempts=num_failed)
            if "versions" in batch:
                # a sequence is as old as its oldest token
                made = batch["versions"].masked_fill(batch["versions"] < 0, torch.iinfo(torch.int64).max).amin(1)
                made = made.clamp(max=self.engine.get_version())
                stats_tracker.scalar(staleness=(self.engine.get_version() - made).double().mean())
        return batch

    def _next_items(self) -> Sequence[Item]:
        assert self._source is not None
        items = next(self._source[1])
        if isinstance(items, Mapping):
            if self._batch_size is None:
                raise ConfigError(
                    "the loader yields single items: set consumer_batch_size, or let it yield lists of items"
                )
            items = [items]
        elif self._batch_size is None:
            with self._changed:
                self._batch_size = len(items)
                started = self._ahead.counters
                if not started.submitted:
                    self._ahead.counters = RolloutCounters.at_version(self.engine.get_version(), len(items))
        return items

    def _endless(self, loader: Iterable[Any]) -> Iterator[Any]:
        while True:
            is_empty = True
            for items in loader:
                is_empty = False
                yield items
            if is_empty:
                raise DataError("the loader has nothing (more) to yield; give one that can be iterated again")

    def _sleep_until(
        self, is_settled: Callable[[], bool], timeout: float | None, late: Callable[[], list[_Group]]
    ) -> None:
        """Wait for `is_settled()`, which the loop evaluates at every change, or for the end of the run."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._poke()

        def is_over() -> bool:
            return self._stopped is not None or self._is_closed or is_settled()

        with self._changed:
            self._wishes.append(is_over)
            try:
                while not is_over():
                    patience = LOOK_INTERVAL if deadline is None else min(deadline - time.monotonic(), LOOK_INTERVAL)
                    if patience <= 0:
                        self._raise_late(timeout, late())
                    answered = threading.Event()
                    self._call_in_loop(answered.set)
                    if not self._changed.wait(patience) and patience == LOOK_INTERVAL and not answered.is_set():
                        self._warn_of_blocked_loop()
            finally:
                self._wishes.remove(is_over)
        self._raise_if_stopped()

    def _raise_late(self, timeout: float | None, late: list[_Group]) -> None:
        names = ", ".join(map(str, late[:NUM_NAMED])) + (", ..." if len(late) > NUM_NAMED else "")
        raise CallTimeout(
            f"{len(late)} groups had not ended after {timeout:g} s: {names}",
            tuple(f"group {group.id}" for group in late),
        )

    def _raise_if_stopped(self) -> None:
        with self._changed:
            if self._death is not None:
                raise RolloutError(f"the collector's event loop died: {self._death!r}") from self._death
            if self._is_closed:
                raise RolloutError("the collector is closed")
            stopped, self._stopped = self._stopped, None
        if stopped is not None:
            raise stopped

    def _warn_of_blocked_loop(self) -> None:
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)[-4:]) if frame is not None else ""
        logger.warning(
            "a workflow has blocked the rollouts' event loop for more than %g s; it should await, not compute, at:\n%s",
            LOOK_INTERVAL,
            stack,
        )

    def _num_expected(self, lane: _Lane) -> int:
        return len(lane.ready) + len(lane.running) + len(lane.waiting)

    def _can_progress(self, lane: _Lane) -> bool:
        return bool(lane.running) or self._is_paused or (bool(lane.waiting) and self._capacity() > 0)

    def _why_not(self, lane: _Lane, count: int) -> str:
        found = f"{count} groups were asked for, {len(lane.ready)} are ready"
        if self._num_expected(lane) < count:
            lost = f"; dropped so far: {dict(self.lost)}" if self.lost else ""
            return f"{found} and {self._num_expected(lane) - len(lane.ready)} under way{lost}; submit more"
        return (
            f"{found} and no more may start: at policy version {self.engine.get_version()} with "
            f"max_head_offpolicyness={self.options.max_head_offpolicyness} and batches of {self._batch_size}, "
            f"{lane.counters.accepted} groups are as many as may have been generated. Sync weights after each batch "
            "(the version counts the updates), or raise max_head_offpolicyness"
        )

    def _cancel(self, groups: Sequence[_Group]) -> None:
        def cancel() -> None:
            with self._changed:
                for group in groups:
                    lane = group.lane
                    if group.task is not None:
                        group.task.cancel()
                    elif lane.ready.pop(group.id, None) is not None:
                        lane.counters = lane.counters.consume(1)
                        self.lost["cancelled"] += 1
                    elif not group.has_ended:
                        lane.waiting.remove(group)
                        self._withdraw(group, "cancelled")

        self._call_in_loop(cancel)

    def _poke(self) -> None:
        self._call_in_loop(self._admit)

    def _call_in_loop(self, function: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed; callers see that for themselves
            self._loop.call_soon_threadsafe(function)

    # -- in the loop's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        death: BaseException | None = None
        try:
            self._loop.run_forever()
        except BaseException as error:  # belongs to the callers, who would wait for ever
            death = error
        with self._changed:
            self._death = self._death or death
            self._is_closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + CLOSE_TIMEOUT
        while (tasks := asyncio.all_tasks(self._loop)) and time.monotonic() < deadline:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # these leave the loop, other tasks are left
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=1))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _capacity(self) -> int:
        """Groups of the lane `ahead` that may start now."""
        size = self._batch_size
        if size is None:  # nobody has said how much an update consumes: only the number at a time is bounded
            limit = self.options.max_concurrent_rollouts
            return sys.maxsize if limit is None else limit - self._ahead.counters.running
        return capacity(
            self._ahead.counters,
            version=self.engine.get_version(),
            max_concurrent=self.options.max_concurrent_rollouts or size,
            consumer_batch_size=size,
            max_head_offpolicyness=self.options.max_head_offpolicyness,
        )

    def _admit(self) -> None:
        with self._changed:
            limit = self.options.max_concurrent_rollouts or sys.maxsize
            if not self._is_paused and not self._is_closed:
                while self._now.waiting and self._now.counters.running < limit:
                    self._start(self._now)
                while self._ahead.waiting and self._capacity() > 0:
                    self._start(self._ahead)
            if any(is_over() for is_over in self._wishes):
                self._changed.notify_all()

    def _start(self, lane: _Lane) -> None:
        group = lane.waiting.popleft()
        lane.counters = lane.counters.start()
        lane.running[group.id] = group
        group.started = time.monotonic()
        group.task = self._loop.create_task(self._run_group(group))
        group.task.add_done_callback(partial(self._check_task, group))

    def _check_task(self, group: _Group, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # before its first step, so that it could not see it
            self._end(group, "cancelled")
        elif isinstance(error := task.exception(), Exception):  # not a workflow's: _run_group catches those
            with self._changed:
                self._death = error
            self._loop.stop()

    async def _run_group(self, group: _Group) -> None:
        try:
            trajectories = await run_episodes(
                group.workflow,
                self.engine,
                group.data,
                group.size,
                timeout=self.options.request_timeout,
                retries=self.options.request_retries,
                failed_attempts=self.failed_attempts,
                seed=group.seed,
            )
            reason = None
            if any(trajectory is None for trajectory in trajectories):
                reason = "the workflow returned None"
            elif group.should_accept is not None and not group.should_accept(_padded(trajectories)):
                reason = "not accepted by should_accept"
        except asyncio.CancelledError:
            self._end(group, "cancelled")
        except ENGINE_FAILURES as error:
            self._end(group, _describe(error), error)
            self._stop(error)
        except EpisodeFailed as failed:
            reason = _describe(failed.error)
            self._num_failures += 1
            self._end(group, reason, failed.error)
            if self._num_failures >= self.options.max_consecutive_failures:
                why = f"{self._num_failures} groups in a row failed, the last with {reason}"
                self._stop(_stopping(why, failed.error))
        except Exception as error:  # only should_accept is left: it is the caller's own, and would fail again
            self._end(group, _describe(error), error)
            self._stop(_stopping(f"should_accept raised {_describe(error)}", error))
        else:
            if reason is None:
                self._num_failures = self._num_rejections = 0
                group.trajectories = [trajectory for trajectory in trajectories if trajectory is not None]
            else:
                self._num_rejections += 1
            self._end(group, reason)
            if self._num_rejections >= self.options.max_consecutive_rejections:
                self._stop(_stopping(f"{self._num_rejections} groups in a row were dropped: {reason}"))

    def _end(self, group: _Group, reason: str | None, error: BaseException | None = None) -> None:
        """The running group is accepted, or rejected with a reason."""
        lane = group.lane
        with self._changed:
            group.task, group.error, group.reason = None, error, reason
            del lane.running[group.id]
            if reason is None:
                lane.ready[group.id] = group
                lane.counters = lane.counters.accept()
            else:
                self.lost[reason] += 1
                lane.counters = lane.counters.reject()
        self._admit()

    def _withdraw(self, group: _Group, reason: str) -> None:
        """A group that has not started is dropped."""
        with self._changed:
            group.reason = reason
            self.lost[reason] += 1
            group.lane.counters = group.lane.counters.withdraw()

    def _stop(self, error: BaseException) -> None:
        """Drop everything that runs or waits, and tell whoever calls next why."""
        with self._changed:
            self._stopped = error
            self._num_failures = self._num_rejections = 0
            for lane in (self._now, self._ahead):
                while lane.waiting:
                    self._withdraw(lane.waiting.popleft(), "the run was stopped")
                for group in lane.running.values():
                    if group.task is not None:
                        group.task.cancel()
            self._changed.notify_all()


def _padded(trajectories: Sequence[Any]) -> TensorDict:
    try:
        return pad_trajectories(trajectories)
    except DataError as error:
        raise EpisodeFailed(error) from error


def _stopping(why: str, cause: BaseException | None = None) -> RolloutError:
    error = RolloutError(f"the rollouts were stopped: {why}")
    error.__cause__ = cause
    return error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
