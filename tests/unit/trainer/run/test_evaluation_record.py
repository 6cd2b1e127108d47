"""The record of evaluations of a run without rollouts, at the run's end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.evaluation.record import EvaluationRecord
from rlite.trainer.options import TrainerOptions


@pytest.fixture
def failing(tmp_path: Path) -> EvaluationRecord:
    """A record of which nothing can be written."""
    (tmp_path / "record").write_text("no folder")
    run: Any = SimpleNamespace(folder=tmp_path, step=1, is_interrupted=False)
    record = EvaluationRecord(TrainerOptions(save_dir=str(tmp_path)), run)
    record.open(byte_tokenizer())
    return record


def test_a_record_that_cannot_be_written_ends_with_a_warning_and_the_run_goes_on(
    failing: EvaluationRecord, caplog: pytest.LogCaptureFixture
) -> None:
    failing.evaluation("math", 1, [])
    failing.before_save(failing._run)
    failing.evaluation("math", 2, [])
    failing.close(failing._run, None)
    [warning] = caplog.messages
    assert "record ends before step 1" in warning
    assert "could not be written" in warning


def test_an_error_of_the_record_does_not_hide_why_training_failed(
    failing: EvaluationRecord, caplog: pytest.LogCaptureFixture
) -> None:
    failing._recorder = None  # type: ignore[assignment]  # stands for an error that nobody foresees
    failing.close(failing._run, RuntimeError("broken"))
    assert "the end of the record could not be written" in caplog.text
