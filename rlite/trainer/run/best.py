"""The best model of a run by a metric of its evaluations, and the thresholds at which a run ends early."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlite import files
from rlite.errors import ConfigError, did_you_mean, writing
from rlite.runtime.storage.atomic import publish
from rlite.trainer.held_out import KEY, reaches
from rlite.trainer.options import RunOptions

logger = logging.getLogger(__name__)
BEST = "best"
"""folder of the best model"""
EVALUATED = "evaluated"
"""folder of an evaluated model, which is renamed to `best` if it is the best"""
FACTS = "evaluation.json"
"""file in both folders: the step of the weights, and in `best` the metric, its direction and its value"""


class BestModel:
    """Keeps the best model so far in a folder, with the metric by which it is the best.

    The value to beat is the value in the folder: a run that is killed resumes with the model that is there.
    """

    def __init__(self, options: RunOptions, folder: Path) -> None:
        self._metric = options.best_metric
        is_lowest = self._metric is not None and is_lowest_best(options, self._metric)
        self._goal = {"metric": self._metric, "is_lowest": is_lowest}
        self._folder = folder
        self._missed: set[str] = set()
        self.value: float | None = None
        """best value so far"""
        self.step = 0
        """step of the weights with the best value"""

    def restore(self) -> str:
        """Go on with the model that the folder holds.

        Returns why the next evaluation replaces that model in any case; "" if it does not.
        """
        if self._metric is None or not (self._folder / BEST).is_dir():
            return ""
        facts, wanted = evaluation_facts(self._folder / BEST), self._goal
        if {key: facts.get(key) for key in wanted} == wanted:
            if "value" not in facts:
                return f"{BEST}/{FACTS} has no finite value of {self._metric}"
            self.value, self.step = facts["value"], facts["step"]
            return ""
        return f"{BEST}/ has been chosen by {_described(facts)}, and trainer.best_metric is {_described(wanted)} now"

    def see(self, step: int, metrics: Mapping[str, float], save: Callable[[Path], None]) -> None:
        """Save the model if its evaluation is the best so far."""
        if self._metric is None:
            return
        where = f"trainer.best_metric={self._metric}: the evaluation at step {step}"
        tell_if_missing(self._metric, metrics, self._missed, where, "best/ is not written")
        if self._metric not in metrics:
            return
        value = metrics[self._metric]
        is_better = self.value is None or (value < self.value if self._goal["is_lowest"] else value > self.value)
        if is_better and not math.isnan(value):  # nan is neither better than another, nor one to be beaten
            evaluated = self._folder / EVALUATED
            save(evaluated)
            write_evaluation_facts(evaluated, {"step": step, **self._goal, "value": value})
            publish(evaluated, self._folder / BEST)
            self.value, self.step = value, step


class Thresholds:
    """The values of metrics at which a run stops."""

    def __init__(self, stop_at: Mapping[str, float]) -> None:
        self._stop_at = stop_at
        self.latest: dict[str, float] = {}
        """newest value of each metric"""
        self._missed: set[str] = set()

    def see(self, metrics: Mapping[str, float]) -> str:
        """Take an evaluation.

        Returns why the run stops: all thresholds are reached by the newest values. "" if it goes on.
        """
        for name in self._stop_at:
            tell_if_missing(name, metrics, self._missed, f"trainer.stop_at={name}: an evaluation", "it stops nothing")
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


def tell_if_missing(metric: str, metrics: Mapping[str, float], told: set[str], where: str, effect: str) -> None:
    """Log the first time that an evaluation of the metric's set lacks the metric, such as majority@k without answers.

    `told`: metrics that were missing before; the metric is added.
    """
    is_of_set = any(key.rpartition("/")[0] == metric.rpartition("/")[0] for key in metrics)
    if is_of_set and metric not in metrics and metric not in told:
        told.add(metric)
        logger.warning("%s has no such metric (%s); %s", where, ", ".join(sorted(metrics)), effect)


def evaluation_facts(model: Path) -> dict[str, Any]:
    """Return what a folder says about the evaluation of its model; {} if it says nothing that can be read.

    A `value` in it is a finite number.
    """
    try:
        facts = json.loads((model / FACTS).read_bytes())
        if not isinstance(facts.get("step"), int):
            return {}
        value = facts.get("value")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            facts.pop("value", None)
    except (OSError, ValueError, AttributeError, OverflowError, RecursionError):
        return {}
    return facts


def write_evaluation_facts(model: Path, facts: Mapping[str, Any]) -> None:
    """Write facts for `evaluation_facts` into the folder of a model."""
    with writing(model / FACTS):
        files.replace(model / FACTS, json.dumps(facts).encode())


def _described(goal: Mapping[str, Any]) -> str:
    if "metric" not in goal:
        return "an unknown metric"
    return f"the {'lowest' if goal.get('is_lowest') else 'highest'} {goal['metric']}"


def is_lowest_best(options: RunOptions, metric: str) -> bool:
    """Return whether the lowest value of a metric is the best, by `best_is_highest` or by the metric's name."""
    if metric == options.best_metric and options.best_is_highest is not None:
        return not options.best_is_highest
    return is_loss(metric)


def is_loss(metric: str) -> bool:
    """Return whether the lowest value of a metric is the best."""
    return metric.endswith("loss")


def check_evaluated(options: RunOptions, evaluated: Sequence[str]) -> None:
    """Check that evaluations have the metrics of `best_metric` and `stop_at`.

    `evaluated`: metrics of the evaluations; empty if the run evaluates nothing.
    """
    best = [] if options.best_metric is None else [("best_metric", options.best_metric)]
    for option, name in [*best, *(("stop_at", name) for name in options.stop_at)]:
        if not evaluated:
            raise ConfigError(f"trainer.{option}={name}: nothing is evaluated without {KEY}.path")
        if name not in evaluated:
            shown = ", ".join(evaluated) if len(evaluated) <= 12 else did_you_mean(name, evaluated)
            raise ConfigError(f"trainer.{option}={name}: expected a metric of the evaluation, {shown}")
