"""The time for which training waits for evaluations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rlite.observability import trace


class EvaluationTime:
    """Adds up the time of evaluations until it is logged."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the time of the `with` block.

        Yields:
            None.
        """
        began = time.perf_counter()
        try:
            with trace.span("evaluate"):
                yield
        finally:
            self._seconds += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Return the time since the last call, as the metric `seconds_evaluate`."""
        seconds, self._seconds = self._seconds, 0.0
        return {"seconds_evaluate": seconds}
