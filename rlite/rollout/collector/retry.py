"""Retry of a failed episode: another attempt with the answers that are drawn already, or none."""

from __future__ import annotations

from collections import Counter

from rlite.errors import ConfigError, DataError
from rlite.rollout.collector.lost_groups import reason_of
from rlite.rollout.draws import Draws
from rlite.rollout.episode import Episode
from rlite.runtime.event_loop import Abandoned
from rlite.runtime.sandbox.calls import SandboxError

FINAL = (DataError, ConfigError)
"""errors that another attempt would repeat"""


class EpisodeFailed(Exception):
    """The end of an episode that has no attempt left. Its argument is the last error."""


def retry(episode: Episode, draws: Draws, error: Exception, max_retries: int, failed_attempts: Counter[str]) -> None:
    """Count a failed attempt at an episode, and begin another attempt."""
    kind = error.outcome if isinstance(error, SandboxError) else type(error).__name__
    episode.failed_attempts.append(kind)
    failed_attempts[kind] += 1
    is_final = isinstance(error, FINAL) or isinstance(error.__cause__, Abandoned)
    if len(episode.failed_attempts) > max_retries or is_final:
        episode.failure = reason_of(error)
        raise EpisodeFailed(error) from error
    episode.begin_attempt()
    draws.begin_attempt()
