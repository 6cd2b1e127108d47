"""The collector: runs workflows in the background of the training program, and returns whole groups.

    caller's thread                       the runner's thread, one event loop
    submit ──> waiting ──start───────> running: episodes, each attempted until it succeeds or has no attempt left
    wait   <── ready   <──accept──────    │
               lost, with a reason   <────┘ failed, returned None, not accepted, too old, cancelled, ...

The ledger (`ledger.py`) decides and the runner (`runner.py`) acts. The consumer (`consumer.py`) waits for ended groups
and makes batches of them. The collector is what callers use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tensordict import TensorDict

from rlite.data.prompts import Prompt, item_name
from rlite.errors import ConfigError, DataError, EvaluationInterrupted
from rlite.rollout.collector.consumer import GroupConsumer
from rlite.rollout.collector.group import Ended, Group, Item, Queue, RolloutProgress, ShouldAccept, aborted
from rlite.rollout.collector.ledger import RolloutCounters, RolloutLedger
from rlite.rollout.collector.lost_groups import LostGroups, Selection
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.runner import GroupRunner, status_of
from rlite.rollout.collector.seeds import group_seed
from rlite.rollout.workflow import RolloutError, RolloutWorkflow
from rlite.runtime.sandbox.pool import close_shared_pool
from rlite.types import AsyncInference

_open_collectors: set[RolloutCollector] = set()


@dataclass(frozen=True)
class Collected:
    """The finished groups of one call as a batch, and the lost ones by reason."""

    batch: TensorDict | None
    """rows of the finished groups; None if there are none"""
    num_groups: int
    """groups that were asked for"""
    lost: Counter[str]
    """groups that were lost, by reason"""
    error: BaseException | None = None
    """the exception behind one of the losses"""

    @property
    def reason(self) -> str:
        """The most frequent reason for a loss."""
        return self.lost.most_common(1)[0][0]


class RolloutCollector:
    """Runs workflows on an engine, in an event loop of its own, until it is closed.

    `rollout_batch` is synchronous: exactly these items, now. `submit` and `wait`, and `prepare_batch`, which combines
    them, let generation run ahead of training by at most `max_head_offpolicyness` weight updates. Groups are whole.

    An episode that raises is attempted again, `request_retries` times. Then its group is dropped, and `lost` counts it.
    If everything fails, the call in progress raises RolloutError with the reason. If the engine cannot serve, the call
    in progress raises the engine's error at once.

    Args:
        engine: generates, and knows the policy version.
        options: limits, time-outs and retries.
    """

    def __init__(self, engine: AsyncInference, options: CollectorOptions | None = None) -> None:
        self.engine = engine
        self.options = options or CollectorOptions()
        limit = self.options.max_concurrent_rollouts
        # no step trains while `collect` or `evaluate` waits, so that their groups do not age
        self._now = Queue(RolloutLedger(max_concurrent=limit))
        self._tests = Queue(RolloutLedger(max_concurrent=limit), is_training=False)
        self._ahead = Queue(
            RolloutLedger(
                max_concurrent=limit,
                max_head_offpolicyness=self.options.max_head_offpolicyness,
                on_stale=self.options.on_stale,
                batch_size=self.options.consumer_batch_size,
                version=engine.get_version(),
            )
        )
        self._runner = GroupRunner(engine, self.options, (self._now, self._tests, self._ahead))
        self._consumer = GroupConsumer(engine, self.options, self._runner)
        self._changed, self._num_submitted = self._runner.changed, 0
        self._waited_for: tuple[str, Sequence[Group]] | None = None
        self._loader: Iterable[Any] | None = None
        self._source: Iterator[Any] = iter(())
        _open_collectors.add(self)

    @property
    def counters(self) -> RolloutCounters:
        """Number of submitted groups (`submit`, `prepare_batch`) by state."""
        with self._changed:
            return self._ahead.ledger.counters

    @property
    def lost(self) -> Counter[str]:
        """Number of lost groups by reason; from the 101st reason on they count as "other reasons"."""
        with self._changed:
            return self._now.ledger.lost + self._ahead.ledger.lost

    @property
    def first_losses(self) -> Mapping[str, str]:
        """The first reason of each cause, with its row, by the cause as `lost_groups.cause_of` returns it."""
        with self._changed:
            return dict(self._runner.lost_groups.first)

    def take_selection(self) -> Selection:
        """Return what failures have done to the answers of the batches since the last call."""
        with self._changed:
            lost = self._runner.lost_groups
            found, lost.selection = lost.selection, Selection()
        return found

    @property
    def failed_attempts(self) -> Counter[str]:
        """Number of attempts at an episode that raised, by the exception's name or the reward's outcome."""
        return self._runner.failed_attempts

    @property
    def progress(self) -> RolloutProgress | None:
        """Progress of the call that waits for episodes now; None if no call waits. Any thread may ask."""
        if (waited_for := self._waited_for) is None:
            return None
        (what, groups), size = waited_for, None
        if not groups:
            with self._changed:
                groups, size = list(self._ahead.groups.values()), self._ahead.ledger.batch_size
        return RolloutProgress.of(what, groups, sum(group.size for group in groups[:size]))

    @contextmanager
    def _reporting(self, what: str, groups: Sequence[Group] = ()) -> Iterator[None]:
        """Let `progress` report a call inside of the block. Without groups, it waits for groups that run ahead."""
        self._waited_for = what, groups
        try:
            yield
        finally:
            self._waited_for = None

    # -- exactly these items, now --------------------------------------------------------------------------------

    def rollout_batch(
        self,
        data: Sequence[Item],
        workflow: RolloutWorkflow,
        group_size: int = 1,
        timeout: float | None = None,
        first_place: int = 0,
    ) -> TensorDict:
        """Run every item now, and return one padded batch.

        Args:
            data: at least one item.
            workflow: runs the episodes.
            group_size: episodes per item.
            timeout: in seconds; None sets no limit.
            first_place: position of the first item among those of this policy version. With a seed, an item's position
                decides its random numbers, so that a batch that continues another one begins after it.

        Returns:
            A batch [N] with `group_ids`, in the order of the data, the episodes of an item side by side. Groups that
            were dropped are missing; `lost` counts them.

        Raises:
            RolloutError: No group is left, or the run was stopped.
            CallTimeout: Some groups are late. The error names them, and all groups of the call are cancelled.
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
        """Run every item now, as `rollout_batch` does, and tolerate that all groups are lost.

        Args:
            data: at least one item.
            workflow: runs the episodes.
            group_size: episodes per item.
            timeout: in seconds; None sets no limit.
            first_place: as for `rollout_batch`.

        Returns:
            The batch of the groups that are left, and the lost groups by reason.

        Raises:
            RolloutError: The run was stopped.
            CallTimeout: Some groups are late.
        """
        groups = self._submit(self._now, data, workflow, group_size, first_place=first_place)
        with self._reporting("rollout", groups):
            finished = self._consumer.finish(self._now, groups, timeout)
        return _collected(groups, self._consumer.batch(finished) if finished else None)

    def evaluate(
        self,
        data: Sequence[Item],
        workflow: RolloutWorkflow,
        group_size: int = 1,
        timeout: float | None = None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> list[Ended]:
        """Run every item now, to measure and not to train.

        Every episode counts alone. A failed episode costs no sibling, is counted in the result only, and stops no run.
        An interrupted call leaves the numbers of later groups as if it had not been made.

        Args:
            data: at least one item.
            workflow: runs the episodes.
            group_size: episodes per item.
            timeout: in seconds; None sets no limit.
            is_interrupted: becomes true when the call is to end early. It is asked at each end of an episode, and
                every few seconds.

        Returns:
            All episodes, finished or failed, in the order of the data; `group` is the item's index.

        Raises:
            CallTimeout: Some episodes are late.
            EvaluationInterrupted: The call was interrupted.
        """
        _check_items(data, workflow, group_size)
        named = [Prompt(item, item_name(item, number)) for number, item in enumerate(data)]
        each_alone = [item for item in named for _ in range(group_size)]
        groups = self._submit(self._tests, each_alone, workflow, num_samples=group_size)
        try:
            with self._reporting("evaluation", groups):
                self._consumer.finish(self._tests, groups, timeout, is_interrupted)
        except EvaluationInterrupted:
            with self._changed:
                self._num_submitted = groups[0].id
            raise
        return [_evaluated(group, number, group_size) for number, group in enumerate(groups)]

    # -- running ahead -------------------------------------------------------------------------------------------

    def submit(
        self, data: Item, workflow: RolloutWorkflow, group_size: int = 1, should_accept: ShouldAccept | None = None
    ) -> int:
        """Let one item run when capacity allows; `wait` returns its group.

        Args:
            data: the item.
            workflow: runs the episodes.
            group_size: episodes of the item.
            should_accept: as for `prepare_batch`; a refused group is not replaced.

        Returns:
            The group's id.
        """
        return self._submit(self._ahead, [data], workflow, group_size, should_accept)[0].id

    def wait(self, count: int, timeout: float | None = None) -> TensorDict:
        """Return the `count` oldest groups that are ready as one padded batch, in the order of their submission.

        Raises:
            CallTimeout: Some groups are late after `timeout` seconds; the error names them.
            ConfigError: `count` is less than 1.
            RolloutError: Fewer groups remain than requested.
        """
        if count < 1:
            raise ConfigError(f"wait({count}): expected at least 1 group")
        self._ahead.ledger.begin(count, self.engine.get_version())
        with self._reporting("rollout"):
            return self._consumer.next_batch(self._ahead, count, timeout, lambda: len(self._ahead.groups) < count)

    def prepare_batch(
        self,
        loader: Iterable[Any],
        workflow: RolloutWorkflow,
        should_accept: ShouldAccept | None = None,
        group_size: int = 1,
        timeout: float | None = None,
    ) -> TensorDict:
        """Return the next batch, and keep items from `loader` running ahead.

        Args:
            loader: yields items or lists of items, and is iterated again at its end. Another loader starts at its
                beginning: to alternate between loaders, pass one that draws from all of them.
            workflow: runs the episodes.
            should_accept: called with a group's padded TensorDict, in the runner's thread. Refused groups are replaced.
            group_size: episodes per item.
            timeout: in seconds; None sets no limit.

        Raises:
            CallTimeout: Some groups are late; the error names them.
            RolloutError: The policy version has not moved, so that generation may not run ahead any further.
        """
        ledger = self._ahead.ledger

        def is_short() -> bool:
            return ledger.batch_size is None or ledger.counters.waiting < ledger.batch_size

        def refill() -> None:
            while is_short():
                self._submit(self._ahead, self._next_items(), workflow, group_size, should_accept)

        if self._loader is not loader:
            self._loader, self._source = loader, _endless(loader)
        refill()
        assert ledger.batch_size is not None
        with self._reporting("rollout"):
            return self._consumer.next_batch(self._ahead, ledger.batch_size, timeout, is_short, refill)

    def pause(self) -> None:
        """Start no more groups, and pause generation at a token boundary."""
        with self._changed:
            self._runner.is_paused = True
        self.engine.pause()

    def resume(self) -> None:
        """Continue after `pause()`."""
        self.engine.resume()
        with self._changed:
            self._runner.is_paused = False
        self.version_changed()

    def version_changed(self) -> None:
        """Read the engine's policy version now, and start and drop groups accordingly."""
        self._runner.admit()

    def state_dict(self) -> dict[str, Any]:
        """Return the submitted groups, finished or not, and all counts, as plain values and tensors.

        Raises:
            DataError: An item holds something else.
        """
        with self._changed:
            failed_attempts = dict(self.failed_attempts)
            return {**self._ahead.state_dict(), "failed_attempts": failed_attempts, **self.record_state()}

    def load_state_dict(
        self, state: Mapping[str, Any], workflow: RolloutWorkflow, should_accept: ShouldAccept | None = None
    ) -> None:
        """Continue from a state: finished groups are ready again, the others run (again).

        Args:
            state: what `state_dict` returned.
            workflow: runs the unfinished groups.
            should_accept: as for `prepare_batch`.

        Raises:
            CheckpointError: This collector has groups already, or another batch size.
        """
        with self._changed:
            self._ahead.load_state_dict(state, workflow, should_accept, self.engine.get_version())
            self._runner.lost_groups = LostGroups(self.failed_attempts)
            self._restore_record(state)
        self.version_changed()

    # -- for the record ------------------------------------------------------------------------------------------

    def take_ended(self) -> list[Ended]:
        """Return the groups to train on that were lost or consumed since the last call, if the options keep them."""
        with self._changed:
            found, self._runner.ended = self._runner.ended, []
        return found

    def take_all(self, reason: str) -> list[Ended]:
        """Return what `take_ended` returns, and the groups to train on that have not ended, as aborted. They go on.

        Args:
            reason: why they will not be trained on.
        """
        with self._changed:  # once for both: a group that ends in between would be in neither
            groups = [group for queue in (self._now, self._ahead) for group in queue.groups.values()]
            return [*self.take_ended(), *(group.ended("aborted", reason) for group in groups)]

    def give_up_consumed(self, reason: str) -> None:
        """Call the groups aborted that were consumed since `take_ended`: they will not be trained on.

        Args:
            reason: why.
        """
        with self._changed:
            self._runner.ended = [
                replace(group, status="aborted", reason=reason) if group.status is None else group
                for group in self._runner.ended
            ]

    def record_state(self) -> dict[str, Any]:
        """Return the number of submitted groups, and those that `take_ended` has not returned yet, as plain values."""
        with self._changed:
            return {"num_ids": self._num_submitted, "ended": [group.state_dict() for group in self._runner.ended]}

    def load_record_state(self, state: Mapping[str, Any], reason: str) -> None:
        """Continue the numbers and the record of a state. Its groups do not go on: they count as aborted.

        Args:
            state: what `state_dict` or `record_state` returned, with further groups.
            reason: why the groups do not go on.
        """
        with self._changed:
            self._restore_record(state)
            if self.options.keep_ended:
                self._runner.ended += [aborted(saved, reason) for saved in state["groups"] if "id" in saved]

    def _restore_record(self, state: Mapping[str, Any]) -> None:
        self._num_submitted = state.get("num_ids", 0)
        if self.options.keep_ended:
            self._runner.ended = [Ended.from_state(kept) for kept in state.get("ended", ())]

    def close(self) -> None:
        """Cancel running groups and end the thread; the last collector ends the reward processes, too. Idempotent."""
        self._runner.close()
        _open_collectors.discard(self)
        if not _open_collectors:
            close_shared_pool()

    # -- steps of the calls above --------------------------------------------------------------------------------

    def _submit(
        self,
        queue: Queue,
        items: Sequence[Item],
        workflow: RolloutWorkflow,
        group_size: int = 1,
        accept: ShouldAccept | None = None,
        first_place: int = 0,
        num_samples: int = 1,
    ) -> list[Group]:
        _check_items(items, workflow, group_size)
        with self._changed:
            position = first_place + (queue.ledger.counters.submitted if queue is self._ahead else 0)
            groups: list[Group] = []
            for index, item in enumerate(items):
                id = self._num_submitted + index
                group = Group(id, item, workflow, group_size, accept, self._seed(position + index, id))
                group.item = item.item if isinstance(item, Prompt) else item_name(item, id)
                group.first_sample = index % num_samples
                groups.append(group)
            self._num_submitted += len(items)
            self._runner.submit(queue, groups)
        return groups

    def _seed(self, position: int, id: int) -> int | None:
        """Return the seed of a group. From the engine's seed, each group gets another one, whatever its position."""
        if self.options.seed is not None:
            return group_seed(self.options.seed, self.engine.get_version(), position)
        return group_seed(getattr(self.engine, "seed", None), -1, id)

    def _next_items(self) -> Sequence[Item]:
        items = next(self._source)
        if not isinstance(items, Mapping):
            self._ahead.ledger.begin(len(items), self.engine.get_version())
            return items
        if self._ahead.ledger.batch_size is None:
            raise ConfigError("the loader yields single items: set consumer_batch_size, or let it yield lists of items")
        return [items]


def _collected(groups: Sequence[Group], batch: TensorDict | None) -> Collected:
    lost = [group for group in groups if group.reason is not None]
    error = next((group.error for group in lost if group.error is not None), None)
    return Collected(batch, len(groups), Counter(group.reason or "" for group in lost), error)


def _evaluated(group: Group, number: int, group_size: int) -> Ended:
    """Return an episode of an evaluation; `number` is its place among all episodes."""
    status = "evaluated" if group.reason is None else status_of(group.reason, group.error)
    return replace(group.ended(status, group.reason or ""), group=number // group_size)


def _check_items(items: Sequence[Any], workflow: Any, group_size: int) -> None:
    """Check that groups can be made of these items.

    Raises:
        ConfigError: The workflow is no RolloutWorkflow, or the group size is less than 1.
        DataError: There are no items, or an item is no mapping.
    """
    if not isinstance(workflow, RolloutWorkflow):
        raise ConfigError(f"workflow={workflow!r}: expected an instance of a RolloutWorkflow")
    if group_size < 1:
        raise ConfigError(f"group_size={group_size}: expected at least 1")
    if not len(items):
        raise DataError("the batch of data items is empty; expected at least one")
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise DataError(f"data item {index} is {type(item).__name__}: expected a mapping")


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over a loader again and again.

    Yields:
        What the loader yields.

    Raises:
        DataError: The loader yields nothing.
    """
    while True:
        is_empty = True
        for items in loader:
            is_empty = False
            yield items
        if is_empty:
            raise DataError("the loader has nothing (more) to yield; give one that can be iterated again")
