"""The record of evaluations of a run without rollouts, at the run's end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlite.errors import StorageError
from rlite.quickstart.tiny import byte_tokenizer
from rlite.trainer.options import TrainerOptions
from rlite.trainer.run.evaluation_record import EvaluationRecord
from rlite.trainer.sft import SftTrainer
from rlite.trainer.supervised import SupervisedTrainer


@pytest.fixture
def failing(tmp_path: Path) -> EvaluationRecord:
    """A record of which nothing can be written."""
    (tmp_path / "record").write_text("no folder")
    run: Any = SimpleNamespace(folder=tmp_path, step=1)
    record = EvaluationRecord(TrainerOptions(save_dir=str(tmp_path)), run)
    record.open(byte_tokenizer())
    return record


def test_the_end_of_a_run_tells_that_its_record_could_not_be_written(failing: EvaluationRecord) -> None:
    with pytest.raises(StorageError, match="could not be written"), failing:
        failing.evaluation("math", 1, [])


def test_an_error_of_the_record_does_not_hide_why_supervised_training_failed(
    failing: EvaluationRecord, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: SftTrainer) -> dict[str, float]:
        self.record.evaluation("math", 1, [])
        raise RuntimeError("broken")

    monkeypatch.setattr(SupervisedTrainer, "fit", fail)
    trainer = object.__new__(SftTrainer)
    trainer.record = failing
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit()
    assert "the end of the record could not be written" in caplog.text
