"""Detection of divergence: non-finite losses or gradients, and exploding losses."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

WATCHED = ("loss", "grad_norm", "critic/loss", "critic/grad_norm")
EXPLOSION = 10.0
"""times the first loss (at least 1) beyond which a loss has exploded"""
NOT_FINITE = "the loss or the gradients are not finite, the weights are"


class DivergenceWatch:
    """Decision, from the metrics of each step, whether training still learns.

    Args:
        max_bad: consecutive bad steps after which the run has diverged. Half of the last `4 * max_bad` steps count the
            same: an alternating run learns little, too.
        has_absolute_loss: losses of different steps are comparable, as in supervised training.
    """

    def __init__(self, max_bad: int, has_absolute_loss: bool = False) -> None:
        self._max = max_bad
        self._has_absolute_loss = has_absolute_loss
        self._first_loss: float | None = None
        self._recent: deque[bool] = deque(maxlen=4 * max_bad)
        self.num_bad = 0
        """bad steps in a row, up to the last one"""
        self.cause = ""
        """why the last step was bad; empty if it was not"""

    def see(self, metrics: Mapping[str, float]) -> bool:
        """Return True if this step was a good one, as far as the metrics show."""
        is_finite = all(math.isfinite(metrics[key]) for key in WATCHED if key in metrics)
        self.cause = self._explosion(metrics) if is_finite else NOT_FINITE
        self._recent.append(bool(self.cause))
        self.num_bad = self.num_bad + 1 if self.cause else 0
        return not self.cause

    def _explosion(self, metrics: Mapping[str, float]) -> str:
        """Return how a finite loss shows that training no longer learns; an empty text if it does not."""
        if not self._has_absolute_loss or not {"loss", "grad_norm"} <= metrics.keys():
            return ""
        loss = metrics["loss"]
        if self._first_loss is None:
            self._first_loss = loss
        if loss > EXPLOSION * max(self._first_loss, 1.0):
            return f"the loss is more than {EXPLOSION:g} times that of the first step, {self._first_loss:.3g}"
        if metrics["grad_norm"] == 0 and loss > 0.9 * self._first_loss:
            return "the gradient is 0, and the loss is not below that of the first step"
        return ""

    @property
    def has_diverged(self) -> bool:
        """True if too many steps were bad."""
        return self.num_bad >= self._max or sum(self._recent) >= 2 * self._max

    def describe(self) -> str:
        """Return how many steps were bad, as text."""
        return f"{self.num_bad} in a row, {sum(self._recent)} of the last {len(self._recent)}"
