"""The report of a run to a person: the console, what improved, and where the results are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlite.observability.console import ConsoleReporter
from rlite.observability.record.files import FOLDER as RECORD
from rlite.observability.summary import History
from rlite.trainer.options import RunOptions
from rlite.trainer.run.command import at_end

FILES = {"model": "latest", "best model": "best", "rollouts": RECORD}


class RunReport:
    """The console of a run, and the metrics that its last lines compare.

    Args:
        options: the run's options.
        shown: metrics for the console.
        evaluated: metrics of evaluations.
    """

    def __init__(self, options: RunOptions, shown: Sequence[str], evaluated: Sequence[str]) -> None:
        self._options, self._shown, self._evaluated = options, tuple(shown), tuple(evaluated)
        self._history = History(self._evaluated, [key for key in ("reward", "loss") if key in shown][:1])

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
            metrics=self._shown,
            choice=self._options.console,
            later=self._evaluated,
            done_steps=done_steps,
        )
        at_end(self._console.close)
        return self._console

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step, and keep them for the comparison."""
        self._history.add(step, metrics)
        self._console.log(step, metrics)

    def end(self, title: str) -> None:
        """Show what improved, and where the results are."""
        self._console.report(title, {**self._history.rows(), **places(self._options)}, style="green")


def places(options: RunOptions) -> dict[str, str]:
    """Return the places of the model, the rollouts and the curves of a run, as far as they exist."""
    folder, sinks = Path(options.save_dir), options.all_sinks
    found = {what: str(folder / name) for what, name in FILES.items() if (folder / name).exists()}
    curves = [str(folder / "metrics.jsonl")] if "jsonl" in sinks else []
    curves += [f"tensorboard --logdir {folder}"] if "tensorboard" in sinks else []
    curves += [name for name in sinks if name not in ("jsonl", "tensorboard")]
    return {**found, "curves": ", ".join(curves)} if curves else found
