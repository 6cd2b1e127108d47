from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlite.observability import trace
from rlite.services.console.observers import StepTrace
from rlite.trainer.options import RunOptions


@pytest.mark.parametrize("steps", [[], [2, 3]])
def test_a_trace_that_cannot_be_written_costs_a_warning(
    steps: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text("a file in place of the folder")
    of_run = StepTrace(RunOptions(save_dir=str(tmp_path / "run"), trace=True, trace_steps=steps), tmp_path / "run")
    for step in range(4):
        of_run.follow(step, is_over=False)
        assert not trace.is_on()
    run: Any = None
    of_run.close(run, None)
    (warning,) = caplog.records
    assert "this run is not traced" in warning.getMessage()
