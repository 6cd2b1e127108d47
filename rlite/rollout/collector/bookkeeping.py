"""The parts of a collector, its reports, and its state for a restart and for the record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensordict import TensorDict

from rlite.rollout.collector.ahead import AheadOfTraining
from rlite.rollout.collector.ended import Ended
from rlite.rollout.collector.ledger import RolloutCounters, RolloutLedger
from rlite.rollout.collector.lost_groups import Selection
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.runner import Group, GroupRunner, Queue, ShouldAccept
from rlite.rollout.collector.saved import aborted, ended_state, queue_state, restore_queue, saved_ended
from rlite.rollout.workflow import RolloutWorkflow
from rlite.runtime.sandbox.pool import close_shared_pool
from rlite.types import AsyncInference

_open_collectors: set[Bookkeeping] = set()


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

    @classmethod
    def of(cls, what: str, groups: Sequence[Group], num_episodes: int) -> RolloutProgress:
        """Return the counts of groups, which may run meanwhile.

        Args:
            what: "rollout" or "evaluation".
            groups: groups of the call.
            num_episodes: episodes that the call waits for.
        """
        finished = sum(group.size if group.has_ended else group.num_finished for group in groups)
        num_tokens = sum(episode.num_tokens for group in groups for episode in group.episodes)
        return cls(what, num_episodes, min(finished, num_episodes), num_tokens)

    def __str__(self) -> str:
        return f"{self.what}: {self.num_finished} of {self.num_episodes} episodes, {self.num_tokens:,} tokens"


class Bookkeeping:
    """The parts of a collector, and its books. `RolloutCollector` adds the calls that run groups.

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
        self._pipeline = AheadOfTraining(self._ahead, self._runner, engine, self.options)
        self._changed, self._num_submitted = self._runner.changed, 0
        self._waited_for: tuple[str, Sequence[Group]] | None = None
        self._selection = Selection()
        self._num_reported: Counter[str] = Counter()
        """failed attempts up to the last batch, by kind"""
        _open_collectors.add(self)

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
        return RolloutProgress.of(what, groups, sum(group.size for group in groups[:size]))

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


def evaluated(group: Group, number: int, group_size: int) -> Ended:
    """Return an episode of an evaluation.

    Args:
        group: holds the episode alone.
        number: place of the episode among all.
        group_size: episodes per item.
    """
    status, reason = ("evaluated", "") if group.loss is None else (group.loss.status, group.loss.reason)
    return replace(Ended.of(group, status, reason), group=number // group_size)
