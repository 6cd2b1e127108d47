"""How far generation may run ahead of training: counters and a formula, without a clock, an engine or a thread.

Everything is counted in groups. A group's life:

    submit ──> waiting ──start──> running ──accept──> accepted ──consume──> consumed
                                     └─────reject──> rejected (with a reason that others keep)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlite.errors import RliteError


@dataclass(frozen=True)
class RolloutCounters:
    """How many groups went where. Each transition returns new counters, or raises RliteError if it cannot be."""

    submitted: int = 0
    running: int = 0
    accepted: int = 0
    """accepted so far, consumed ones included"""
    rejected: int = 0
    """dropped so far, from waiting or from running"""
    consumed: int = 0

    def __post_init__(self) -> None:
        if min(self.waiting, self.running, self.accepted, self.rejected, self.ready, self.consumed) < 0:
            raise RliteError(f"impossible rollout counters: {self}")

    @property
    def waiting(self) -> int:
        """Submitted and not started."""
        return self.submitted - self.running - self.accepted - self.rejected

    @property
    def ready(self) -> int:
        """Accepted and not consumed."""
        return self.accepted - self.consumed

    @classmethod
    def at_version(cls, version: int, consumer_batch_size: int) -> RolloutCounters:
        """Counters of a run of which only the version is known: one batch went into each update."""
        count = version * max(1, consumer_batch_size)
        return cls(submitted=count, accepted=count, consumed=count)

    def submit(self, count: int = 1) -> RolloutCounters:
        return replace(self, submitted=self.submitted + count)

    def start(self) -> RolloutCounters:
        return replace(self, running=self.running + 1)

    def accept(self) -> RolloutCounters:
        return replace(self, running=self.running - 1, accepted=self.accepted + 1)

    def reject(self) -> RolloutCounters:
        """Drop a running group; its place is free again."""
        return replace(self, running=self.running - 1, rejected=self.rejected + 1)

    def withdraw(self) -> RolloutCounters:
        """Drop a group that waits."""
        return replace(self, rejected=self.rejected + 1)

    def consume(self, count: int) -> RolloutCounters:
        return replace(self, consumed=self.consumed + count)


def capacity(
    counters: RolloutCounters,
    *,
    version: int,
    max_concurrent: int,
    consumer_batch_size: int,
    max_head_offpolicyness: int,
) -> int:
    """How many more groups may start now; negative if too many did. The formula of AReaL (arXiv:2505.24298):

    min(max(1, max_concurrent) - running, (eta + version + 1) max(1, batch) - (accepted + running)),

    which is the paper's floor((N - 1) / B) <= i + eta with N groups started, batches of B, version i. A group that
    starts now, consumed in the order of the starts, goes into the update that makes version i + eta + 1 at the latest,
    and is then at most eta versions old.
    """
    by_concurrency = max(1, max_concurrent) - counters.running
    by_staleness = (max_head_offpolicyness + version + 1) * max(1, consumer_batch_size)
    return min(by_concurrency, by_staleness - (counters.accepted + counters.running))
