"""Improvement of a run: first, last and best values of its metrics, in words."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from rlite.observability.columns import LAG, find, number
from rlite.observability.sinks.jsonl import read_metrics

TENTH = 10
Names = Sequence[str]


class History:
    """The values of some metrics over the steps of a run.

    Args:
        evaluated: metrics of evaluations, of which the first, the last and the best value count.
        trained: metrics of every step, of which the means over the first and the last tenth of the steps count.
        lowest: metrics of evaluations whose lowest value is the best.
        chosen: metric whose best value another line tells, which knows the evaluations that count for it.
    """

    def __init__(
        self, evaluated: Names, trained: Names, lowest: Collection[str] = (), chosen: str | None = None
    ) -> None:
        self._evaluated, self._trained, self._lowest, self._chosen = evaluated, trained, lowest, chosen
        self._values: dict[str, dict[int, float]] = {name: {} for name in (*evaluated, *trained)}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step. A value of an evaluation is of the step of the evaluated weights."""
        for key, values in self._values.items():
            if (name := find(key, metrics, self._evaluated)) is not None:
                lag = metrics.get(f"{name.rpartition('/')[0]}/{LAG}".lstrip("/"), 0) if key in self._evaluated else 0
                if math.isfinite(value := float(metrics[name])) and math.isfinite(lag):
                    values[step - int(lag)] = value

    def read(self, path: Path) -> None:
        """Take the metrics of earlier steps from a file of JSON lines, if there is one that can be read."""
        with suppress(OSError):
            for row in read_metrics(path):
                self.add(int(row["step"]), row)

    def rows(self) -> dict[str, str]:
        """Return the change of each metric that has at least two values, in words. Equal texts appear once."""
        evaluated = {key: self._of_evaluations(key) for key in self._evaluated}
        trained = {key: _of_steps(key, self._values[key]) for key in self._trained}
        first_with = {text: key for key, text in reversed({**evaluated, **trained}.items()) if text}
        return {key: text for text, key in reversed(first_with.items())}

    def _of_evaluations(self, key: str) -> str:
        values = self._values[key]
        if len(values) < 2:
            return ""
        (first, before), (last, after) = min(values.items()), max(values.items())
        best = (min if key in self._lowest else max)(values, key=values.__getitem__)
        text = f"{number(key, before)} at step {first} -> {number(key, after)} at step {last}"
        is_told = values[best] == after or key == self._chosen
        return text if is_told else f"{text}, best {number(key, values[best])} at step {best}"


def _of_steps(key: str, values: Mapping[int, float]) -> str:
    ordered = [values[step] for step in sorted(values)]
    if len(ordered) < 2:
        return ""
    count = max(1, len(ordered) // TENTH)
    means = fmean(ordered[:count]), fmean(ordered[-count:])
    steps = "step" if count == 1 else f"{count} steps"
    return f"{number(key, means[0])} -> {number(key, means[1])}, means of the first and of the last {steps}"
