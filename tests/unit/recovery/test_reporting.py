"""Reports of programs: to a file, or to no watcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlite.errors import ConfigError
from rlite.services.recovery import record
from rlite.trainer.run.interruption import has_begun


def test_a_report_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report"
    for name, value in record.environment(file, has_begun=True).items():
        monkeypatch.setenv(name, value)
    assert has_begun()
    assert record.read(file) is None
    record.report_step(3, 10)
    record.report_final_error(ConfigError("no such model"))
    report = record.read(file)
    assert report is not None
    assert (report.step, report.total_steps, report.final_error) == (3, 10, "ConfigError: no such model")
    assert str(report).startswith("step 3 of 10, reported at ")
    file.write_text("{")
    assert record.read(file) is None


def test_program_without_a_watcher_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(record.FILE, raising=False)
    monkeypatch.delenv(record.BEGUN, raising=False)
    record.report_step(1, 2)
    record.report_final_error(ConfigError("wrong"))
    assert not has_begun()
