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

`prepare_batch` also submits items while it waits, so that as many groups wait as a batch has. It and `wait` are in
`calls.py`, the third loop is in `ahead.py`: a step that generates in turns with training enters neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict

from rlite.data.packs import pad_checked
from rlite.data.prompts import Prompt, item_name
from rlite.errors import ConfigError, DataError, EvaluationInterrupted
from rlite.observability import stats_tracker
from rlite.rollout.collector.ahead import make_queues, raise_late
from rlite.rollout.collector.ended import Collected
from rlite.rollout.collector.lost_groups import CANCELLED, NOT_ACCEPTED, Losses, Selection
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.runner import Group, GroupRunner, Item, Queue, ShouldAccept
from rlite.rollout.episode import group_seed
from rlite.rollout.workflow import RolloutWorkflow
from rlite.runtime.event_loop import ABANDONED, CLOSE_TIMEOUT, deadline_after
from rlite.types import AsyncInference


class GroupCollector:
    """Submits groups, waits for them and makes batches of them. `RolloutCollector` has all its calls.

    Args:
        engine: generates, and knows the policy version.
        options: limits, time-outs and retries.
    """

    def __init__(self, engine: AsyncInference, options: CollectorOptions | None = None) -> None:
        self.engine, self.options = engine, options or CollectorOptions()
        queues = self._now, self._tests, self._ahead = make_queues(self.options, engine.get_version())
        self._runner = GroupRunner(engine, self.options, queues)
        self._changed, self._num_submitted = self._runner.changed, 0
        self._waited_for: tuple[str, Sequence[Group]] | None = None
        self._selection = Selection()
        self._num_reported: Counter[str] = Counter()
        """failed attempts up to the last batch, by kind"""

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

    def version_changed(self) -> None:
        """Read the engine's policy version now, and start and drop groups accordingly."""
        self._runner.admit()

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
        check_items(items, workflow, group_size)
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

        `timeout`: in seconds; None sets no limit. Returns the groups that are not lost.
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


def check_items(items: Sequence[Any], workflow: Any, group_size: int) -> None:
    """Check that groups can be made of these items."""
    if not isinstance(workflow, RolloutWorkflow):
        raise ConfigError(f"workflow={workflow!r}: expected an instance of a RolloutWorkflow")
    if group_size < 1:
        raise ConfigError(f"group_size={group_size}: expected at least 1")
    if not len(items):
        raise DataError("the batch of data items is empty; expected at least one")
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise DataError(f"data item {index} is {type(item).__name__}: expected a mapping")
