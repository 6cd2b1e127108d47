"""The status of a lost group in records."""

from __future__ import annotations

from rlite.errors import CallTimeout
from rlite.observability.record.schema import Status
from rlite.rollout.collector.attempts import ENGINE_FAILURES
from rlite.rollout.collector.lost_groups import CANCELLED, STOPPED, TOO_OLD
from rlite.rollout.rewards.errors import RewardCrash, RewardMemory, RewardTimeout
from rlite.rollout.workflow import EngineAborted


def status_of(reason: str, error: BaseException | None) -> Status:
    """Return the status of a group.

    Args:
        reason: why it is lost.
        error: the exception behind the reason.
    """
    if reason.startswith(TOO_OLD):
        return "too_old"
    if reason in (CANCELLED, STOPPED) or isinstance(error, (*ENGINE_FAILURES, EngineAborted)):
        return "aborted"
    if error is None:
        return "refused"
    if isinstance(error, RewardTimeout | RewardCrash | RewardMemory):
        return "reward_killed"
    return "timed_out" if isinstance(error, CallTimeout) else "failed"
