"""Improvement of a run: first, last and best values of its metrics, in words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rlite.observability.columns import find, number

TENTH = 10


class History:
    """The values of some metrics over the steps of a run.

    Args:
        evaluated: metrics of evaluations, of which the first, the last and the best value count.
        trained: metrics of every step, of which the means over the first and the last tenth of the steps count.
    """

    def __init__(self, evaluated: Sequence[str], trained: Sequence[str]) -> None:
        self._evaluated, self._trained = evaluated, trained
        self._values: dict[str, dict[int, float]] = {name: {} for name in (*evaluated, *trained)}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        for key, values in self._values.items():
            if (name := find(key, metrics)) is not None and math.isfinite(value := float(metrics[name])):
                values[step] = value

    def read(self, path: Path) -> None:
        """Take the metrics of earlier steps from a file of JSON lines, if there is one."""
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                metrics = json.loads(line)
                self.add(metrics.pop("step"), {key: float(value) for key, value in metrics.items()})

    def rows(self) -> dict[str, str]:
        """Return what became of each metric that has at least two values, in words. Equal texts appear once."""
        evaluated = {key: _of_evaluations(key, self._values[key]) for key in self._evaluated}
        trained = {key: _of_steps(key, self._values[key]) for key in self._trained}
        first_with = {text: key for key, text in reversed({**evaluated, **trained}.items()) if text}
        return {key: text for text, key in reversed(first_with.items())}


def _of_evaluations(key: str, values: Mapping[int, float]) -> str:
    if len(values) < 2:
        return ""
    (first, before), (last, after) = min(values.items()), max(values.items())
    best = (min if key.endswith("loss") else max)(values, key=values.__getitem__)
    text = f"{number(key, before)} at step {first} -> {number(key, after)} at step {last}"
    return text if best == last else f"{text}, best {number(key, values[best])} at step {best}"


def _of_steps(key: str, values: Mapping[int, float]) -> str:
    ordered = [values[step] for step in sorted(values)]
    if len(ordered) < 2:
        return ""
    count = max(1, len(ordered) // TENTH)
    means = fmean(ordered[:count]), fmean(ordered[-count:])
    steps = "step" if count == 1 else f"{count} steps"
    return f"{number(key, means[0])} -> {number(key, means[1])}, means of the first and of the last {steps}"
