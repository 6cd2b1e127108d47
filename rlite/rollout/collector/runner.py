"""The runner: starts groups as their ledgers admit them, and runs their episodes in a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tensordict import TensorDict

from rlite.errors import CallTimeout, ConfigError, DataError, DivergedError, ResidencyError, WorkerError
from rlite.observability import trace
from rlite.rollout.collector import lost_groups
from rlite.rollout.collector.group import Ended, Group, Queue
from rlite.rollout.collector.ledger import FailureStreaks
from rlite.rollout.collector.lost_groups import CANCELLED, STOPPED, TOO_OLD, LostGroups, in_full, reason_of
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.seeds import Draws, SampleInference
from rlite.rollout.episode import running
from rlite.rollout.rewards.score import RewardCrash, RewardMemory, RewardTimeout
from rlite.rollout.trajectories import check_alike, check_trajectory, pad_checked
from rlite.rollout.workflow import EngineAborted, RolloutError
from rlite.runtime.event_loop import Abandoned, LoopThread, Overdue, by_deadline, side_by_side
from rlite.runtime.sandbox.calls import SandboxError
from rlite.runtime.sandbox.child import text_of
from rlite.services.record.schema import Status
from rlite.types import AsyncInference

FINAL = (DataError, ConfigError)
"""errors that another attempt would repeat"""
ENGINE_FAILURES = (WorkerError, ResidencyError, DivergedError)
"""errors of the engine, which a workflow cannot fix"""


class EpisodeFailed(Exception):
    """The last error of an episode that has no attempt left."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(text_of(error))
        self.error = error


@dataclass(frozen=True)
class Episodes:
    """The episodes of a group.

    With a seed, random numbers depend only on the seed, the episode's number in its group and the turn. For a request
    with a seed of its own they depend on this seed and the episode's number.
    """

    group: Group
    """group of the episodes; its `tokens` count the tokens that each episode has generated so far"""
    engine: AsyncInference
    options: CollectorOptions
    """time-out and number of attempts"""
    failed_attempts: Counter[str]
    """counts the attempts that raised, by the exception's name or the reward's outcome"""

    @property
    def name(self) -> str:
        """Name of the workflow."""
        return type(self.group.workflow).__name__

    async def run(self) -> list[TensorDict] | None:
        """Run all episodes. The first that fails for good cancels its siblings.

        Returns:
            One checked trajectory per episode; None if the workflow returned None for one of them.

        Raises:
            EpisodeFailed: An episode has no attempt left, or the episodes do not fit into one batch.
            WorkerError: The engine cannot serve.
            ResidencyError: The engine cannot serve.
            DivergedError: The engine's weights are not finite.
        """
        affinity = uuid.uuid4().hex if self.group.size > 1 else None
        attempts = [self._attempt_until_success(number, affinity) for number in range(self.group.size)]
        found = [await attempts[0]] if len(attempts) == 1 else await side_by_side(attempts)
        trajectories = [trajectory for trajectory in found if trajectory is not None]
        if len(trajectories) < self.group.size:
            return None
        try:
            if len(trajectories) > 1:
                check_alike(trajectories)
        except DataError as error:
            raise EpisodeFailed(error) from error
        return trajectories

    async def _attempt_until_success(self, number: int, affinity: str | None) -> TensorDict | None:
        group, recorded, draws = self.group, self.group.episodes[number], Draws()
        with running(recorded):
            while True:
                recorded.begin_attempt()
                draws.begin_attempt()
                inference = SampleInference(self.engine, group, number, draws, affinity, self.options.keep_ended)
                try:
                    result = await self._attempt(inference)
                except ENGINE_FAILURES:
                    raise
                except Exception as error:
                    kind = error.outcome if isinstance(error, SandboxError) else type(error).__name__
                    recorded.failed_attempts.append(kind)
                    self.failed_attempts[kind] += 1
                    is_final = isinstance(error, FINAL) or isinstance(error.__cause__, Abandoned)
                    if len(recorded.failed_attempts) > self.options.request_retries or is_final:
                        recorded.failure = reason_of(error)
                        raise EpisodeFailed(error) from error
                else:
                    group.num_finished += 1
                    if draws.are_other(self.engine.get_version()):
                        recorded.redrawn = recorded.failed_attempts[-1]
                    recorded.take_trajectory(result)
                    return result
                finally:
                    inference.end()

    async def _attempt(self, inference: SampleInference) -> TensorDict | None:
        """Return the checked trajectory of one attempt.

        Raises:
            CallTimeout: The attempt did not end in time.
        """
        what = f"an episode of {self.name}"
        try:
            result = await by_deadline(self._episode(inference), self.options.request_timeout, what)
        except Overdue as error:
            raise CallTimeout(str(error)) from error
        if result is not None:
            check_trajectory(result, f"the trajectory of {self.name}")
        return result

    async def _episode(self, inference: Any) -> TensorDict | None:
        episode = self.group.workflow.arun_episode(inference, dict(self.group.data))
        if not inspect.isawaitable(episode):
            raise ConfigError(f"{self.name}.arun_episode returned {episode!r:.100}: write `async def arun_episode`")
        return await episode


def status_of(reason: str, error: BaseException | None) -> Status:
    """Return the status of a group.

    Args:
        reason: why it is lost.
        error: the exception behind the reason.
    """
    if reason.startswith(TOO_OLD):
        return "too_old"
    if reason in (CANCELLED, STOPPED) or isinstance(error, (*ENGINE_FAILURES, EngineAborted)):
        return "aborted"
    if error is None:
        return "refused"
    if isinstance(error, RewardTimeout | RewardCrash | RewardMemory):
        return "reward_killed"
    return "timed_out" if isinstance(error, CallTimeout) else "failed"


class GroupRunner:
    """Runs the waiting groups of several queues, in one event loop in a thread of its own.

    The loop consumes waiting groups and makes them ready or lost. It waits for the ledgers' permission to start more.
    It is unblocked by every event that may change this: a submission, the end of a group, a higher policy version, the
    end of a pause. Each of these calls `admit`.

    Callers wait in `wait_until`. They are unblocked when the loop finds their condition true, when the run is stopped,
    and when the loop ends.

    Args:
        engine: generates, and knows the policy version.
        options: limits, time-outs and retries.
        queues: in order of precedence.
    """

    def __init__(self, engine: AsyncInference, options: CollectorOptions, queues: Sequence[Queue]) -> None:
        self._engine, self._options, self._queues = engine, options, queues
        self.changed = threading.Condition()
        """guards the queues and all fields below; notified when a caller's condition has become true"""
        self.is_paused = False
        self.is_closed = False
        self.lost_groups = LostGroups()
        self.ended: list[Ended] = []
        """groups for the record, if the options keep them"""
        self._stopped: BaseException | None = None
        self._death: BaseException | None = None
        self._wake_conditions: list[Callable[[], bool]] = []
        self._num_started = itertools.count()
        self._failures = FailureStreaks()
        self._num_refused = 0
        self._loop = LoopThread("rollout-collector", self._on_loop_end, block_limit=options.request_timeout)

    # -- called in any thread ------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Make the loop drop groups that are too old, start groups that may start, and wake callers."""
        self._loop.call(self._admit)

    def submit(self, queue: Queue, groups: Sequence[Group]) -> None:
        """Let groups wait in a queue, and start those that may start."""
        self.raise_if_stopped()
        with self.changed:
            for group in groups:
                queue.submit(group)
        self.admit()

    def wait_until(
        self, is_settled: Callable[[], bool], deadline: float | None, is_due: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until a condition holds.

        Args:
            is_settled: evaluated by the loop at every change.
            deadline: by `time.monotonic()`; None sets no limit.
            is_due: becomes true by the clock alone, and ends the wait too. Evaluated in the caller's thread every few
                seconds.

        Returns:
            False if the deadline has passed before.

        Raises:
            RolloutError: The run was stopped, the collector was closed, or its event loop died.
        """
        self.admit()

        def is_over() -> bool:
            return self._stopped is not None or self.is_closed or is_settled()

        with trace.span("wait for rollouts"), self.changed:
            self._wake_conditions.append(is_over)
            try:
                while not (is_over() or is_due()):
                    patience = self._options.stale_timeout
                    if deadline is not None and (patience := min(patience, deadline - time.monotonic())) <= 0:
                        return False
                    self._loop.wait(self.changed, patience)
            finally:
                self._wake_conditions.remove(is_over)
        self.raise_if_stopped()
        return True

    def raise_if_stopped(self) -> None:
        """Raise the error that stopped the run, once.

        Raises:
            RolloutError: The run was stopped, the collector is closed, or its event loop died.
        """
        with self.changed:
            if self._death is not None:
                raise RolloutError(f"the collector's event loop died: {self._death!r}") from self._death
            if self.is_closed:
                raise RolloutError("the collector is closed")
            stopped, self._stopped = self._stopped, None
        if stopped is not None:
            raise stopped

    def drop(self, queue: Queue, group: Group, reason: str, error: BaseException | None = None) -> None:
        """Drop a group that waits, runs or is ready, and cancel its episodes. Needs the lock.

        Args:
            queue: holds the group.
            group: is lost from now on.
            reason: why.
            error: the exception behind the reason.
        """
        self.lost_groups.explain(group, reason, error)
        self.keep(queue, group, status_of(reason, error), reason)
        if queue.is_training:
            self.lost_groups.add(group, reason)
        queue.drop(group, reason, error)
        if group.task is not None:
            self._loop.call(group.task.cancel)

    def keep(self, queue: Queue, group: Group, status: Status | None, reason: str = "") -> None:
        """Keep a group for the record, if the options say so. Needs the lock.

        Args:
            queue: has held the group.
            group: was lost or consumed.
            status: status of the group; None if it was consumed.
            reason: why it is lost.
        """
        if self._options.keep_ended and queue.is_training:
            self.ended.append(group.ended(status, reason))

    def drop_too_old(self) -> None:
        """Drop the groups that may no longer be consumed. Needs the lock."""
        version = self._engine.get_version()
        for queue in self._queues:
            for id in queue.ledger.too_old(version):
                self.drop(queue, queue.groups[id], lost_groups.TOO_OLD)

    def report(self, batch: TensorDict, groups: Sequence[Group]) -> None:
        """Record the statistics of a batch of these groups, and of the groups lost before it. Needs the lock."""
        self.lost_groups.report(batch, groups, self._engine.get_version(), self.failed_attempts)

    @property
    def failed_attempts(self) -> Counter[str]:
        """Number of attempts that raised at an episode to train on, by kind."""
        # copied first: the loop counts meanwhile
        return sum((queue.failed_attempts.copy() for queue in self._queues if queue.is_training), Counter[str]())

    def close(self) -> None:
        """Cancel the running groups and end the thread."""
        with self.changed:
            is_stopping, self.is_closed = self.is_closed, True
        if not is_stopping:
            self._loop.stop()
        self._loop.join()

    # -- called in the loop's thread -----------------------------------------------------------------------------

    def _on_loop_end(self, death: BaseException | None) -> None:
        with self.changed:
            self._death = death
            self.is_closed = True
            self.changed.notify_all()

    def _admit(self) -> None:
        with self.changed:
            self.drop_too_old()
            if not self.is_paused and not self.is_closed:
                version = self._engine.get_version()
                for queue in self._queues:
                    for _ in range(min(queue.ledger.room(version), queue.ledger.counters.waiting)):
                        self._start(queue, queue.start(version))
            if any(is_over() for is_over in self._wake_conditions):
                self.changed.notify_all()

    def _start(self, queue: Queue, group: Group) -> None:
        if queue.is_training:
            group.start_order = next(self._num_started)
        group.task = self._loop.start_task(self._run(queue, group))
        group.task.add_done_callback(partial(self._on_task_end, queue, group))

    def _on_task_end(self, queue: Queue, group: Group, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # before its first step, so that it could not see it
            self._end(queue, group, lost_groups.CANCELLED)
        elif (error := task.exception()) is not None:
            self._loop.die(error)  # `_run` lets no Exception through

    async def _run(self, queue: Queue, group: Group) -> None:
        try:
            trajectories = await Episodes(group, self._engine, self._options, queue.failed_attempts).run()
            is_accepted = group.should_accept is None or (
                trajectories is not None and group.should_accept(pad_checked(trajectories))
            )
        except asyncio.CancelledError:  # by the workflow: a group that the collector cancels was dropped before
            self._fail(queue, group, lost_groups.CANCELLED)
        except ENGINE_FAILURES as error:
            if self._end(queue, group, reason_of(error), error):
                self._stop(error)
        except EpisodeFailed as failed:
            self._fail(queue, group, reason_of(failed.error), failed.error)
        except (
            Exception,
            SystemExit,
            KeyboardInterrupt,
        ) as error:  # only should_accept is left: it is the caller's code, and would fail again
            if self._end(queue, group, reason_of(error), error):
                self._stop(_stopping_error(f"should_accept raised {reason_of(error)}", error))
        else:
            if trajectories is None:
                self._refuse(queue, group, lost_groups.RETURNED_NONE)
            elif not is_accepted:
                self._refuse(queue, group, lost_groups.NOT_ACCEPTED)
            else:
                self._accept(queue, group, trajectories)

    def _accept(self, queue: Queue, group: Group, trajectories: list[TensorDict]) -> None:
        with self.changed:
            group.task = None
            if queue.is_training:
                self._num_refused = 0
            if not group.has_ended:  # else it was dropped a moment ago
                queue.accept(group, trajectories)
        self._admit()

    def _refuse(self, queue: Queue, group: Group, reason: str) -> None:
        """Drop a group whose episodes succeeded, and stop the run if too many in a row were refused."""
        if self._end(queue, group, reason) and queue.is_training:
            is_counted = reason != lost_groups.NOT_ACCEPTED or not self._options.is_filter_bounded
            self._num_refused = self._num_refused + 1 if is_counted else 0
            if self._num_refused >= self._options.max_consecutive_rejections:
                self._stop(_stopping_error(f"{self._num_refused} groups in a row were dropped: {reason}"))

    def _fail(self, queue: Queue, group: Group, reason: str, error: BaseException | None = None) -> None:
        """Drop a group whose episodes failed, and stop the run if too many in a row failed."""
        if self._end(queue, group, reason, error) and group.start_order is not None:
            num_failures = self._failures.add(group.start_order)
            if num_failures >= self._options.max_consecutive_failures:
                last = in_full(reason, error, group.data)
                self._stop(_stopping_error(f"{num_failures} groups in a row failed, the last with {last}", error))

    def _end(self, queue: Queue, group: Group, reason: str, error: BaseException | None = None) -> bool:
        """Drop a group whose task ends.

        Returns:
            False if the group was dropped before: then its error has no effect.
        """
        with self.changed:
            group.task = None
            is_first = not group.has_ended
            if is_first:
                self.drop(queue, group, reason, error)
        self._admit()
        return is_first

    def _stop(self, error: BaseException) -> None:
        """Drop every group that runs or waits. The next caller gets the error."""
        with self.changed:
            self._stopped = error
            self._failures.clear()
            self._num_refused = 0
            for queue in self._queues:
                for group in queue.unfinished():
                    self.drop(queue, group, lost_groups.STOPPED)
            self.changed.notify_all()


def _stopping_error(why: str, cause: BaseException | None = None) -> RolloutError:
    error = RolloutError(f"the rollouts were stopped: {why}")
    error.__cause__ = cause
    return error
