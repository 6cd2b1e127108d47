"""The best model of a run by a metric of its evaluations, and the thresholds at which a run ends early."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlite.errors import ConfigError, did_you_mean
from rlite.evaluation.samples import reaches
from rlite.observability.columns import number
from rlite.trainer.held_out.options import KEY
from rlite.trainer.options import RunOptions

logger = logging.getLogger(__name__)
BEST = "best"
"""folder of the best model"""


class BestModel:
    """Keeps the best model so far in a folder.

    Args:
        options: `best_metric` and `best_is_highest`.
        folder: the run's folder.
    """

    def __init__(self, options: RunOptions, folder: Path) -> None:
        self._options, self._metric = options, options.best_metric
        self._folder = folder
        self._has_missed = False
        self.value: float | None = None
        """best value so far"""
        self.step = 0
        """step of the weights with the best value"""

    def see(self, step: int, metrics: Mapping[str, float], save: Callable[[Path], None]) -> None:
        """Save the model if its evaluation is the best so far.

        Args:
            step: step of the evaluated weights.
            metrics: metrics of the evaluation.
            save: writes the evaluated model into a folder, whole or not at all.
        """
        if self._metric is None or not self._is_known(step, metrics):
            return
        value = metrics[self._metric]
        is_lowest = is_lowest_best(self._options, self._metric)
        is_better = self.value is None or (value < self.value if is_lowest else value > self.value)
        if is_better and not math.isnan(value):  # nan is neither better than another, nor one to be beaten
            self.value, self.step = value, step
            save(self._folder / BEST)

    def describe(self) -> str:
        """Return the metric with its best value and the step, or "" before the first evaluation."""
        if self._metric is None or self.value is None:
            return ""
        return f"{self._metric} {number(self._metric, self.value)} at step {self.step}"

    def _is_known(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether the metric is among those of an evaluation; log the first time that it is missing."""
        assert self._metric is not None
        set_name = self._metric.rpartition("/")[0]
        is_evaluated = any(key.rpartition("/")[0] == set_name for key in metrics)
        if self._metric not in metrics and is_evaluated and not self._has_missed:
            self._has_missed = True
            where = f"trainer.best_metric={self._metric}: the evaluation at step {step}"
            logger.warning("%s has no such metric (%s); best/ is not written", where, ", ".join(sorted(metrics)))
        return self._metric in metrics


class Thresholds:
    """The values of metrics at which a run stops.

    Args:
        stop_at: thresholds by the metric's name.
    """

    def __init__(self, stop_at: Mapping[str, float]) -> None:
        self._stop_at = stop_at
        self.latest: dict[str, float] = {}
        """newest value of each metric"""

    def see(self, metrics: Mapping[str, float]) -> str:
        """Take an evaluation.

        Args:
            metrics: metrics of the evaluation.

        Returns:
            Why the run stops: all thresholds are reached by the newest values. "" if it goes on.
        """
        new = {name: metrics[name] for name in self._stop_at if name in metrics}
        self.latest |= new
        if not new or not all(self._is_reached(name) for name in self._stop_at):
            return ""
        return ", ".join(
            f"{name}={self.latest[name]:.4g} reaches trainer.stop_at={self._stop_at[name]:g}" for name in new
        )

    def _is_reached(self, name: str) -> bool:
        value, threshold = self.latest.get(name, math.nan), self._stop_at[name]
        return reaches(-value, -threshold) if is_loss(name) else reaches(value, threshold)


def is_lowest_best(options: RunOptions, metric: str) -> bool:
    """Return whether the lowest value of a metric is the best, by `best_is_highest` or by the metric's name.

    Args:
        options: the run's options.
        metric: name of a metric of evaluations.
    """
    if metric == options.best_metric and options.best_is_highest is not None:
        return not options.best_is_highest
    return is_loss(metric)


def is_loss(metric: str) -> bool:
    """Return whether the lowest value of a metric is the best."""
    return metric.endswith("loss")


def check_evaluated(options: RunOptions, evaluated: Sequence[str]) -> None:
    """Check that evaluations have the metrics of `best_metric` and `stop_at`.

    Args:
        options: the run's options.
        evaluated: metrics of the evaluations; empty if the run evaluates nothing.

    Raises:
        ConfigError: there are no evaluations, or the evaluations have no such metric.
    """
    best = [] if options.best_metric is None else [("best_metric", options.best_metric)]
    for option, name in [*best, *(("stop_at", name) for name in options.stop_at)]:
        if not evaluated:
            raise ConfigError(f"trainer.{option}={name}: nothing is evaluated without {KEY}.path")
        if name not in evaluated:
            shown = ", ".join(evaluated) if len(evaluated) <= 12 else did_you_mean(name, evaluated)
            raise ConfigError(f"trainer.{option}={name}: expected a metric of the evaluation, {shown}")
