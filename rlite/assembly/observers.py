"""Observers of a run: usage, the record, sinks of metrics, the console, a trace, and a watcher of the process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from rlite import files
from rlite.errors import writing
from rlite.services.console.observers import SinkLog, StepTrace
from rlite.services.console.report import RunReport
from rlite.services.recovery import reporting
from rlite.trainer.callbacks import Metrics
from rlite.trainer.rl.options import EqualRewards
from rlite.trainer.run.folder import LEARNING
from rlite.trainer.run.observer import Observer, ReportedMetrics
from rlite.trainer.run.training_run import TrainingRun


class StepReport(Observer):
    """Reports each step to the process that has started this one, if it watches."""

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Report the step after which the run begins."""
        reporting.report_step(run.step, run.total_steps)

    on_step = on_start


class LearningFacts(Observer):
    """Writes once what the run learns from.

    Args:
        equal_rewards: whether groups of equal rewards may teach something.
    """

    def __init__(self, equal_rewards: EqualRewards) -> None:
        self._facts = {"equal_rewards": equal_rewards._asdict()}

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Write the facts into the run's folder."""
        with writing(run.folder / LEARNING):
            files.replace(run.folder / LEARNING, json.dumps(self._facts).encode())


def run_observers(
    run: TrainingRun,
    reported: ReportedMetrics,
    name: str,
    plan: Callable[[], Mapping[str, str]],
    progress: Callable[[], str] | None = None,
    before: Sequence[Observer] = (),
    after: Sequence[Observer] = (),
) -> list[Observer]:
    """Return the observers of a run, in the order in which they are called.

    Args:
        run: the run.
        reported: metrics to show.
        name: name of the command.
        plan: returns how a step's work is divided, as text by topic.
        progress: returns the progress of the work under way, in words.
        before: observers that enter metrics, or keep what a step has made, before it is logged.
        after: observers that say something about a step, after it is shown.
    """
    options = run.config.trainer
    report = RunReport(options, reported, f"rlite {name}", plan, progress)
    return [*before, SinkLog(options), report, StepTrace(options, run.folder), StepReport(), *after]
