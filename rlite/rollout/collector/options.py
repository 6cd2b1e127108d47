"""Options of the collector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from rlite.errors import ConfigError
from rlite.rollout.collector.ledger import OnStale


@dataclass(frozen=True, kw_only=True)
class CollectorOptions:
    """How rollouts are run. Everything is counted in groups: the episodes of one data item."""

    max_concurrent_rollouts: int | None = None
    """groups that run at the same time; None: `rollout_batch` runs its whole batch, `submit` one consumer batch"""
    consumer_batch_size: int | None = None
    """groups that one weight update consumes; None: as many as `prepare_batch` reads, or `wait` asks for, first"""
    max_head_offpolicyness: int = 0
    """weight updates that may happen between the start of a group and its consumption"""
    on_stale: OnStale = "wait"
    """what happens to groups that would be left too old: "wait" holds the batch, and so the next update, for them;
    "drop" drops them, gives their places back and reports the lengths dropped and kept, as it favours short answers"""
    stale_timeout: float = 600.0
    """seconds since its start after which a batch does not wait for a group any longer; it is dropped"""
    request_timeout: float = 3600.0
    """seconds for one attempt at an episode"""
    request_retries: int = 3
    """further attempts at an episode that raised; data and config errors are final"""
    max_consecutive_failures: int = 16
    """groups lost to exceptions, next to each other in the order of their start, that stop the run"""
    max_consecutive_rejections: int = 1024
    """groups dropped by the workflow or by should_accept, with none accepted between them, that stop the run"""
    seed: int | None = None
    """draw a request's random numbers from this, the policy version, and the item's, sample's and turn's numbers;
    None: from the order in which requests arrive"""

    def __post_init__(self) -> None:
        least = {
            "max_concurrent_rollouts": 1,
            "consumer_batch_size": 1,
            "max_head_offpolicyness": 0,
            "request_retries": 0,
            "max_consecutive_failures": 1,
            "max_consecutive_rejections": 1,
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name}={value}: expected at least {minimum}")
        for name in ("request_timeout", "stale_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: expected more than 0 seconds")
        if self.on_stale not in get_args(OnStale):
            raise ConfigError(f"on_stale={self.on_stale!r}: expected one of {', '.join(get_args(OnStale))}")
