"""Limit restarts per time span. A pure decision: the time is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RestartBudget:
    """At most `max_restarts` restarts within `window_s` seconds. Repeated failures use up the budget."""

    max_restarts: int
    window_s: float = 3600.0

    def allows(self, restarts: Sequence[float], now: float) -> bool:
        """Return whether one more restart may begin.

        `restarts`: times in seconds at which restarts began.
        """
        return sum(now - began < self.window_s for began in restarts) < self.max_restarts
