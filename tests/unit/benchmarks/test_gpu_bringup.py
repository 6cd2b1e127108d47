"""The bring-up command on a machine without a GPU: what it runs, and what a step that goes wrong costs."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_bringup
from benchmarks.gpu_bringup import PLAN, main, read_record, watch
from tests import forked_python

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each step as a fork."""
    monkeypatch.setattr(gpu_bringup, "sys", forked_python.System())


@pytest.mark.nightly
@pytest.mark.slow
@needs_no_gpu
def test_steps_that_need_no_gpu_run_and_the_table_keeps_those_of_earlier_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), "--steps", "ipc,graphs"]) == 0
    assert "finds no CUDA device here" in capsys.readouterr().out
    assert main(["--out", str(tmp_path), "--steps", "versions"]) == 0
    record = json.loads((tmp_path / "bringup.json").read_text())
    assert {name: step["status"] for name, step in record.items()} == {
        "versions": "ok",
        "graphs": "skipped",
        "ipc": "ok",
    }
    assert record["versions"]["results"]["torch"] == torch.__version__
    assert record["ipc"]["results"]["grown_gib"] < 0.05
    table = (tmp_path / "bringup.txt").read_text()
    assert len(table.splitlines()) == 1 + len(PLAN)
    assert table in capsys.readouterr().out


def test_a_step_that_is_not_known_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--steps", "versions,ipv"])
    assert "--steps: ipv: expected some of versions,attention" in capsys.readouterr().err


def test_steps_without_time_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--steps", "versions,ipc", "--seconds", "1"]) == 1
    assert f"no time was left for versions, ipc: --out {tmp_path} --steps versions,ipc" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("print('well')", "ok", ""),
        ("raise ValueError('a reason')", "failed", "ValueError: a reason"),
        ("import os; print('begun', flush=True); os.abort()", "crashed", "SIGABRT; last line: begun"),
        ("import time; print('begun', flush=True); time.sleep(60)", "timed out", "after 2 s; last line: begun"),
    ],
)
def test_a_process_that_fails_crashes_or_hangs_ends_with_a_reason(
    tmp_path: Path, program: str, status: str, reason: str
) -> None:
    started = time.monotonic()
    assert watch([sys.executable, "-c", program], 2 if status == "timed out" else 60, tmp_path / "log") == (
        status,
        reason,
    )
    assert time.monotonic() - started < 50
    assert "begun" in (tmp_path / "log").read_text() or status in ("ok", "failed")


def test_children_of_a_hung_step_end_with_it(tmp_path: Path) -> None:
    program = "import os, time; print(os.fork(), flush=True); time.sleep(60)"
    status, reason = watch([sys.executable, "-c", program], 2, tmp_path / "log")
    assert status == "timed out"
    child = max(map(int, (tmp_path / "log").read_text().split()))
    for _ in range(2000):
        if not Path(f"/proc/{child}").exists():
            return
        time.sleep(0.05)
    state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
    assert state == "Z", f"process {child} still runs: {reason}"


def test_results_of_a_step_that_is_killed_are_kept(tmp_path: Path) -> None:
    step = gpu_bringup.Step("ipc", 60, False, "20 rounds")
    gpu_bringup.write_record(tmp_path / "ipc.json", {"status": "cut off", "results": {"old": 1}})
    status = gpu_bringup.run_step(step, "cpu", tmp_path, limit=0.01)
    assert status == "timed out"
    assert read_record(tmp_path / "ipc.json")["results"] == {}, "of this run, not of the one before"
    assert os.listdir(tmp_path)
