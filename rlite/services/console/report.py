"""The report of a run on the console: its plan, its steps, the improvements, and the places of the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from rlite.services.console.terminal import ConsoleReporter, History
from rlite.trainer.callbacks import Metrics
from rlite.trainer.options import RunOptions
from rlite.trainer.run.best import is_lowest_best
from rlite.trainer.run.folder import RECORD
from rlite.trainer.run.observer import Observer, ReportedMetrics
from rlite.trainer.run.training_run import TrainingRun
from rlite.wording import number

FILES = {"model": "latest", "best model": "best", "rollouts": RECORD}
MAX_EARLY = 2
"""headlines of evaluations that stand before most metrics of a step; more of them stand after these"""


class RunReport(Observer):
    """The console of a run, and the metrics that its last lines compare.

    Both always have the metrics of `best_metric` and `stop_at`.

    Args:
        options: the run's options.
        metrics: metrics to show.
        title: title of the plan.
        plan: returns how the work is divided, as text by topic. It is shown if there is work left.
        progress: returns the progress of the work under way, in words; see `ConsoleReporter.follow`.
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
            self._console.report(self._title, self._plan())
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

    def on_log(self, run: TrainingRun, metrics: Metrics) -> None:
        """Show metrics of evaluations as those of a step."""
        self.on_step(run, metrics)

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
