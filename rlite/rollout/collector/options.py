"""Options of the collector."""

from __future__ import annotations

from rlite.config import Count, Natural, Options, Seconds
from rlite.rollout.collector.ledger import OnStale


class CollectorLimits(Options):
    """Limits on rollouts. Everything is counted in groups: the episodes of one data item, of one prompt."""

    max_head_offpolicyness: Natural = 0
    """weight updates that may happen between the start of a group and its consumption. In ppo, 0: rollouts and training
    take turns on all devices; more: they overlap, on devices of their own, and the loss corrects for the difference
    (tis_coef, or policy_loss.name=decoupled_ppo)"""
    max_concurrent_rollouts: Count | None = None
    """groups that run at the same time; default: one batch"""
    on_stale: OnStale = "wait"
    """handling of groups that would get too old: "wait" holds the next batch, and so the next update, for them; "drop"
    drops them, gives their places back and reports the lengths dropped and kept, because it favours short answers"""
    stale_timeout: Seconds = 600.0
    """seconds since its start after which a batch does not wait for a group any longer; the group is dropped"""
    request_timeout: Seconds = 3600.0
    """seconds for one attempt at an episode"""
    request_retries: Natural = 3
    """further attempts at an episode that raised; data and config errors are final"""
    max_consecutive_failures: Count = 16
    """groups lost to exceptions, next to each other in the order of their start, that end the run"""


class CollectorOptions(CollectorLimits):
    """Options of a `RolloutCollector`."""

    consumer_batch_size: Count | None = None
    """groups that one weight update consumes; None: as many as `prepare_batch` reads, or `wait` asks for, first"""
    max_consecutive_rejections: Count = 1024
    """groups dropped by the workflow or by should_accept, with none accepted between them, that stop the run"""
    is_filter_bounded: bool = False
    """should_accept itself refuses a bounded number of groups: they do not count for max_consecutive_rejections"""
    extras: tuple[str, ...] = ()
    """columns that each request of training asks the engine for; see `LLMRequest.extras`"""
    keep_ended: bool = False
    """keep each ended group of training until `RolloutCollector.take_ended` returns it"""
    seed: int | None = None
    """draw a request's random numbers from this, the policy version, and the item's, sample's and turn's numbers;
    None: from the engine's seed and the group's number if the engine has a seed, else from the order of requests"""
