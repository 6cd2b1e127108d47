"""The record of a run's evaluations, sample by sample."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rlite.rollout.collector.ended import Ended
from rlite.services.record.recorder import NoRecorder, Recorder, make_recorder
from rlite.trainer.options import RecordOptions
from rlite.trainer.run.training_run import TrainingRun

logger = logging.getLogger(__name__)
SINGLE = "test"
"""name under which a single set is recorded"""


class EvaluationRecord:
    """Records evaluations. A run that resumes at step S deletes records of later steps.

    The end of a `with` block closes the record. A record that cannot be written ends with a warning; the run goes on.

    Args:
        options: say how much is recorded.
        run: counts the steps, and has the folder and the console.
    """

    def __init__(self, options: RecordOptions, run: TrainingRun) -> None:
        self._amounts, self._run = options, run
        self._has_told = False
        self._recorder: Recorder = NoRecorder()

    def open(self, tokenizer: Any) -> None:
        """Begin, after the run has opened its folder.

        Args:
            tokenizer: the model's tokenizer.
        """
        limit = int(self._amounts.record_limit * 2**30)
        self._recorder = make_recorder(self._run.folder, tokenizer, self._amounts.record, limit)

    def evaluation(self, name: str, step: int, episodes: Sequence[Ended]) -> None:
        """Record an evaluation.

        Args:
            name: name of the set; a single set without a name is recorded as `test`.
            step: finished steps before the evaluation.
            episodes: what `RolloutCollector.evaluate` returned.
        """
        self._recorder.record_evaluation(name or SINGLE, step, episodes)
        self._tell_of_limit()

    def before_checkpoint(self) -> None:
        """Write everything to disk. A run that is resumed from the checkpoint does not record it again."""
        self._recorder.flush()

    def after_checkpoint(self) -> None:
        """Merge the files of steps to which no checkpoint goes back."""
        if (oldest := self._run.oldest_checkpoint) is not None:
            self._recorder.compact(oldest)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. The block's own error comes before an error of the record."""
        try:
            self._end("the run ended" if kind is None else f"the run ended with {kind.__name__}")
        except Exception:  # of any kind: the block's own error must not be hidden
            if error is None:
                raise
            logger.exception("the end of the record could not be written")

    def _end(self, reason: str) -> None:
        """Close at the end of the run; `reason` says in words how it ended."""
        self.close()

    def close(self) -> None:
        """Write everything to disk. Later evaluations are not recorded."""
        recorder, self._recorder = self._recorder, NoRecorder()
        recorder.close()

    def _tell_of_limit(self) -> None:
        if self._recorder.has_removed and not self._has_told:
            self._has_told = True
            limit = f"trainer.record_limit={self._amounts.record_limit:g} GiB"
            rows = {"limit": limit, "removed": "texts and tokens of the oldest steps first"}
            self._run.console.warn(f"step {self._run.step}: the record has reached its limit", rows)
