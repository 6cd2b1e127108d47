"""The trace of the steps that a run's options choose."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from rlite.errors import StorageError
from rlite.observability import trace
from rlite.trainer.options import RunOptions
from rlite.trainer.run.folder import TRACE

logger = logging.getLogger(__name__)


class StepTrace:
    """Starts and stops the trace of a run. A trace that cannot be written costs a warning.

    Args:
        options: `trace` and `trace_steps`.
        folder: the run's folder.
    """

    def __init__(self, options: RunOptions, folder: Path) -> None:
        self._is_wanted, self._path = options.trace, folder / TRACE
        self._first, self._last = options.trace_steps or (1, sys.maxsize)

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

    def close(self) -> None:
        """End the trace, if the options ask for one."""
        if self._is_wanted:
            trace.stop()
