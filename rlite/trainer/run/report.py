"""The report of a run: the console, the improvements, and the places of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlite.observability.console import ConsoleReporter
from rlite.observability.record.files import FOLDER as RECORD
from rlite.observability.summary import History
from rlite.trainer.options import RunOptions
from rlite.trainer.run.best import is_lowest_best
from rlite.trainer.run.command import at_end

FILES = {"model": "latest", "best model": "best", "rollouts": RECORD}
MAX_EARLY = 2
"""headlines of evaluations that stand before most metrics of a step; more of them stand after these"""


@dataclass(frozen=True, kw_only=True)
class ReportedMetrics:
    """The names of the metrics that a run shows."""

    of_steps: Sequence[str] = ()
    """metrics of every step for the console, the most important first"""
    headlines: Sequence[str] = ()
    """metrics of evaluations for the console"""
    compared: Sequence[str] = ()
    """metrics of evaluations for the comparison at the end"""
    evaluated: Sequence[str] = ()
    """metrics of evaluations from which `best_metric` and `stop_at` choose"""


class RunReport:
    """The console of a run, and the metrics that its last lines compare.

    Both always have the metrics of `best_metric` and `stop_at`.

    Args:
        options: the run's options.
        metrics: metrics to show.
    """

    def __init__(self, options: RunOptions, metrics: ReportedMetrics) -> None:
        self._options, self._metrics = options, metrics
        self._deciding = [*([] if options.best_metric is None else [options.best_metric]), *options.stop_at]
        compared = list(dict.fromkeys((*self._deciding, *metrics.compared)))
        lowest = [name for name in compared if is_lowest_best(options, name)]
        self._history = History(compared, metrics.of_steps[:1], lowest, options.best_metric)

    def open(self, total_steps: int, done_steps: int) -> ConsoleReporter:
        """Return the console, after reading the metrics of earlier steps. It is closed before an error is printed.

        Args:
            total_steps: steps of the whole run.
            done_steps: steps of earlier attempts.
        """
        if "jsonl" in self._options.sinks:
            self._history.read(Path(self._options.save_dir) / "metrics.jsonl")
        self._console = ConsoleReporter(
            total_steps,
            metrics=self._columns(),
            choice=self._options.console,
            evaluated=self._metrics.evaluated,
            done_steps=done_steps,
        )
        at_end(self._console.close)
        return self._console

    def resumed(self, step: int, total_steps: int, checkpoint: Path, stop_reason: str) -> None:
        """Show from which step the run goes on, or how it goes on if it has ended already.

        Args:
            step: finished steps.
            total_steps: steps of the whole run.
            checkpoint: checkpoint of the finished steps.
            stop_reason: why an earlier attempt has ended the run; "" if it has not.
        """
        if stop_reason:
            way = "choose other trainer.callbacks, trainer.stop_at or trainer.save_dir"
            rows = {"reason": stop_reason, "to go on": way}
            self._console.report(f"stopped already: after step {step} of {total_steps}", rows)
        elif step < total_steps:
            self._console.report(f"resumed from step {step}", {"checkpoint": checkpoint})
        else:
            ways = f"raise {self._options.limit_key}, or choose another {self._options.folder_key}"
            self._console.report(f"finished already: step {step} of {total_steps}", {"to go on": ways})

    def _columns(self) -> list[str]:
        """Return the console's metrics, the most important first."""
        of_steps, headlines = self._metrics.of_steps, self._metrics.headlines
        early = headlines if len(headlines) <= MAX_EARLY else ()
        return list(dict.fromkeys((*of_steps[:1], *self._deciding, *early, *of_steps[1:], *headlines)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step, and keep them for the comparison."""
        self._history.add(step, metrics)
        self._console.log(step, metrics)

    def end(self, title: str, best: str = "") -> None:
        """Show the improvements, and the places of the results.

        Args:
            title: how the run ended.
            best: the best evaluation in words.
        """
        found = places(self._options)
        if best and "best model" in found:
            found["best model"] += f", {best}"
        self._console.report(title, {**self._history.rows(), **found}, style="green")


def places(options: RunOptions) -> dict[str, str]:
    """Return the places of the model, the rollouts and the curves of a run, as far as they exist."""
    folder, sinks = Path(options.save_dir), options.all_sinks
    found = {what: str(folder / name) for what, name in FILES.items() if (folder / name).exists()}
    curves = [str(folder / "metrics.jsonl")] if "jsonl" in sinks else []
    curves += [f"tensorboard --logdir {folder}"] if "tensorboard" in sinks else []
    curves += [name for name in sinks if name not in ("jsonl", "tensorboard")]
    return {**found, "curves": ", ".join(curves)} if curves else found
