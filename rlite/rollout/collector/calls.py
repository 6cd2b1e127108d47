"""The calls of a collector: exactly these items now, to train on or to measure; or items that run ahead of training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensordict import TensorDict

from rlite.data.prompts import Prompt, item_name
from rlite.errors import ConfigError, EvaluationInterrupted, RolloutError
from rlite.rollout.collector.ahead import AheadOfTraining
from rlite.rollout.collector.collector import GroupCollector, check_items
from rlite.rollout.collector.ended import Ended, evaluated
from rlite.rollout.collector.ledger import RolloutCounters
from rlite.rollout.collector.lost_groups import Selection
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.runner import Item, ShouldAccept
from rlite.rollout.collector.saved import aborted, ended_state, queue_state, restore_queue, saved_ended
from rlite.rollout.workflow import RolloutWorkflow
from rlite.runtime.sandbox.pool import close_shared_pool
from rlite.types import AsyncInference

_open_collectors: set[RolloutCollector] = set()


@dataclass(frozen=True)
class RolloutProgress:
    """Counts of the episodes that a call waits for."""

    what: str
    """ "rollout" or "evaluation" """
    num_episodes: int
    """episodes of the call"""
    num_finished: int
    """episodes that have ended, lost ones included"""
    num_tokens: int
    """tokens generated so far"""

    def __str__(self) -> str:
        return f"{self.what}: {self.num_finished} of {self.num_episodes} episodes, {self.num_tokens:,} tokens"


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

    def __init__(self, engine: AsyncInference, options: CollectorOptions | None = None) -> None:
        super().__init__(engine, options)
        self._pipeline = AheadOfTraining(self._ahead, self._runner, engine, self.options)
        _open_collectors.add(self)

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
            [(reason, _)] = found.lost.most_common(1)
            raise RolloutError(f"none of {found.num_groups} groups was finished: {reason}") from found.error
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

    # -- its life, and its counts ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel running groups and end the thread; the last collector ends the reward processes, too. Idempotent."""
        self._runner.loop.close()
        _open_collectors.discard(self)
        if not _open_collectors:
            close_shared_pool()

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
        self._runner.admit()

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
    def failed_attempts(self) -> Counter[str]:
        """Number of attempts at an episode that raised, by the exception's name or the reward's outcome."""
        return self._runner.failed_attempts.copy()  # the loop counts meanwhile

    @property
    def progress(self) -> RolloutProgress | None:
        """Progress of the call that waits for episodes now; None if no call waits. Any thread may ask."""
        if (waited_for := self._waited_for) is None:
            return None
        (what, groups), size = waited_for, None
        if not groups:
            with self._changed:
                groups, size = list(self._ahead.groups.values()), self._ahead.ledger.batch_size
        num_episodes = sum(group.size for group in groups[:size])
        finished = sum(group.size if group.has_ended else group.num_finished for group in groups)
        num_tokens = sum(episode.num_tokens for group in groups for episode in group.episodes)
        return RolloutProgress(what, num_episodes, min(finished, num_episodes), num_tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return the submitted groups, finished or not, and all counts, as plain values and tensors.

        Raises:
            DataError: An item holds something else.
        """
        with self._changed:
            failed_attempts = dict(self.failed_attempts)
            return {**queue_state(self._ahead), "failed_attempts": failed_attempts, **self.record_state()}

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
            restore_queue(self._ahead, state, workflow, should_accept, self.engine.get_version())
            self._runner.failed_attempts = Counter(state["failed_attempts"])
            self._num_reported = Counter(state["failed_attempts"])
            self._restore_record(state)
        self._runner.admit()

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
            return [*self.take_ended(), *(Ended.of(group, "aborted", reason) for group in groups)]

    # -- for the record ------------------------------------------------------------------------------------------

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
            return {"num_ids": self._num_submitted, "ended": [ended_state(group) for group in self._runner.ended]}

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
            self._runner.ended = [saved_ended(kept) for kept in state.get("ended", ())]
