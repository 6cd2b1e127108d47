"""What became of the groups of a call: a batch, what is told of it, or the error that says why there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict

from rlite.errors import CallTimeout
from rlite.observability import stats_tracker
from rlite.rollout.collector.group import Group, Lane, response_lengths
from rlite.rollout.collector.reasons import NOT_ACCEPTED, TOO_OLD, in_a_line, kind_of
from rlite.rollout.trajectories import pad_trajectories
from rlite.rollout.workflow import RolloutError

NUM_NAMED = 5
"""groups that a message lists by name"""


@dataclass(frozen=True)
class Collected:
    """The finished groups of one call as a batch, and the lost ones by reason."""

    batch: TensorDict | None
    """rows of the groups that were finished; None if there are none"""
    num_groups: int
    """groups that were asked for"""
    lost: Counter[str]
    """groups that were not finished, by reason"""
    error: BaseException | None = None
    """what one of them raised"""

    @classmethod
    def of(cls, groups: Sequence[Group], batch: TensorDict | None) -> Collected:
        """Count the groups, all of which have ended, beside the batch of those that were finished."""
        lost = [group for group in groups if group.reason is not None]
        error = next((group.error for group in lost if group.error is not None), None)
        return cls(batch, len(groups), Counter(group.reason or "" for group in lost), error)

    @property
    def reason(self) -> str:
        """The most frequent reason for a loss."""
        return self.lost.most_common(1)[0][0]


def joined(groups: Sequence[Group], ids: Mapping[int, int] | None = None) -> TensorDict:
    """The trajectories of finished groups as one padded batch, with the groups' numbers, or those that `ids` names."""
    rows = [row for group in groups for row in group.trajectories or ()]
    numbers = [group.id if ids is None else ids[group.id] for group in groups for _ in group.trajectories or ()]
    return pad_trajectories(rows, numbers)


class Losses:
    """The groups to train on that were lost since the last batch."""

    def __init__(self, num_failed_attempts: int = 0) -> None:
        self.first: dict[str, str] = {}
        """what the first loss of each kind said"""
        self._lost: Counter[str] = Counter()
        self._num_failed_attempts = num_failed_attempts
        self._dropped: list[Counter[int]] = []

    def add(self, group: Group, reason: str) -> None:
        """Count a group that is lost."""
        self._lost[kind_of(reason)] += 1
        self.first.setdefault(kind_of(reason), in_a_line(reason))
        if reason.startswith(TOO_OLD):
            self._dropped.append(group.tokens)  # what is cancelled may report a few more

    def report(self, batch: TensorDict, num_groups: int, version: int, num_failed_attempts: int) -> None:
        """Record how many groups a batch has and how many were lost before it, and how old it is; begin anew."""
        num_failed = num_failed_attempts - self._num_failed_attempts
        num_refused = self._lost.pop(kind_of(NOT_ACCEPTED), 0)  # should_accept did what it is there for
        with stats_tracker.scope("rollout"):
            stats_tracker.count(num_groups=num_groups, num_lost=self._lost.total(), num_failed_attempts=num_failed)
            stats_tracker.count(num_refused=num_refused, **{f"lost/{kind}": n for kind, n in self._lost.items()})
            _report_age(batch, version, self._dropped)
        self._lost, self._num_failed_attempts, self._dropped = Counter(), num_failed_attempts, []


def _report_age(batch: TensorDict, version: int, dropped: Sequence[Counter[int]]) -> None:
    """Record how many updates late a batch is consumed, and at which lengths too old groups were dropped."""
    if "versions" in batch:
        # a sequence is as old as its oldest token
        made = batch["versions"].masked_fill(batch["versions"] < 0, torch.iinfo(torch.int64).max).amin(1)
        stats_tracker.scalar(staleness=(version - made.clamp(max=version)).double().mean())
    if dropped:
        lengths, kept = [tokens for group in dropped for tokens in group.values()], response_lengths([batch])
        stats_tracker.count(num_dropped_too_old=len(dropped))
        stats_tracker.scalar(
            length_dropped=sum(lengths) / max(1, len(lengths)),
            length_kept=sum(kept) / max(1, len(kept)),
        )


def late_error(late: Sequence[Group], timeout: float | None) -> CallTimeout:
    """Name the groups that had not ended after `timeout` seconds."""
    names = ", ".join(map(str, late[:NUM_NAMED])) + (", ..." if len(late) > NUM_NAMED else "")
    return CallTimeout(
        f"{len(late)} groups had not ended after {timeout:g} s: {names}",
        tuple(f"group {group.id}" for group in late),
    )


def too_few_error(
    lane: Lane, count: int, lost: Counter[str], version: int, max_head_offpolicyness: int
) -> RolloutError:
    """Say why `count` groups will never be ready: too few are under way, or no more may start."""
    counters = lane.ledger.counters
    found = f"{count} groups were asked for, {counters.ready} are ready"
    if len(lane.groups) < count:
        rest = ", and others" if len(lost) > NUM_NAMED else ""
        dropped = f"; dropped so far: {dict(lost.most_common(NUM_NAMED))}{rest}" if lost else ""
        return RolloutError(f"{found} and {counters.running + counters.waiting} under way{dropped}; submit more")
    return RolloutError(
        f"{found} and no more may start: at policy version {version} with "
        f"max_head_offpolicyness={max_head_offpolicyness} and batches of {lane.ledger.batch_size}, "
        f"{counters.accepted} groups are as many as may have been generated. Sync weights after each batch "
        "(the version counts the updates), or raise max_head_offpolicyness"
    )


def stopping_error(why: str, cause: BaseException | None = None) -> RolloutError:
    """Say why the rollouts were stopped."""
    error = RolloutError(f"the rollouts were stopped: {why}")
    error.__cause__ = cause
    return error
