"""The collector: runs workflows beside the training program and hands over whole groups.

    caller's thread                       the collector's thread, one event loop
    submit ──> waiting ──start───────> running: episodes, each attempted until it succeeds or its retries are spent
    wait   <── ready   <──accept──────    │
               lost, with a reason   <────┘ raised too often, returned None, not accepted, too old, cancelled, ...

The ledger (`rlite.rollout.collector.ledger`) decides; the collector acts. The loop consumes waiting groups. It
is unblocked by: a submission, a group that ends, a higher policy version (`version_changed`, or the next call),
`resume`. Callers wait for a batch that is ready, or for an error that means there will be none.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tensordict import TensorDict

from rlite.errors import CheckpointError, ConfigError
from rlite.observability import trace
from rlite.rollout.collector.collected import Collected, Losses, joined, late_error, stopping_error, too_few_error
from rlite.rollout.collector.episodes import ENGINE_FAILURES, EpisodeFailed, run_episodes
from rlite.rollout.collector.failures import FailureRuns
from rlite.rollout.collector.group import Group, Item, Lane, ShouldAccept, check_siblings, misfits
from rlite.rollout.collector.items import check_items, endless
from rlite.rollout.collector.ledger import RolloutCounters, RolloutLedger
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.reasons import CANCELLED, NOT_ACCEPTED, STOPPED, TOO_OLD, reason_of
from rlite.rollout.collector.seeds import mix
from rlite.rollout.trajectories import pad_trajectories
from rlite.rollout.workflow import RolloutError, RolloutWorkflow
from rlite.sandbox.loop import LoopThread
from rlite.sandbox.pool import close_shared_pool
from rlite.types import AsyncInference

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
        self.failed_attempts: Counter[str] = Counter()
        """episodes that raised, by the exception's name or the reward's outcome"""
        limit = self.options.max_concurrent_rollouts
        # rollout_batch and evaluate: nobody trains meanwhile, so nothing gets old
        self._now = Lane(RolloutLedger(max_concurrent=limit))
        self._tests = Lane(RolloutLedger(max_concurrent=limit))
        self._ahead = Lane(
            RolloutLedger(
                max_concurrent=limit,
                max_head_offpolicyness=self.options.max_head_offpolicyness,
                on_stale=self.options.on_stale,
                batch_size=self.options.consumer_batch_size,
                version=engine.get_version(),
            )
        )
        self._lanes = (self._now, self._tests, self._ahead)
        self._ids = itertools.count()
        self._places = itertools.count()
        self._failures = FailureRuns()
        self._num_rejections = 0
        self._losses = Losses()
        self._is_paused = False
        self._is_closed = False
        self._stopped: BaseException | None = None
        self._death: BaseException | None = None
        self._source: tuple[Iterable[Any], Iterator[Any]] | None = None
        self._changed = threading.Condition()
        self._wishes: list[Callable[[], bool]] = []
        self._loop = LoopThread("rollout-collector", self._ended)
        _open_collectors.add(self)

    # -- what callers use ----------------------------------------------------------------------------------------

    @property
    def counters(self) -> RolloutCounters:
        """Of the groups that were submitted to run ahead."""
        with self._changed:
            return self._ahead.ledger.counters

    @property
    def lost(self) -> Counter[str]:
        """Groups to train on that were dropped, by reason; after a hundred reasons the others are one."""
        with self._changed:
            return self._now.ledger.lost + self._ahead.ledger.lost

    @property
    def first_losses(self) -> Mapping[str, str]:
        """For each REASON of the metrics `rollout/lost/REASON`, what was said of the first group."""
        with self._changed:
            return dict(self._losses.first)

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
        self._begin(count)

        def is_hopeless() -> bool:
            return not self._can_progress(lane) or len(lane.groups) < count

        while (batch := self._take(count)) is None:
            self._sleep_until(lambda: self._is_ready(count) or is_hopeless(), timeout, lane.unfinished, count)
            with self._changed:
                if len(lane.groups) < count or not (self._can_progress(lane) or self._is_ready(count)):
                    raise self._too_few(lane, count)
        return batch

    def rollout_batch(
        self,
        data: Sequence[Item],
        workflow: RolloutWorkflow,
        group_size: int = 1,
        timeout: float | None = None,
        first_place: int = 0,
    ) -> TensorDict:
        """Run every item now, `group_size` times each, and return one padded batch.

        Rows come in the order of the data, the siblings of a group side by side, with `group_ids` [N]. Groups that
        were dropped are missing; `lost` counts them. With a seed an item's place decides its random numbers: a batch
        that continues another one, under the same policy version, begins at the `first_place` after it.

        Raises: RolloutError if no group is left, or the run was stopped; CallTimeout, which names the groups that are
            late, and then all of them are cancelled.
        """
        found = self.collect(data, workflow, group_size, timeout, first_place)
        if found.batch is None:
            raise RolloutError(f"none of {found.num_groups} groups was finished: {found.reason}") from found.error
        return found.batch

    def collect(
        self,
        data: Sequence[Item],
        workflow: RolloutWorkflow,
        group_size: int = 1,
        timeout: float | None = None,
        first_place: int = 0,
    ) -> Collected:
        """Do as `rollout_batch` does, and return which groups were lost beside the batch, if any is left.

        Raises: RolloutError if the run was stopped; CallTimeout.
        """
        groups = self._submit(self._now, data, workflow, group_size, None, first_place)
        whole = self._finish(self._now, groups, timeout)
        return Collected.of(groups, self._batch(whole) if whole else None)

    def evaluate(
        self, data: Sequence[Item], workflow: RolloutWorkflow, group_size: int = 1, timeout: float | None = None
    ) -> Collected:
        """Run every item now, `group_size` times each, to measure and not to train.

        Every episode counts alone: one that fails costs no sibling, is counted in what is returned and nowhere else,
        and however many fail, they do not stop the run. `group_ids` are the items' numbers.

        Raises: WorkerError, ResidencyError or DivergedError if the engine cannot serve; RolloutError if the groups to
            train on that run meanwhile stop the run; CallTimeout.
        """
        check_items(data, workflow, group_size)
        groups = self._submit(self._tests, [item for item in data for _ in range(group_size)], workflow, 1, None)
        whole = self._finish(self._tests, groups, timeout)
        items = {group.id: number // group_size for number, group in enumerate(groups)}
        return Collected.of(groups, joined(whole, items) if whole else None)

    def _finish(self, lane: Lane, groups: Sequence[Group], timeout: float | None) -> list[Group]:
        """Wait until these have ended; returns those that were not lost."""
        unfinished = list(groups)

        def is_settled() -> bool:
            while unfinished and unfinished[-1].has_ended:  # one look per change, not one at each group
                unfinished.pop()
            return not unfinished

        try:
            self._sleep_until(is_settled, timeout, lambda: [group for group in groups if not group.has_ended])
        except BaseException:
            self._cancel(lane, groups)
            raise
        with self._changed:
            self._drop_misfits(lane, [group for group in groups if group.trajectories is not None])
            whole = [group for group in groups if group.trajectories is not None]
            self._consume(lane, whole)
        return whole

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
            loader: yields items or lists of items; begun again at its end. Its place is kept from call to call,
                until a call gives another loader: that one is begun at its beginning. What should alternate is one
                loader that draws from several; two given in turn begin anew each time, and one gets the other's groups.
            should_accept: called with a group's padded TensorDict, in the collector's thread, which it holds up; a
                group that it refuses is replaced.

        Raises: CallTimeout; RolloutError if generation may not run ahead any further, because the policy version has
            not moved since the last batch.
        """
        lane = self._ahead
        if self._source is None or self._source[0] is not loader:
            self._source = (loader, endless(loader))
        while True:
            while (size := lane.ledger.batch_size) is None or lane.ledger.counters.waiting < size:
                self._submit(lane, self._next_items(), workflow, group_size, should_accept)
            if (batch := self._take(size)) is not None:
                return batch

            def is_settled(size: int = size) -> bool:
                return self._is_ready(size) or lane.ledger.counters.waiting < size or not self._can_progress(lane)

            self._sleep_until(is_settled, timeout, lane.unfinished, size)
            with self._changed:
                is_full = lane.ledger.counters.waiting >= size  # else the next round submits more
                if is_full and not (self._can_progress(lane) or self._is_ready(size)):
                    raise self._too_few(lane, size)

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
        self.version_changed()

    def version_changed(self) -> None:
        """Look at the engine's policy version now, and start and drop what it asks for."""
        self._loop.call(self._admit)

    def state_dict(self) -> dict[str, Any]:
        """The groups that run ahead, finished or not, and all counts: plain values and tensors.

        Raises: DataError for an item that holds something else.
        """
        with self._changed:
            lane = self._ahead
            return {
                "batch_size": lane.ledger.batch_size,
                "ledger": lane.ledger.state_dict(),
                "failed_attempts": dict(self.failed_attempts),
                "groups": [group.state_dict() for _, group in sorted(lane.groups.items())],
                "num_ids": self._num_ids(),
            }

    def load_state_dict(
        self, state: Mapping[str, Any], workflow: RolloutWorkflow, should_accept: ShouldAccept | None = None
    ) -> None:
        """Go on from there: finished groups are ready again, those that ran or waited run (again) by `workflow`.

        Raises: CheckpointError if this collector has already begun, or has another batch size.
        """
        size = self.options.consumer_batch_size
        if size is not None and state["batch_size"] not in (None, size):
            raise CheckpointError(
                f"the rollouts under way were made for batches of {state['batch_size']} groups, this run has "
                f"consumer_batch_size={size}: resume with the former"
            )
        with self._changed:
            lane = self._ahead
            if lane.groups:
                raise CheckpointError("load_state_dict: this collector has groups under way; use one that is new")
            lane.ledger.batch_size = state["batch_size"]
            lane.ledger.load_state_dict(state["ledger"])
            self.failed_attempts = Counter(state["failed_attempts"])
            self._losses = Losses(self.failed_attempts.total())
            self._ids = itertools.count(state["num_ids"])
            for kept in state["groups"]:
                group = lane.groups[kept["id"]] = Group.from_state(kept, workflow, should_accept)
                if group.trajectories is None:
                    lane.ledger.submit(group.id)
                else:
                    age = group.age
                    lane.ledger.restore_ready(group.id, self.engine.get_version() if age is None else age)
        self.version_changed()

    def close(self) -> None:
        """Cancel what runs and end the thread, and with the last collector the reward processes. Safe to call again."""
        with self._changed:
            is_stopping, self._is_closed = self._is_closed, True
        if not is_stopping:
            self._loop.stop()
        self._loop.join()
        _open_collectors.discard(self)
        if not _open_collectors:
            close_shared_pool()

    # -- in the caller's thread ----------------------------------------------------------------------------------

    def _submit(
        self,
        lane: Lane,
        items: Sequence[Item],
        workflow: RolloutWorkflow,
        group_size: int,
        should_accept: ShouldAccept | None,
        first_place: int = 0,
    ) -> list[Group]:
        check_items(items, workflow, group_size)
        self._raise_if_stopped()
        groups = [
            Group(next(self._ids), item, workflow, group_size, should_accept, self._seed(lane, place))
            for place, item in enumerate(items, first_place)
        ]
        with self._changed:
            for group in groups:
                lane.groups[group.id] = group
                lane.ledger.submit(group.id)
                trace.stage("group", group.id, "waiting")
        self._loop.call(self._admit)
        return groups

    def _seed(self, lane: Lane, place: int) -> int | None:
        """Of an item's group: a resumed run gives the same to the same place of the same `rollout_batch`."""
        if self.options.seed is None:
            return None
        number = lane.ledger.counters.submitted + place if lane is self._ahead else place
        return mix(mix(self.options.seed, self.engine.get_version()), number)

    def _num_ids(self) -> int:
        number = next(self._ids)
        self._ids = itertools.count(number)
        return number

    def _begin(self, batch_size: int) -> None:
        """Learn how many groups one update consumes, from the first who asks for some."""
        with self._changed:
            if self._ahead.ledger.batch_size is None:
                self._ahead.ledger.begin(batch_size, self.engine.get_version())

    def _is_ready(self, count: int) -> bool:
        return self._ahead.ledger.is_ready(count, self.engine.get_version())

    def _take(self, count: int) -> TensorDict | None:
        """A batch of the oldest groups, if it may be consumed now."""
        with self._changed:
            self._drop_too_old()
            for group in self._held_too_long(count):
                self._drop(self._ahead, group, f"{TOO_OLD}: it held up a batch for {self.options.stale_timeout:g} s")
            if not self._is_ready(count):
                return None
            groups = [self._ahead.groups[id] for id in self._ahead.ledger.oldest(count)]
            if self._drop_misfits(self._ahead, groups):
                return None
            self._consume(self._ahead, groups)
        return self._batch(groups)

    def _held_too_long(self, count: int) -> list[Group]:
        """The running groups for which a batch has waited until its time-out."""
        ledger = self._ahead.ledger
        limit = time.monotonic() - self.options.stale_timeout
        holding = [self._ahead.groups[id] for id in ledger.holding(count, self.engine.get_version())]
        return [group for group in holding if group.started is not None and group.started < limit]

    def _consume(self, lane: Lane, groups: Sequence[Group]) -> None:
        with self._changed:
            lane.ledger.consume([group.id for group in groups], self.engine.get_version())
            for group in groups:
                trace.finish("group", group.id, "consumed")
                del lane.groups[group.id]

    def _batch(self, groups: Sequence[Group]) -> TensorDict:
        batch = joined(groups)
        with self._changed:
            self._losses.report(batch, len(groups), self.engine.get_version(), self.failed_attempts.total())
        return batch

    def _next_items(self) -> Sequence[Item]:
        assert self._source is not None
        items = next(self._source[1])
        if not isinstance(items, Mapping):
            self._begin(len(items))
            return items
        if self._ahead.ledger.batch_size is None:
            raise ConfigError("the loader yields single items: set consumer_batch_size, or let it yield lists of items")
        return [items]

    def _sleep_until(
        self, is_settled: Callable[[], bool], timeout: float | None, late: Callable[[], list[Group]], count: int = 0
    ) -> None:
        """Wait for `is_settled()`, which the loop evaluates at every change, or for the end of the run.

        One who waits for a batch of `count` is also woken when a group has held it up for too long.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._loop.call(self._admit)

        def is_over() -> bool:
            return self._stopped is not None or self._is_closed or is_settled()

        with trace.span("wait for rollouts"), self._changed:
            self._wishes.append(is_over)
            try:
                while not is_over() and not (count and self._held_too_long(count)):
                    left = self.options.stale_timeout if deadline is None else deadline - time.monotonic()
                    if left <= 0:
                        raise late_error(late(), timeout)
                    self._loop.wait(self._changed, min(left, self.options.stale_timeout))
            finally:
                self._wishes.remove(is_over)
        self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        with self._changed:
            if self._death is not None:
                raise RolloutError(f"the collector's event loop died: {self._death!r}") from self._death
            if self._is_closed:
                raise RolloutError("the collector is closed")
            stopped, self._stopped = self._stopped, None
        if stopped is not None:
            raise stopped

    def _can_progress(self, lane: Lane) -> bool:
        counters = lane.ledger.counters
        can_start = counters.waiting > 0 and lane.ledger.room(self.engine.get_version()) > 0
        return counters.running > 0 or self._is_paused or can_start

    def _too_few(self, lane: Lane, count: int) -> RolloutError:
        return too_few_error(lane, count, self.lost, self.engine.get_version(), self.options.max_head_offpolicyness)

    def _cancel(self, lane: Lane, groups: Sequence[Group]) -> None:
        with self._changed:
            for group in groups:
                if group.id in lane.groups:
                    self._drop(lane, group, CANCELLED)

    # -- in either thread, with the lock -------------------------------------------------------------------------

    def _drop_too_old(self) -> None:
        for id in self._ahead.ledger.too_old(self.engine.get_version()):
            self._drop(self._ahead, self._ahead.groups[id], TOO_OLD)

    def _drop_misfits(self, lane: Lane, groups: Sequence[Group]) -> bool:
        odd = misfits(groups) if groups else []
        for group, reason in odd:
            self._drop(lane, group, reason)
        return bool(odd)

    def _drop(self, lane: Lane, group: Group, reason: str, error: BaseException | None = None) -> None:
        """The group is lost, wherever it is; what runs of it is cancelled."""
        if lane is not self._tests:
            self._losses.add(group, reason)
        trace.finish("group", group.id, reason)
        lane.ledger.drop(group.id, reason)
        del lane.groups[group.id]
        group.reason, group.error, group.trajectories = reason, error, None
        if group.task is not None:
            self._loop.call(group.task.cancel)

    # -- in the loop's thread ------------------------------------------------------------------------------------

    def _ended(self, death: BaseException | None) -> None:
        with self._changed:
            self._death = death
            self._is_closed = True
            self._changed.notify_all()

    def _admit(self) -> None:
        with self._changed:
            self._drop_too_old()
            if not self._is_paused and not self._is_closed:
                version = self.engine.get_version()
                for lane in self._lanes:
                    for _ in range(min(lane.ledger.room(version), lane.ledger.counters.waiting)):
                        self._start(lane, lane.groups[lane.ledger.start(version)], version)
            if any(is_over() for is_over in self._wishes):
                self._changed.notify_all()

    def _start(self, lane: Lane, group: Group, version: int) -> None:
        trace.stage("group", group.id, "running")
        group.started, group.version = time.monotonic(), version
        group.place = None if lane is self._tests else next(self._places)
        group.task = self._loop.start_task(self._run_group(lane, group))
        group.task.add_done_callback(partial(self._check_task, lane, group))

    def _check_task(self, lane: Lane, group: Group, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # before its first step, so that it could not see it
            self._lose(lane, group, CANCELLED)
        elif (error := task.exception()) is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
            self._loop.die(error)  # those two have ended it; of a workflow's own, _run_group lets no Exception through

    async def _run_group(self, lane: Lane, group: Group) -> None:
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
                tokens=group.tokens,
            )
            whole = [trajectory for trajectory in trajectories if trajectory is not None]
            reason = None
            if len(whole) < len(trajectories):
                reason = "the workflow returned None"
            else:
                check_siblings(whole)
                if group.should_accept is not None and not group.should_accept(pad_trajectories(whole)):
                    reason = NOT_ACCEPTED
        except asyncio.CancelledError:
            self._fail(lane, group, CANCELLED)  # by the workflow; what this collector cancels is lost before
        except ENGINE_FAILURES as error:
            if self._lose(lane, group, reason_of(error), error):
                self._stop(error)
        except EpisodeFailed as failed:
            self._fail(lane, group, reason_of(failed.error), failed.error)
        except Exception as error:  # only should_accept is left: it is the caller's own, and would fail again
            if self._lose(lane, group, reason_of(error), error):
                self._stop(stopping_error(f"should_accept raised {reason_of(error)}", error))
        else:
            if reason is None:
                self._accept(lane, group, whole)
                return
            if not self._lose(lane, group, reason) or group.place is None:
                return
            self._num_rejections += 1
            if self._num_rejections >= self.options.max_consecutive_rejections:
                self._stop(stopping_error(f"{self._num_rejections} groups in a row were dropped: {reason}"))

    def _accept(self, lane: Lane, group: Group, trajectories: list[TensorDict]) -> None:
        if group.place is not None:
            self._num_rejections = 0
        with self._changed:
            group.task = None
            if not group.has_ended:  # else it was dropped just now
                trace.stage("group", group.id, "ready")
                group.trajectories = trajectories
                lane.ledger.accept(group.id, group.age)
        self._admit()

    def _fail(self, lane: Lane, group: Group, reason: str, error: BaseException | None = None) -> None:
        """Lose it, and stop the run if it is one of too many in a row."""
        if not self._lose(lane, group, reason, error) or group.place is None:
            return
        num_failures = self._failures.add(group.place)
        if num_failures >= self.options.max_consecutive_failures:
            self._stop(stopping_error(f"{num_failures} groups in a row failed, the last with {reason}", error))

    def _lose(self, lane: Lane, group: Group, reason: str, error: BaseException | None = None) -> bool:
        """Drop it; False if it was dropped before, and what its task still makes of that says nothing."""
        with self._changed:
            group.task = None
            is_new = not group.has_ended
            if is_new:
                self._drop(lane, group, reason, error)
        self._admit()
        return is_new

    def _stop(self, error: BaseException) -> None:
        """Drop everything that runs or waits, and tell whoever calls next why."""
        with self._changed:
            self._stopped = error
            self._failures.clear()
            self._num_rejections = 0
            for lane in self._lanes:
                for group in lane.unfinished():
                    self._drop(lane, group, STOPPED)
            self._changed.notify_all()
