"""The command of random faults: one job of roles suffers some, is sound, and its log is continued."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults import PER_JOB, TURNS, Row, draw, draw_batch, missing, read_log, run, table
from benchmarks.faults_jobs import JOBS
from rlite.testing import KINDS, PHASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.nightly
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


def test_a_log_of_210_faults_lacks_nothing() -> None:
    rows: list[Row] = []
    for turn in range(1000):
        job = TURNS[turn % len(TURNS)]
        rows += draw_batch(rows, 0, job, min(PER_JOB[job], 210 - len(rows)))
    assert len(rows) == 210
    assert "200 faults" in missing(rows)  # none of their jobs was sound
    for row in rows:
        row.is_identical = True
    assert missing(rows) == []
    assert "nothing is missing" in table(rows)


def test_a_cell_without_a_sound_fault_is_missing() -> None:
    row = Row(0, 0, "roles", "rollout", "SIGKILL", "ROLLOUT", 0)
    assert "SIGKILL in rollout" in missing([row])
    assert "1 (1 bad)" in table([row])
    row.is_identical = True
    assert "SIGKILL in rollout" not in missing([row])
    assert "14 in rollout" in missing([row])
