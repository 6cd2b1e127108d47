"""The queues of a collector, and its reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from tensordict import TensorDict

from rlite.rollout.collector.ended import Ended
from rlite.rollout.collector.ledger import RolloutLedger
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.runner import Group, Queue


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


def make_queues(options: CollectorOptions, version: int) -> tuple[Queue, Queue, Queue]:
    """Return the queues of a collector in order of precedence: groups to train on now, to measure, and run ahead.

    Args:
        options: limits on rollouts.
        version: current policy version.
    """
    limit = options.max_concurrent_rollouts
    ahead = RolloutLedger(
        max_concurrent=limit,
        max_head_offpolicyness=options.max_head_offpolicyness,
        on_stale=options.on_stale,
        batch_size=options.consumer_batch_size,
        version=version,
    )
    # no step trains while `collect` or `evaluate` waits, so that their groups do not age
    now, tests = (RolloutLedger(max_concurrent=limit) for _ in range(2))
    return Queue(now), Queue(tests, is_training=False), Queue(ahead)


def evaluated(group: Group, number: int, group_size: int) -> Ended:
    """Return an episode of an evaluation.

    Args:
        group: holds the episode alone.
        number: place of the episode among all.
        group_size: episodes per item.
    """
    loss = group.loss
    ended = Ended.of(group, "evaluated") if loss is None else Ended.of(group, loss.status, loss.reason)
    return replace(ended, group=number // group_size)
