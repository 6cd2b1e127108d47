"""Watches the updates of a run: one whose loss or gradients are not finite is skipped, and a run of those must end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

WATCHED = ("loss", "grad_norm", "critic/loss", "critic/grad_norm")


class DivergenceWatch:
    """Decides from the metrics of each step whether training still learns.

    Args:
        max_skipped: skipped steps in a row after which the run has diverged. Half of the last `4 * max_skipped` steps
            count the same: a run that alternates learns little, too.
    """

    def __init__(self, max_skipped: int) -> None:
        self._max = max_skipped
        self._recent: deque[bool] = deque(maxlen=4 * max_skipped)
        self.num_skipped = 0
        """steps in a row, up to the last one, with an update that was skipped"""

    def see(self, metrics: Mapping[str, float]) -> bool:
        """Return whether every update of this step was finite, as far as the metrics say."""
        is_finite = all(math.isfinite(metrics[key]) for key in WATCHED if key in metrics)
        self._recent.append(not is_finite)
        self.num_skipped = 0 if is_finite else self.num_skipped + 1
        return is_finite

    @property
    def has_diverged(self) -> bool:
        return self.num_skipped >= self._max or sum(self._recent) >= 2 * self._max

    def describe(self) -> str:
        """Say how often updates were skipped."""
        return f"{self.num_skipped} step(s) in a row, {sum(self._recent)} of the last {len(self._recent)}"
