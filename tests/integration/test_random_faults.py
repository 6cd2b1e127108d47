"""The command of random faults: one job of roles suffers some, is sound, and its log is continued."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults import Row, draw, read_log, run, table
from benchmarks.faults_jobs import JOBS
from rlite.recovery.faults import KINDS, PHASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_faults_in_a_job_leave_its_result_as_it_was(tmp_path: Path) -> None:
    log = tmp_path / "faults.jsonl"
    rows = run(4, 5, log, ["roles"])
    assert [row.problems for row in rows] == [[]] * 4
    assert all(row.is_sound for row in rows)
    assert read_log(log) == rows
    assert "4 faults; in jobs that were not sound: 0" in table(rows)


def test_every_kind_is_drawn_in_every_phase_where_it_can_happen() -> None:
    for job, (first, others) in {"roles": (60, 240), "ppo": (60, 240)}.items():
        rows: list[Row] = []
        for number in range(first + others):
            rows.append(draw(number, 0, job, rows, is_first=number < first))
        expected = {(phase, kind) for phase in PHASES for kind in JOBS[job].kinds[phase]}
        assert {(row.phase, row.kind) for row in rows} == expected
        assert {kind for _, kind in expected} == set(KINDS)
