"""Observers of the steps of a run: its report on the console, its sinks of metrics, and its trace."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rlite import config
from rlite.errors import StorageError
from rlite.observability import trace
from rlite.services.console.sinks import Run, open_sinks
from rlite.services.console.terminal import ConsoleReporter, History
from rlite.trainer.callbacks import Metrics
from rlite.trainer.options import RunOptions
from rlite.trainer.run.best import is_lowest_best
from rlite.trainer.run.folder import RECORD, TRACE
from rlite.trainer.run.observer import Observer, ReportedMetrics
from rlite.trainer.run.training_run import TrainingRun
from rlite.wording import number

logger = logging.getLogger(__name__)


class SinkLog(Observer):
    """Logs metrics to the sinks of a run. They drop the lines that a resumed run writes again."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Open the sinks."""
        options = self._options
        of_run = Run(
            directory=run.folder,
            project=options.project,
            name=options.run_name,
            entity=options.entity,
            group=options.group,
            tags=options.tags,
            config=config.to_container(run.config),
            resume_after=run.step or -1,  # what stands at step 0 is of another run
        )
        self._sinks = open_sinks(options.all_sinks, of_run)

    def on_step(self, run: TrainingRun, metrics: Metrics) -> None:
        """Log a line."""
        self._sinks.log(run.step, metrics)

    on_log = on_added = on_step

    def close(self, run: TrainingRun, error: BaseException | None) -> None:
        """Write what is buffered."""
        self._sinks.close()


class StepTrace(Observer):
    """Starts and stops the trace of a run. A trace that cannot be written costs a warning."""

    def __init__(self, options: RunOptions, folder: Path) -> None:
        self._is_wanted, self._path = options.trace, folder / TRACE
        self._first, self._last = options.trace_steps or (1, sys.maxsize)

    def on_step(self, run: TrainingRun, metrics: Metrics) -> None:
        """Follow a step."""
        self.follow(run.step, run.is_over)

    on_start = on_step

    def follow(self, step: int, is_over: bool) -> None:
        """Trace the next step if the options say so, and write the trace of the last step.

        `is_over`: no step is left. The trace of a run that was over before is kept.
        """
        if not self._is_wanted or (is_over and not trace.is_on()):
            return
        if step >= self._last:
            trace.stop()
        elif step + 1 >= self._first and not trace.is_on():
            try:
                trace.start(self._path)
            except StorageError as error:  # no trace is worth a run
                logger.warning("this run is not traced: %s", error)
                self._is_wanted = False
        trace.flush()

    def close(self, run: TrainingRun, error: BaseException | None) -> None:
        """End the trace, if the options ask for one."""
        if self._is_wanted:
            trace.stop()


FILES = {"model": "latest", "best model": "best", "rollouts": RECORD}
MAX_EARLY = 2
"""headlines of evaluations that stand before most metrics of a step; more of them stand after these"""


class RunReport(Observer):
    """The console of a run, and the metrics that its last lines compare.

    Both always have the metrics of `best_metric` and `stop_at`.

    `plan`: returns how the work is divided, as text by topic. It is shown if there is work left. `progress`: returns
    the progress of the work under way, in words; see `ConsoleReporter.follow`.
    """

    def __init__(
        self,
        options: RunOptions,
        metrics: ReportedMetrics,
        title: str = "",
        plan: Callable[[], Mapping[str, str]] | None = None,
        progress: Callable[[], str] | None = None,
    ) -> None:
        self._options, self._metrics = options, metrics
        self._title, self._plan, self._progress = title, plan, progress
        self._deciding = [*([] if options.best_metric is None else [options.best_metric]), *options.stop_at]
        compared = list(dict.fromkeys((*self._deciding, *metrics.compared)))
        lowest = [name for name in compared if is_lowest_best(options, name)]
        self._history = History(compared, metrics.of_steps[:1], lowest, options.best_metric)

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Show from which step the run goes on, or how it goes on if it has ended already, and the plan."""
        if "jsonl" in self._options.sinks:  # of earlier attempts
            self._history.read(run.folder / "metrics.jsonl")
        run.console = self._console = ConsoleReporter(
            run.total_steps,
            metrics=self._columns(),
            choice=self._options.console,
            evaluated=self._metrics.evaluated,
            done_steps=run.step,
        )
        if (found := run.saved.checkpoints.found) is not None:
            self._show_resumed(run, found)
        if self._plan is not None and not run.is_over:
            named = {"callbacks": ", ".join(run.callbacks.by_name)} if run.callbacks.by_name else {}
            self._console.report(self._title, {**self._plan(), **named})
        if self._progress is not None:
            self._console.follow(self._progress)

    def _show_resumed(self, run: TrainingRun, checkpoint: Path) -> None:
        if run.stop_reason:
            way = "choose other trainer.callbacks, trainer.stop_at or trainer.save_dir"
            rows = {"reason": run.stop_reason, "to go on": way}
            self._console.report(f"stopped already: after step {run.step} of {run.total_steps}", rows)
        elif run.step < run.total_steps:
            self._console.report(f"resumed from step {run.step}", {"checkpoint": checkpoint})
        else:
            ways = f"raise {self._options.limit_key}, or choose another {self._options.folder_key}"
            self._console.report(f"finished already: step {run.step} of {run.total_steps}", {"to go on": ways})

    def _columns(self) -> list[str]:
        """Return the console's metrics, the most important first."""
        of_steps, headlines = self._metrics.of_steps, self._metrics.headlines
        early = headlines if len(headlines) <= MAX_EARLY else ()
        return list(dict.fromkeys((*of_steps[:1], *self._deciding, *early, *of_steps[1:], *headlines)))

    def on_step(self, run: TrainingRun, metrics: Metrics) -> None:
        """Show the metrics of a step, and keep them for the comparison."""
        self._history.add(run.step, metrics)
        self._console.log(run.step, metrics)

    on_log = on_step  # metrics of evaluations

    def close(self, run: TrainingRun, error: BaseException | None) -> None:
        """Close the bar. At the end of a run, show how it ended, the improvements, and the places of the results."""
        self._console.close()
        if error is not None:
            return
        how = "interrupted" if run.is_interrupted else "stopped" if run.stop_reason else "finished"
        reason = f": {run.stop_reason}" if how == "stopped" else ""
        found = places(self._options)
        if run.best.value is not None and "best model" in found:
            metric = str(self._options.best_metric)
            found["best model"] += f", {metric} {number(metric, run.best.value)} at step {run.best.step}"
        title = f"{how} after step {run.step} of {run.total_steps}{reason}"
        self._console.report(title, {**self._history.rows(), **found}, style="green")


def places(options: RunOptions) -> dict[str, str]:
    """Return the places of the model, the rollouts and the curves of a run, as far as they exist."""
    folder, sinks = Path(options.save_dir), options.all_sinks
    found = {what: str(folder / name) for what, name in FILES.items() if (folder / name).exists()}
    curves = [str(folder / "metrics.jsonl")] if "jsonl" in sinks else []
    curves += [f"tensorboard --logdir {folder}"] if "tensorboard" in sinks else []
    curves += [name for name in sinks if name not in ("jsonl", "tensorboard")]
    return {**found, "curves": ", ".join(curves)} if curves else found
