"""Observers of the steps of a run besides the console: sinks of metrics, and a trace."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from rlite import config
from rlite.errors import StorageError
from rlite.observability import trace
from rlite.services.console.sinks.base import Run, open_sinks
from rlite.trainer.callbacks import Metrics
from rlite.trainer.options import RunOptions
from rlite.trainer.run.folder import TRACE
from rlite.trainer.run.observer import Observer
from rlite.trainer.run.training_run import TrainingRun

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
            name=options.experiment_name,
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
    """Starts and stops the trace of a run. A trace that cannot be written costs a warning.

    Args:
        options: `trace` and `trace_steps`.
        folder: the run's folder.
    """

    def __init__(self, options: RunOptions, folder: Path) -> None:
        self._is_wanted, self._path = options.trace, folder / TRACE
        self._first, self._last = options.trace_steps or (1, sys.maxsize)

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Begin to follow the run."""
        self.follow(run.step, run.is_over)

    def on_step(self, run: TrainingRun, metrics: Metrics) -> None:
        """Follow a step."""
        self.follow(run.step, run.is_over)

    def follow(self, step: int, is_over: bool) -> None:
        """Trace the next step if the options say so, and write the trace of the last step.

        Args:
            step: finished steps.
            is_over: no step is left. The trace of a run that was over before is kept.
        """
        if not self._is_wanted or (is_over and not trace.is_on()):
            return
        if step >= self._last:
            trace.stop()
        elif step + 1 >= self._first and not trace.is_on():
            self._start()
        trace.flush()

    def _start(self) -> None:
        try:
            trace.start(self._path)
        except StorageError as error:  # no trace is worth a run
            logger.warning("this run is not traced: %s", error)
            self._is_wanted = False

    def close(self, run: TrainingRun, error: BaseException | None) -> None:
        """End the trace, if the options ask for one."""
        if self._is_wanted:
            trace.stop()
