"""The calls of a collector: exactly these items now, to train on or to measure; or items that run ahead of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tensordict import TensorDict

from rlite.data.prompts import Prompt, item_name
from rlite.errors import ConfigError, EvaluationInterrupted, RolloutError
from rlite.rollout.collector.bookkeeping import evaluated
from rlite.rollout.collector.collector import GroupCollector, check_items
from rlite.rollout.collector.ended import Ended
from rlite.rollout.collector.runner import Item, ShouldAccept
from rlite.rollout.workflow import RolloutWorkflow


class RolloutCollector(GroupCollector):
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
        check_items(data, workflow, group_size)
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
