"""The collector: runs workflows in the background of the training program, and returns whole groups.

    caller's thread                       the runner's thread, one event loop (`runner.py`)
    submit ──> waiting ──start───────> running: episodes, each attempted until it succeeds or has no attempt left
    wait   <── ready   <──accept──────    │
               lost, with a reason   <────┘ failed, returned None, not accepted, too old, cancelled, ...

The ledger (`ledger.py`) decides, the runner acts, and callers wait. Three loops turn:

    loop                    consumes                  waits for                     is unblocked by
    GroupRunner._admit      waiting groups, in order  room in the ledger            a submission, the end of a group,
                                                                                    a new version, the end of a pause
    _finish (collect)       exactly its own groups    the end of the last one       the runner, a time-out
    AheadOfTraining.next    the oldest ready groups   a batch that the ledger lets  the runner, a time-out, a group that
      (wait, prepare_batch)                            it consume                    holds up the batch for too long

`prepare_batch` also submits items while it waits, so that as many groups wait as a batch has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict

from rlite.data.prompts import Prompt, item_name
from rlite.errors import ConfigError, DataError, EvaluationInterrupted, RolloutError
from rlite.observability import stats_tracker
from rlite.rollout.collector.ahead import raise_late
from rlite.rollout.collector.bookkeeping import Bookkeeping, Collected
from rlite.rollout.collector.ended import Ended
from rlite.rollout.collector.lost_groups import CANCELLED, NOT_ACCEPTED, Losses, Selection
from rlite.rollout.collector.runner import Group, Item, Queue, ShouldAccept
from rlite.rollout.episode import group_seed
from rlite.rollout.trajectories import pad_checked
from rlite.rollout.workflow import RolloutWorkflow
from rlite.runtime.event_loop import ABANDONED, CLOSE_TIMEOUT, deadline_after


class RolloutCollector(Bookkeeping):
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
            finished = self._finish(self._now, groups, timeout)
        batch = self._batch(finished) if finished else None
        losses = [group.loss for group in groups if group.loss is not None]
        error = next((loss.error for loss in losses if loss.error is not None), None)
        return Collected(batch, len(groups), Counter(loss.reason for loss in losses), error)

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
                self._finish(self._tests, groups, timeout, is_interrupted)
        except EvaluationInterrupted:
            with self._changed:
                self._num_submitted = groups[0].id
            raise
        return [evaluated(group, number, group_size) for number, group in enumerate(groups)]

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
            return self._batch(self._pipeline.next(count, timeout, lambda: len(self._ahead.groups) < count))

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
                self._submit(self._ahead, self._pipeline.next_items(loader), workflow, group_size, should_accept)

        refill()
        assert ledger.batch_size is not None
        with self._reporting("rollout"):
            return self._batch(self._pipeline.next(ledger.batch_size, timeout, is_short, refill))

    def version_changed(self) -> None:
        """Read the engine's policy version now, and start and drop groups accordingly."""
        self._runner.admit()

    # -- what a step asks for -------------------------------------------------------------------------------------

    @property
    def first_losses(self) -> Mapping[str, str]:
        """The first reason of each cause, with its row, by the cause as `lost_groups.cause_of` returns it."""
        with self._changed:
            return dict(self._runner.first_losses)

    def take_selection(self) -> Selection:
        """Return what failures have done to the answers of the batches since the last call."""
        with self._changed:
            found, self._selection = self._selection, Selection()
        return found

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
                name = item.item if isinstance(item, Prompt) else item_name(item, id)
                seed = self._seed(position + index, id)
                groups.append(Group(id, item, workflow, group_size, accept, seed, name, index % num_samples))
            self._num_submitted += len(items)
            self._runner.submit(queue, groups)
        return groups

    def _seed(self, position: int, id: int) -> int | None:
        """Return the seed of a group. From the engine's seed, each group gets another one, whatever its position."""
        if self.options.seed is not None:
            return group_seed(self.options.seed, self.engine.get_version(), position)
        return group_seed(getattr(self.engine, "seed", None), -1, id)

    def _finish(
        self,
        queue: Queue,
        groups: Sequence[Group],
        timeout: float | None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> list[Group]:
        """Wait until all of these groups have ended, and consume those that are not lost.

        If the wait fails, all groups are cancelled. Groups to train on must have the same keys and types.

        Args:
            queue: holds the groups.
            groups: in the order of their submission.
            timeout: in seconds; None sets no limit.
            is_interrupted: becomes true when the wait is to end early.

        Returns:
            The groups that are not lost.

        Raises:
            CallTimeout: Some groups are late; the error names them.
            EvaluationInterrupted: The wait was interrupted.
            RolloutError: The run was stopped.
        """
        unfinished = list(groups)

        def is_settled() -> bool:
            while unfinished and unfinished[-1].has_ended:  # one look per change, not one at each group
                unfinished.pop()
            return not unfinished

        try:
            if not self._runner.wait_until(lambda: is_settled() or is_interrupted(), deadline_after(timeout)):
                raise_late([group for group in groups if not group.has_ended], timeout)
            if not is_settled():
                raise EvaluationInterrupted("the evaluation was interrupted")
        except BaseException as error:
            with self._changed:
                for group in groups:
                    if group.id in queue.groups:
                        self._runner.drop(queue, group, CANCELLED)
            if isinstance(error, EvaluationInterrupted):  # the caller goes on: nothing may be left in the engine
                self._runner.wait_until(
                    lambda: all(each.task is None for each in groups), deadline_after(CLOSE_TIMEOUT)
                )
            raise
        with self._changed:
            if queue.is_training:
                self._runner.drop_misfits(queue, [group for group in groups if group.trajectories is not None])
            finished = [group for group in groups if group.trajectories is not None]
            self._runner.consume(queue, finished)
        return finished

    def _batch(self, groups: Sequence[Group]) -> TensorDict:
        """Return consumed groups, of which there is at least one, as a padded batch, and record its statistics."""
        rows = [row for group in groups for row in group.trajectories or ()]
        batch = pad_checked(rows, [group.id for group in groups for _ in group.trajectories or ()])
        with self._changed:
            self._report(batch, groups)
        return batch

    def _report(self, batch: TensorDict, groups: Sequence[Group]) -> None:
        """Record statistics of a batch, and of failures and lost groups since the batch before. Needs the lock."""
        losses, self._runner.losses = self._runner.losses, Losses()
        attempts = self._runner.failed_attempts.copy()
        failed, self._num_reported = attempts - self._num_reported, attempts
        redrawn = Counter(group.redrawn for group in groups if group.redrawn)
        kept = Counter(batch["loss_mask"].sum(-1).tolist()) if "loss_mask" in batch else Counter[int]()
        selection = self._selection
        selection.num_groups += len(groups)
        selection.num_attempts += failed.total() + sum(group.size for group in groups)
        selection.failed_attempts += failed
        selection.redrawn += redrawn
        selection.failed += losses.failed
        selection.kept += kept
        num_refused = losses.kinds.pop(NOT_ACCEPTED.kind, 0)  # should_accept is there to refuse groups
        with stats_tracker.scope("rollout"):
            stats_tracker.count(num_groups=len(groups), num_lost=losses.kinds.total(), num_refused=num_refused)
            stats_tracker.count(**{f"lost/{kind}": number for kind, number in losses.kinds.items()})
            for name, kinds in (("failed_attempts", failed), ("redrawn", redrawn)):
                stats_tracker.count(**stats_tracker.by_kind(name, kinds))
            stats_tracker.scalar(num_abandoned=len(ABANDONED))
            if "versions" in batch:
                # a sequence is as old as its oldest token
                version, made = self.engine.get_version(), batch["versions"]
                oldest = made.masked_fill(made < 0, torch.iinfo(torch.int64).max).amin(1)
                stats_tracker.scalar(staleness=(version - oldest.clamp(max=version)).double().mean())
            if losses.too_old:
                stats_tracker.count(num_dropped_too_old=len(losses.too_old))
            if losses.too_old or losses.failed:
                stats_tracker.scalar(**losses.metrics(kept))

    @contextmanager
    def _reporting(self, what: str, groups: Sequence[Group] = ()) -> Iterator[None]:
        """Let `progress` report a call inside of the block. Without groups, it waits for groups that run ahead."""
        self._waited_for = what, groups
        try:
            yield
        finally:
            self._waited_for = None


def evaluated(group: Group, number: int, group_size: int) -> Ended:
    """Return an episode of an evaluation.

    Args:
        group: holds the episode alone.
        number: place of the episode among all.
        group_size: episodes per item.
    """
    ended = group.ended("evaluated") if group.loss is None else group.ended(group.loss.status, group.loss.reason)
    return replace(ended, group=number // group_size)


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
