"""The metrics of a run, read from `metrics.jsonl` while it grows."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlite import files
from rlite.wording import counted

FILE = "metrics.jsonl"
MAX_STEP = 2**31 - 1
"""largest step of a record, whose steps are 32-bit integers"""
MAX_POINTS = 2000
"""largest number of points of one series on a page"""
MAX_NAMES = 20_000
"""largest number of metrics"""
PHASE = "seconds_"
"""prefix of the metrics of phases"""


class MetricsLog:
    """Series of metrics: name -> step -> value. Values that are not finite are None.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = files.GrowingFile(path)
        self._begin()

    def _begin(self) -> None:
        self.series: dict[str, dict[int, float | None]] = {}
        self.num_torn = 0
        """lines that are no metrics"""
        self._failure = ""
        self._has_more = False
        self.first_step, self.last_step = MAX_STEP, 0

    def refresh(self) -> bool:
        """Read the lines that are new. A file that was replaced is read again.

        Returns:
            True if there are new lines.
        """
        has_news = False
        failure = ""
        try:
            for line in self._file.new_lines(self._begin):
                has_news = True
                self._add(line)
        except FileNotFoundError:
            return False
        except OSError as error:
            failure = f"{FILE}: {error.strerror or error}"
        has_news, self._failure = has_news or failure != self._failure, failure
        return has_news

    @property
    def problems(self) -> list[str]:
        """Reasons why some of the metrics are not shown."""
        torn = f"{FILE}: {counted(self.num_torn, 'line')} without metrics" if self.num_torn else ""
        more = f"{FILE}: it has more than {MAX_NAMES} metrics; the others are not shown" if self._has_more else ""
        return [text for text in (self._failure, torn, more) if text]

    def points(self, name: str) -> dict[str, list[Any]]:
        """Return the steps and values of one metric. Of a long run, the newest step of each stride is kept."""
        kept = {self._stride_of(step): (step, value) for step, value in sorted(self.series.get(name, {}).items())}
        return {"steps": [step for step, _ in kept.values()], "values": [value for _, value in kept.values()]}

    def phases(self) -> dict[str, Any]:
        """Return the seconds of each phase, which belong on top of each other. Of a long run, the mean of each stride.

        Returns:
            The steps, the seconds of each phase at each of them, and the number of steps of a stride.
        """
        own = {name: values for name, values in self.series.items() if name.startswith(PHASE)}
        steps = sorted({step for values in own.values() for step in values})
        last, numbers = {self._stride_of(step): step for step in steps}, Counter(map(self._stride_of, steps))
        seconds = {}
        for name, values in own.items():
            sums: defaultdict[int, float] = defaultdict(float)
            for step, value in values.items():
                sums[self._stride_of(step)] += value or 0.0
            seconds[name.removeprefix(PHASE)] = [sums[stride] / numbers[stride] for stride in last]
        return {"steps": list(last.values()), "seconds": seconds, "stride": self._stride}

    @property
    def _stride(self) -> int:
        """Steps of which a page shows one; the same for all metrics."""
        return max(1, math.ceil((self.last_step - self.first_step + 1) / MAX_POINTS))

    def _stride_of(self, step: int) -> int:
        return (self.last_step - step) // self._stride

    def recent(self, name: str, number: int) -> list[float]:
        """Return the finite values of the last steps that have a metric."""
        values = [value for _, value in sorted(self.series.get(name, {}).items())[-number:]]
        return [value for value in values if value is not None]

    def _add(self, line: bytes) -> None:
        try:
            row: Mapping[str, Any] = json.loads(line)
            step = _step(row["step"])
            values = {name: _finite(value) for name, value in row.items() if name != "step"}
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            self.num_torn += 1
            return
        self.first_step, self.last_step = min(self.first_step, step), max(self.last_step, step)
        for name, value in values.items():
            if name in self.series or len(self.series) < MAX_NAMES:
                self.series.setdefault(name, {})[step] = value
            else:
                self._has_more = True


def _step(value: Any) -> int:
    step = int(value)
    if abs(step) > MAX_STEP:
        raise ValueError(f"step={step}")
    return step


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
