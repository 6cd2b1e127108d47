"""The runner: starts groups as their ledgers admit them, and runs their episodes in a thread of its own.

_admit ──> _start ──> _run: Episodes.run, one task for each episode ──> _attempt, again after an error ──┐
   ^                                                                                                     │
   └── _settle: ready, or lost with a reason <───────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensordict import TensorDict

from rlite.data.packs import check_alike, check_trajectory, layout, pad_checked
from rlite.errors import CallTimeout, ConfigError, DataError, RolloutError
from rlite.observability import trace
from rlite.rollout.collector import lost_groups
from rlite.rollout.collector.ended import Ended
from rlite.rollout.collector.ledger import RolloutLedger
from rlite.rollout.collector.lost_groups import ENGINE_FAILURES, Loss, Losses, StopRule
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.retry import EpisodeFailed, retry
from rlite.rollout.draws import Draws
from rlite.rollout.episode import Episode, SampleInference, mix, running
from rlite.rollout.workflow import RolloutWorkflow
from rlite.runtime.event_loop import Overdue, SharedLoop, by_deadline, side_by_side
from rlite.types import AsyncInference, Status

Item = Mapping[str, Any]
ShouldAccept = Callable[[TensorDict], bool]


@dataclass(eq=False, slots=True)
class Group:
    """The episodes of one submitted item. The ledger's module draws a group's life."""

    id: int
    """unique in its collector; batches carry it as `group_ids`"""
    data: Item
    """the submitted item"""
    workflow: RolloutWorkflow
    size: int
    """number of episodes"""
    should_accept: ShouldAccept | None = None
    """decides whether the finished group is kept"""
    seed: int | None = None
    """key of the group's random numbers; None leaves them to the order of requests"""
    item: str = ""
    """name of the item in records"""
    first_sample: int = 0
    """number of the first episode among those of the item"""
    version: int | None = None
    """policy version at the group's start"""
    start_order: int | None = None
    """number of groups for training that started before this group; None for an evaluation"""
    started: float | None = None
    """`time.monotonic()` at the group's start, in seconds"""
    task: asyncio.Task[None] | None = None
    """runs the episodes"""
    num_finished: int = 0
    """episodes that have ended"""
    trajectories: list[TensorDict] | None = None
    """one per episode, as soon as the group is ready"""
    loss: Loss | None = None
    """why the group is lost"""
    episodes: list[Episode] = field(init=False)

    def __post_init__(self) -> None:
        submitted, self.episodes = time.monotonic(), []
        self.episodes += [Episode(submitted, self.episodes) for _ in range(self.size)]

    @property
    def age(self) -> int | None:
        """Version of the oldest token; the version at the start if the trajectories have no `versions`."""
        made = [row["versions"][row["versions"] >= 0] for row in self.trajectories or () if "versions" in row]
        return min((int(versions.min()) for versions in made if len(versions)), default=self.version)

    @property
    def has_ended(self) -> bool:
        """True as soon as the group is ready or lost."""
        return self.trajectories is not None or self.loss is not None

    @property
    def redrawn(self) -> str:
        """Kind of the failure after which an episode drew other answers; empty if none did."""
        return next((episode.redrawn for episode in self.episodes if episode.redrawn), "")


@dataclass(frozen=True)
class Episodes:
    """The episodes of a group.

    With a seed, random numbers depend only on the seed, the episode's number in its group and the turn. For a request
    with a seed of its own they depend on this seed and the episode's number.
    """

    group: Group
    engine: AsyncInference
    options: CollectorOptions
    """time-out and number of attempts"""
    failed_attempts: Counter[str]
    """counts the attempts that raised, by the exception's name or the reward's outcome"""

    async def run(self) -> list[TensorDict] | None:
        """Run all episodes. The first that fails for good cancels its siblings.

        Returns one checked trajectory per episode; None if the workflow returned None for one of them.
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
        group, episode, draws = self.group, self.group.episodes[number], Draws()
        seed = None if group.seed is None else mix(group.seed, number)
        sample, is_trained = group.first_sample + number, group.start_order is not None
        episode.item, episode.sample, episode.is_trained = group.item, sample, is_trained
        with running(episode):
            while True:
                inference = SampleInference(
                    *(self.engine, episode, draws, sample, seed, affinity, is_trained),
                    keeps_tokens=self.options.keep_ended,
                    extras=self.options.extras,
                )
                try:
                    result = await self._attempt(inference)
                except ENGINE_FAILURES:
                    raise
                except Exception as error:
                    retry(episode, draws, error, self.options.request_retries, self.failed_attempts)
                else:
                    group.num_finished += 1
                    if episode.failed_attempts and draws.are_other(self.engine.get_version()):
                        episode.redrawn = episode.failed_attempts[-1]
                    episode.take_trajectory(result)
                    return result
                finally:
                    inference.end()

    async def _attempt(self, inference: SampleInference) -> TensorDict | None:
        """Return the checked trajectory of one attempt."""
        name = type(self.group.workflow).__name__
        try:
            result = await by_deadline(self._arun(inference), self.options.request_timeout, f"an episode of {name}")
        except Overdue as error:
            raise CallTimeout(str(error)) from error
        if result is not None:
            check_trajectory(result, f"the trajectory of {name}")
        return result

    async def _arun(self, inference: SampleInference) -> TensorDict | None:
        workflow = self.group.workflow
        episode: Any = workflow.arun_episode(inference, dict(self.group.data))
        if not inspect.isawaitable(episode):
            name = type(workflow).__name__
            raise ConfigError(f"{name}.arun_episode returned {episode!r:.100}: write `async def arun_episode`")
        return await episode


@dataclass(eq=False)
class Queue:
    """Groups under one rule of admission: those that wait, run or are ready, in the order of their submission.

    The ledger decides by number; the queue keeps the groups behind the numbers.
    """

    ledger: RolloutLedger
    is_training: bool = True
    """true if the groups are trained on. If not, lost groups are not reported and stop no run"""
    groups: dict[int, Group] = field(default_factory=dict)

    def unfinished(self) -> list[Group]:
        """Return the groups that wait or run."""
        return [group for group in self.groups.values() if not group.has_ended]


class GroupRunner:
    """Runs the waiting groups of several queues, in one event loop in a thread of its own.

    The loop consumes waiting groups and makes them ready or lost. It waits for the ledgers' permission to start more.
    It is unblocked by every event that may change this: a submission, the end of a group, a higher policy version, the
    end of a pause. Each of these calls `admit`.

    Callers wait in `wait_until`. They are unblocked when the loop finds their condition true, when the run is stopped,
    and when the loop ends.

    `queues`: in order of precedence.
    """

    def __init__(self, engine: AsyncInference, options: CollectorOptions, queues: Sequence[Queue]) -> None:
        self._engine, self._options, self._queues = engine, options, queues
        self.loop = SharedLoop(
            "rollout-collector", "the collector", RolloutError, options.stale_timeout, options.request_timeout
        )
        self.changed = self.loop.changed
        """guards the queues and all fields below"""
        self.is_paused = False
        self.failed_attempts: Counter[str] = Counter()
        """attempts that raised at an episode to train on, by kind"""
        self.losses = Losses()
        self.first_losses: dict[str, str] = {}
        """reason of the first lost group of each cause, with its row; also of an evaluation"""
        self.ended: list[Ended] = []
        """groups for the record, if the options keep them"""
        self._num_started = itertools.count()
        self._stop_rule = StopRule(options)

    # -- called in any thread ------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Make the loop drop groups that are too old, start groups that may start, and wake callers."""
        self.loop.call(self._admit)

    def submit(self, queue: Queue, groups: Sequence[Group]) -> None:
        """Let groups wait in a queue, and start those that may start."""
        self.loop.raise_if_stopped()
        with self.changed:
            for group in groups:
                queue.groups[group.id] = group
                queue.ledger.submit(group.id)
                trace.stage("group", group.id, "waiting")
        self.admit()

    def drop(self, queue: Queue, group: Group, loss: Loss) -> None:
        """Drop a group that waits, runs or is ready, and cancel its episodes. Needs the lock."""
        if (cause := lost_groups.cause_of(loss.reason)) not in self.first_losses:
            self.first_losses[cause] = lost_groups.in_full(loss, group.data)
        self._keep(queue, group, loss.status, loss.reason)
        if queue.is_training:
            self.losses.add(loss, group.episodes)
        queue.ledger.drop(group.id, loss.reason)
        trace.finish("group", group.id, loss.reason)
        del queue.groups[group.id]
        group.loss, group.trajectories = loss, None
        if group.task is not None:
            self.loop.call(group.task.cancel)

    def drop_too_old(self) -> None:
        """Drop the groups that may no longer be consumed. Needs the lock."""
        version = self._engine.get_version()
        for queue in self._queues:
            for id in queue.ledger.too_old(version):
                self.drop(queue, queue.groups[id], lost_groups.TOO_OLD)

    def drop_misfits(self, queue: Queue, groups: Sequence[Group]) -> bool:
        """Drop the groups whose keys or types differ from those of most groups. Needs the lock.

        Returns True if there are any.
        """
        layouts = [layout(group.trajectories[0]) if group.trajectories else frozenset() for group in groups]
        common = Counter(layouts).most_common(1)[0][0] if layouts else frozenset()
        misfits = [(group, own ^ common) for group, own in zip(groups, layouts, strict=True) if own != common]
        for group, odd in misfits:
            self.drop(queue, group, lost_groups.unlike_others({key for key, *_ in odd}))
        return bool(misfits)

    def consume(self, queue: Queue, groups: Sequence[Group]) -> None:
        """Consume ready groups. Needs the lock."""
        queue.ledger.consume([group.id for group in groups], self._engine.get_version())
        for group in groups:
            trace.finish("group", group.id, "consumed")
            del queue.groups[group.id]
            self._keep(queue, group, status=None)

    def wait_until(
        self, is_settled: Callable[[], bool], deadline: float | None, is_due: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until a condition holds.

        `deadline`: by `time.monotonic()`; None sets no limit. `is_due`: becomes true by the clock alone, and ends the
        wait too. Evaluated in the caller's thread. Returns False if the deadline has passed before.
        """
        self.admit()
        with trace.span("wait for rollouts"):
            return self.loop.wait_until(is_settled, deadline, is_due)

    def _keep(self, queue: Queue, group: Group, status: Status | None, reason: str = "") -> None:
        """Keep a group that was lost, or consumed (status None), for the record, if the options say so."""
        if self._options.keep_ended and queue.is_training:
            self.ended.append(Ended.of(group, status, reason))

    # -- called in the loop's thread -----------------------------------------------------------------------------

    def _admit(self) -> None:
        with self.changed:
            self.drop_too_old()
            if not self.is_paused and not self.loop.is_closed:
                version = self._engine.get_version()
                for queue in self._queues:
                    for _ in range(min(queue.ledger.room(version), queue.ledger.counters.waiting)):
                        self._start(queue, version)
            self.loop.wake()

    def _start(self, queue: Queue, version: int) -> None:
        """Start the group that has waited longest."""
        group = queue.groups[queue.ledger.start(version)]
        trace.stage("group", group.id, "running")
        group.started, group.version = time.monotonic(), version
        if queue.is_training:
            group.start_order = next(self._num_started)
        group.task = self.loop.start_task(self._run(queue, group))
        group.task.add_done_callback(partial(self._on_task_end, queue, group))

    def _on_task_end(self, queue: Queue, group: Group, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # before its first step, so that it could not see it
            self._settle(queue, group, lost_groups.CANCELLED)
        elif (error := task.exception()) is not None:
            self.loop.die(error)  # `_run` lets no Exception through

    async def _run(self, queue: Queue, group: Group) -> None:
        stopping: BaseException | None = None
        end: list[TensorDict] | Loss
        failed_attempts = self.failed_attempts if queue.is_training else Counter[str]()
        try:
            trajectories = await Episodes(group, self._engine, self._options, failed_attempts).run()
            end = lost_groups.RETURNED_NONE if trajectories is None else trajectories
            if trajectories is not None and group.should_accept is not None:
                end = trajectories if group.should_accept(pad_checked(trajectories)) else lost_groups.NOT_ACCEPTED
        except asyncio.CancelledError:  # by the workflow: a group that the collector cancels was dropped before
            end = lost_groups.CANCELLED
        except EpisodeFailed as failed:
            end = Loss.by(failed.args[0])
        except ENGINE_FAILURES as error:
            end, stopping = Loss.by(error), error
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # of should_accept: the caller's code
            end = Loss.by(error)
            stopping = lost_groups.stopped(f"should_accept raised {end.reason}", error)
        self._settle(queue, group, end, stopping)

    def _settle(
        self, queue: Queue, group: Group, end: list[TensorDict] | Loss, stopping: BaseException | None = None
    ) -> None:
        """Make a group ready or lost at the end of its task, and stop the run if its loss is one too many."""
        with self.changed:
            group.task = None
            if not group.has_ended:  # else it was dropped a moment ago, and its end has no effect
                if isinstance(end, Loss):
                    self.drop(queue, group, end)
                    if (error := stopping or self._stop_rule.error(end, group.data, group.start_order)) is not None:
                        self._stop(error)
                else:
                    trace.stage("group", group.id, "ready")
                    group.trajectories = end
                    queue.ledger.accept(group.id, group.age)
                    if queue.is_training:
                        self._stop_rule.num_refused = 0
        self._admit()

    def _stop(self, error: BaseException) -> None:
        """Drop every group that runs or waits. The next caller gets the error."""
        self._stop_rule = StopRule(self._options)
        for queue in self._queues:
            for group in queue.unfinished():
                self.drop(queue, group, lost_groups.STOPPED)
        self.loop.stop_callers(error)
