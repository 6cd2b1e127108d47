"""The consumer: waits in the callers' threads for groups to end, and makes batches of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn

from tensordict import TensorDict

from rlite.errors import CallTimeout, EvaluationInterrupted
from rlite.rollout.collector.group import Group, Queue
from rlite.rollout.collector.lost_groups import CANCELLED, TOO_OLD
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.runner import GroupRunner
from rlite.rollout.trajectories import layout, pad_checked
from rlite.rollout.workflow import RolloutError
from rlite.runtime.event_loop import CLOSE_TIMEOUT
from rlite.types import AsyncInference

NUM_NAMED = 5
"""groups or reasons that a message lists"""


class GroupConsumer:
    """Takes ended groups out of the queues, in the callers' threads.

    It consumes ready groups. It waits for groups to end, and for a batch that the ledger lets it consume. It is
    unblocked by the runner, at every change, and by the time-out of a group that holds up a batch.

    Args:
        engine: knows the policy version.
        options: time-out of groups that hold up a batch.
        runner: runs the groups.
    """

    def __init__(self, engine: AsyncInference, options: CollectorOptions, runner: GroupRunner) -> None:
        self._engine, self._options, self._runner = engine, options, runner

    def finish(
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
            if not self._runner.wait_until(lambda: is_settled() or is_interrupted(), _deadline(timeout)):
                _raise_late([group for group in groups if not group.has_ended], timeout)
            if not is_settled():
                raise EvaluationInterrupted("the evaluation was interrupted")
        except BaseException as error:
            with self._runner.changed:
                for group in groups:
                    if group.id in queue.groups:
                        self._runner.drop(queue, group, CANCELLED)
            if isinstance(error, EvaluationInterrupted):  # the caller goes on: nothing may be left in the engine
                self._runner.wait_until(lambda: all(each.task is None for each in groups), _deadline(CLOSE_TIMEOUT))
            raise
        with self._runner.changed:
            if queue.is_training:
                self._drop_misfits(queue, [group for group in groups if group.trajectories is not None])
            finished = [group for group in groups if group.trajectories is not None]
            self._consume(queue, finished)
        return finished

    def next_batch(
        self,
        queue: Queue,
        count: int,
        timeout: float | None,
        is_short: Callable[[], bool],
        refill: Callable[[], None] | None = None,
    ) -> TensorDict:
        """Return the oldest groups as a padded batch, as soon as the ledger allows it.

        Args:
            queue: holds the groups.
            count: groups of the batch.
            timeout: in seconds; None sets no limit.
            is_short: whether too few groups are submitted for the wait to make sense.
            refill: submits more; without it, too few groups are an error.

        Raises:
            CallTimeout: Some groups are late; the error names them.
            RolloutError: Fewer groups remain than requested, or the run was stopped.
        """
        deadline = _deadline(timeout)
        while (batch := self._take(queue, count)) is None:
            if not self._runner.wait_until(
                lambda: self._is_ready(queue, count) or is_short() or not self._can_progress(queue),
                deadline,
                is_due=lambda: bool(self._held_up_by(queue, count)),
            ):
                _raise_late(queue.unfinished(), timeout)
            if refill is not None and is_short():
                refill()  # without the lock: it may iterate over the caller's loader
                continue
            with self._runner.changed:
                is_hopeless = not (self._can_progress(queue) or self._is_ready(queue, count))
                if is_short():
                    is_hopeless = refill is None
                if is_hopeless:
                    raise self._too_few_error(queue, count)
        return batch

    def batch(self, groups: Sequence[Group]) -> TensorDict:
        """Return consumed groups as a batch to train on, and record its statistics."""
        batch = join(groups)
        with self._runner.changed:
            self._runner.report(batch, groups)
        return batch

    def _take(self, queue: Queue, count: int) -> TensorDict | None:
        """Return a batch of the oldest groups, if they may be consumed now."""
        with self._runner.changed:
            self._runner.drop_too_old()
            for group in self._held_up_by(queue, count):
                self._runner.drop(queue, group, f"{TOO_OLD}: it held up a batch for {self._options.stale_timeout:g} s")
            if not self._is_ready(queue, count):
                return None
            groups = [queue.groups[id] for id in queue.ledger.oldest(count)]
            if self._drop_misfits(queue, groups):
                return None
            self._consume(queue, groups)
        return self.batch(groups)

    def _consume(self, queue: Queue, groups: Sequence[Group]) -> None:
        queue.consume(groups, self._engine.get_version())
        for group in groups:
            self._runner.keep(queue, group, status=None)

    def _is_ready(self, queue: Queue, count: int) -> bool:
        return queue.ledger.is_ready(count, self._engine.get_version())

    def _held_up_by(self, queue: Queue, count: int) -> list[Group]:
        """Return the groups for which a batch has waited until their time-out."""
        limit = time.monotonic() - self._options.stale_timeout
        holding = [queue.groups[id] for id in queue.ledger.holding(count, self._engine.get_version())]
        return [group for group in holding if group.started is not None and group.started < limit]

    def _can_progress(self, queue: Queue) -> bool:
        counters = queue.ledger.counters
        can_start = counters.waiting > 0 and queue.ledger.room(self._engine.get_version()) > 0
        return counters.running > 0 or self._runner.is_paused or can_start

    def _drop_misfits(self, queue: Queue, groups: Sequence[Group]) -> bool:
        """Drop the groups whose keys or types differ from those of most groups.

        Returns:
            True if there are any.
        """
        layouts = [layout(group.trajectories[0]) if group.trajectories else frozenset() for group in groups]
        common = Counter(layouts).most_common(1)[0][0] if layouts else frozenset()
        misfits = [(group, own ^ common) for group, own in zip(groups, layouts, strict=True) if own != common]
        for group, odd in misfits:
            keys = ", ".join(sorted({key for key, *_ in odd}))
            self._runner.drop(queue, group, f"unlike the others of its batch in {keys}")
        return bool(misfits)

    def _too_few_error(self, queue: Queue, count: int) -> RolloutError:
        """Return an error that says why fewer than `count` groups remain."""
        counters, lost = queue.ledger.counters, queue.ledger.lost
        found = f"{count} groups were asked for, {counters.ready} are ready"
        if len(queue.groups) < count:
            rest = ", and others" if len(lost) > NUM_NAMED else ""
            dropped = f"; dropped so far: {dict(lost.most_common(NUM_NAMED))}{rest}" if lost else ""
            return RolloutError(f"{found} and {counters.running + counters.waiting} under way{dropped}; submit more")
        return RolloutError(
            f"{found} and no more may start: at policy version {self._engine.get_version()} with "
            f"max_head_offpolicyness={self._options.max_head_offpolicyness} and batches of {queue.ledger.batch_size}, "
            f"{counters.accepted} groups are as many as may have been generated. Sync weights after each batch "
            "(the version counts the updates), or raise max_head_offpolicyness"
        )


def join(groups: Sequence[Group]) -> TensorDict:
    """Return the trajectories of finished groups, of which there is at least one, as one padded batch."""
    rows = [row for group in groups for row in group.trajectories or ()]
    return pad_checked(rows, [group.id for group in groups for _ in group.trajectories or ()])


def _raise_late(late: Sequence[Group], timeout: float | None) -> NoReturn:
    names = ", ".join(map(str, late[:NUM_NAMED])) + (", ..." if len(late) > NUM_NAMED else "")
    raise CallTimeout(
        f"{len(late)} groups had not ended after {timeout:g} s: {names}", tuple(f"group {group.id}" for group in late)
    )


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout
