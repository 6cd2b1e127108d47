"""The staleness ledger: how far generation may run ahead of training. Pure: no clock, engine or thread.

Everything is counted in groups. A group's life:

    submit ──> waiting ──start──> running ──accept──> ready ──consume──> consumed
                  └───────────────────┴───────────────┴──drop──> lost, with a reason

The age of a running group is the policy version at its start. The age of a ready group is the version of its oldest
token, which is never lower. At version v a group of age a is consumed v - a updates late, and `max_head_offpolicyness`
bounds this number. Three rules keep the bound:

- admission: `capacity` lets as many groups run as batches can consume before the groups are too old;
- consumption, oldest first: with on_stale="wait", a batch waits for older groups that still run, if the batches after
  it could not consume them in time. The next update waits, too;
- expiry: groups that are too old are dropped. With "wait" this happens if the version moves without a batch, or if a
  group holds up a batch for longer than `stale_timeout`; with "drop" it happens to slow groups.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from rlite.errors import RliteError

MAX_REASONS = 100
OTHER_REASONS = "other reasons"
"""reason under which groups are counted once there are MAX_REASONS"""

OnStale = Literal["wait", "drop"]


@dataclass(frozen=True)
class RolloutCounters:
    """Number of groups by state."""

    submitted: int = 0
    waiting: int = 0
    running: int = 0
    ready: int = 0
    consumed: int = 0
    rejected: int = 0
    """lost, in any state"""

    @property
    def accepted(self) -> int:
        """Ready or consumed."""
        return self.ready + self.consumed


def capacity(
    *,
    running: int,
    accepted: int,
    version: int,
    max_concurrent: int,
    consumer_batch_size: int,
    max_head_offpolicyness: int,
) -> int:
    """Return how many more groups may start now; negative if too many did.

    The formula of AReaL (arXiv:2505.24298) is

    min(max(1, max_concurrent) - running, (eta + version + 1) max(1, batch) - (accepted + running)),

    which is the paper's floor((N - 1) / B) <= i + eta with N groups started, batches of B, version i. A group that
    starts now, consumed in the order of the starts, goes into the update that makes version i + eta + 1 at the latest,
    and is then at most eta versions old.

    Args:
        running: groups that run.
        accepted: groups that are ready or consumed.
        version: current policy version, i.
        max_concurrent: groups that may run at a time.
        consumer_batch_size: groups that one update consumes, B.
        max_head_offpolicyness: versions between a group's age and its consumption, eta.
    """
    by_concurrency = max(1, max_concurrent) - running
    by_staleness = (max_head_offpolicyness + version + 1) * max(1, consumer_batch_size)
    return min(by_concurrency, by_staleness - (accepted + running))


class RolloutLedger:
    """Knows which groups wait, run and are ready, and decides what may happen to them. Groups are numbers here.

    Every decision takes the policy version as an argument, and costs O(max_head_offpolicyness).

    Args:
        max_concurrent: groups that run at a time; None is no limit.
        max_head_offpolicyness: updates between a group's age and its consumption, at most.
        on_stale: how to treat slow groups that would become too old.
        batch_size: groups that one update consumes. None: unknown yet, and only `max_concurrent` is a limit.
        version: policy version at the beginning; one batch went into each update before.
    """

    def __init__(
        self,
        *,
        max_concurrent: int | None = None,
        max_head_offpolicyness: int = 0,
        on_stale: OnStale = "wait",
        batch_size: int | None = None,
        version: int = 0,
    ) -> None:
        self._max_concurrent, self._eta, self._on_stale = max_concurrent, max_head_offpolicyness, on_stale
        self._waiting: dict[int, None] = {}
        self._running: dict[int, int] = {}
        self._ready: dict[int, int] = {}
        self._running_at: Counter[int] = Counter()
        self._ready_at: Counter[int] = Counter()
        self._consumed = 0
        self._consumed_at = (version, 0)
        self.lost: Counter[str] = Counter()
        """groups that were dropped, by reason"""
        self.batch_size: int | None = None
        if batch_size is not None:
            self.begin(batch_size, version)

    def begin(self, batch_size: int, version: int) -> None:
        """Set the number of groups that one update consumes, unless it is known.

        The same number counts as consumed for each update until now.
        """
        if self.batch_size is None:
            self.batch_size = batch_size
            self._consumed = max(self._consumed, version * batch_size)

    @property
    def counters(self) -> RolloutCounters:
        """Number of groups by state."""
        waiting, running, ready, lost = len(self._waiting), len(self._running), len(self._ready), self.lost.total()
        submitted = waiting + running + ready + self._consumed + lost
        return RolloutCounters(submitted, waiting, running, ready, self._consumed, lost)

    # -- what happened -------------------------------------------------------------------------------------------

    def submit(self, group: int) -> None:
        """Add a group that waits to start."""
        self._waiting[group] = None

    def start(self, version: int) -> int:
        """Return the group that has waited longest, which runs from now on.

        Raises:
            RliteError: No group waits.
        """
        if not self._waiting:
            raise RliteError("no group waits to be started")
        group = next(iter(self._waiting))
        del self._waiting[group]
        self._running[group] = version
        self._running_at[version] += 1
        return group

    def accept(self, group: int, version: int | None = None) -> None:
        """Mark a running group as ready. `version` is its oldest token's, or None for the version at its start."""
        age = self._leave(self._running, self._running_at, group)
        self.restore_ready(group, age if version is None else version)

    def restore_ready(self, group: int, age: int) -> None:
        """Add a ready group that an earlier ledger has started."""
        self._ready[group] = age
        self._ready_at[age] += 1

    def drop(self, group: int, reason: str) -> None:
        """Mark a group in any state as lost. Its place is free again."""
        if group in self._waiting:
            del self._waiting[group]
        elif group in self._running:
            self._leave(self._running, self._running_at, group)
        else:
            self._leave(self._ready, self._ready_at, group)
        # reasons quote the data: a long run keeps some of them and counts them all
        is_known = reason in self.lost or len(self.lost) < MAX_REASONS
        self.lost[reason if is_known else OTHER_REASONS] += 1

    def consume(self, groups: Iterable[int], version: int) -> None:
        """Mark ready groups as consumed."""
        for group in groups:
            self._leave(self._ready, self._ready_at, group)
            self._consumed += 1
            self._consumed_at = (version, self._consumed_in(version) + 1)

    # -- what may happen -----------------------------------------------------------------------------------------

    def room(self, version: int) -> int:
        """Return how many more groups may start now."""
        running = len(self._running)
        if self.batch_size is None:
            return sys.maxsize if self._max_concurrent is None else self._max_concurrent - running
        under_way = running + len(self._ready)
        by_formula = capacity(
            running=running,
            accepted=len(self._ready) + self._consumed,
            version=version,
            max_concurrent=self._max_concurrent or self.batch_size,
            consumer_batch_size=self.batch_size,
            max_head_offpolicyness=self._eta,
        )
        # each version has one batch: a version that moved without consuming one cannot be made up for
        return min(by_formula, self._left_in(version) + self._eta * self.batch_size - under_way)

    def is_ready(self, count: int, version: int) -> bool:
        """Return whether a batch of `count` groups may be consumed now."""
        return len(self._ready) >= count and self._left_behind(count, version) is None

    def oldest(self, count: int) -> list[int]:
        """Return the oldest ready groups, from which a batch is made, in the order of their numbers."""
        ready = sorted(self._ready, key=lambda group: (self._ready[group], group))
        return sorted(ready[:count])

    def holding(self, count: int, version: int) -> list[int]:
        """Return the running groups for which a batch of `count` waits, although as many others are ready."""
        age = self._left_behind(count, version) if len(self._ready) >= count else None
        return [] if age is None else [group for group, own in self._running.items() if own <= age]

    def too_old(self, version: int) -> list[int]:
        """Return the groups, running or ready, that may no longer be consumed."""
        if self.batch_size is None:
            return []
        oldest = version - self._eta
        if not any(age < oldest for ages in (self._running_at, self._ready_at) for age in ages):
            return []
        return [group for groups in (self._running, self._ready) for group, age in groups.items() if age < oldest]

    def _left_behind(self, count: int, version: int) -> int | None:
        """Return the age up to which a batch would leave more running groups than later batches can take, or None.

        The groups up to age a must be consumed at version a + eta at the latest, in what is left of this version's
        batch and in one batch at each version after it.
        """
        if self.batch_size is None or self._on_stale == "drop":
            return None
        left = max(0, self._left_in(version) - count)
        running = ready = 0
        for age in sorted(self._running_at.keys() | self._ready_at.keys()):
            ready += self._ready_at[age]
            if ready >= count:  # the batch holds nothing newer: no older group can take the place of one in it
                return None
            running += self._running_at[age]
            if running > left + (age + self._eta - version) * self.batch_size:
                return age
        return None

    def _consumed_in(self, version: int) -> int:
        return self._consumed_at[1] if self._consumed_at[0] == version else 0

    def _left_in(self, version: int) -> int:
        assert self.batch_size is not None
        return max(0, self.batch_size - self._consumed_in(version))

    def _leave(self, groups: dict[int, int], ages: Counter[int], group: int) -> int:
        assert group in groups, f"group {group} is in another queue: {self.counters}"
        age = groups.pop(group)
        ages[age] -= 1
        if not ages[age]:
            del ages[age]
        return age

    # -- over a restart ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counts. The groups under way are saved by their owner."""
        return {"consumed": self._consumed, "consumed_at": list(self._consumed_at), "lost": dict(self.lost)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved counts."""
        self._consumed = int(state["consumed"])
        self._consumed_at = (int(state["consumed_at"][0]), int(state["consumed_at"][1]))
        self.lost = Counter(state["lost"])
