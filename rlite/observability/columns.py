"""The console's choice of metrics, and the text of their names and values."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from rlite.errors import did_you_mean

Choice = Literal["auto", "all"] | Sequence[str]
"""auto: the trainer's own choice; all metrics; or a list of names"""

LABELS = {
    "tokens_per_second": "tokens/s",
    "response_length": "length",
    "num_tokens": "tokens",
    "grad_norm": "grad",
    "logprob_drift": "drift",
    "test_accuracy": "test_acc",
    "seconds": "seconds",
    "turns": "turns/ep",
}
"""short titles of columns"""
LAG = "lag_steps"
"""metric of an evaluation: steps since the evaluated weights"""
WIDTH = 8
"""characters of the narrowest column"""
GAP = 2


def find(key: str, metrics: Collection[str], evaluated: Collection[str] = ()) -> str | None:
    """Return the metric that a name means: itself, or else the first metric that it is the last part of.

    Args:
        key: such as "loss".
        metrics: names of metrics, such as "actor/loss".
        evaluated: metrics of evaluations, of which only the whole name counts
    """
    if key in metrics:
        return key
    return next((name for name in metrics if name.endswith(f"/{key}") and name not in evaluated), None)


class Columns:
    """Columns of a table that grows by one row for each step. A column begins with the first row that has its metric.

    Args:
        choice: metrics to show.
        auto: metrics that "auto" stands for, the most important first.
        evaluated: metrics of evaluations, which only some steps have.
    """

    def __init__(self, choice: Choice, auto: Sequence[str], evaluated: Collection[str] = ()) -> None:
        self._wanted = None if choice == "all" else tuple(auto if isinstance(choice, str) else choice)
        self.may_drop = choice == "auto"
        """true if a line without room leaves the last metrics out"""
        self._evaluated = frozenset(evaluated)
        self._seen: dict[str, None] = {}

    def chosen(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the values to show of a step, by the name that was asked for."""
        wanted = tuple(metrics) if self._wanted is None else self._wanted
        names = {key: find(key, metrics, self._evaluated) for key in wanted}
        return {key: metrics[name] for key, name in names.items() if name is not None}

    def unknown(self, metrics: Collection[str], later: Collection[str]) -> dict[str, str]:
        """Return a hint for each name that was asked for and is no metric.

        Args:
            metrics: metrics of a step.
            later: further metrics, which other steps have.
        """
        names = () if self.may_drop else self._wanted or ()
        known = {*metrics, *later, *self._evaluated}
        return {repr(name): did_you_mean(name, known) for name in names if find(name, known, self._evaluated) is None}

    def fit(self, metrics: Mapping[str, float], width: int) -> list[str] | None:
        """Return the columns of a row, in the order of the choice; None if the metrics asked for need more width.

        Args:
            metrics: metrics of the step.
            width: characters of the line that columns may take.
        """
        self._seen |= dict.fromkeys(self.chosen(metrics))
        columns = [key for key in self._wanted or self._seen if key in self._seen]
        ends = [sum(GAP + _width(key) for key in columns[: index + 1]) for index in range(len(columns))]
        fitting = [key for key, end in zip(columns, ends, strict=True) if end <= width]
        return fitting if self.may_drop or len(fitting) == len(columns) else None


def header(columns: Sequence[str]) -> str:
    """Return the titles of columns, each at the right end of its column."""
    return "".join(f"{'':{GAP}}{_label(key):>{_width(key)}}" for key in columns)


def row(columns: Sequence[str], values: Mapping[str, float]) -> str:
    """Return the values of a step below their titles, "-" for a metric that the step does not have."""
    cells = [number(key, values[key]) if key in values else "-" for key in columns]
    return "".join(f"{'':{GAP}}{cell:>{_width(key)}}" for key, cell in zip(columns, cells, strict=True))


def number(key: str, value: float) -> str:
    """Return a metric's value as text: three digits of seconds, whole tokens per second, four digits of the rest.

    Args:
        key: name of the metric.
        value: its value.
    """
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if key.endswith("per_second") or size >= 1000:
        return f"{value:,.0f}"
    if key.rpartition("/")[2].startswith("seconds"):
        return f"{value:.{max(0, min(3, 2 - math.floor(math.log10(size))))}f}" if size else "0"
    if size and size < 0.001:
        return f"{value:.1e}"
    return f"{value:.{4 if size < 10 else 2 if size < 100 else 1}f}" if size else "0"


def plain_number(value: float) -> str:
    """Return a value for a pipe: four digits, and whole numbers from 10,000 on, without separators."""
    is_large = math.isfinite(value) and abs(value) >= 10_000
    return f"{value:.0f}" if is_large else f"{float(value):.4g}"


def _label(key: str) -> str:
    return LABELS.get(key, key)


def _width(key: str) -> int:
    return max(WIDTH, len(_label(key)))
