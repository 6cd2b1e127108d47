"""Progress of a call of the collector, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlite.rollout.collector.group import Group


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
        num_tokens = sum(sum(list(group.tokens.values())) for group in groups)  # the list is copied in one step
        return cls(what, num_episodes, min(finished, num_episodes), num_tokens)

    def __str__(self) -> str:
        return f"{self.what}: {self.num_finished} of {self.num_episodes} episodes, {self.num_tokens:,} tokens"
