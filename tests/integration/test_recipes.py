"""The recipe that runs on a CPU, shortened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rlite
from recipes.countdown import run_on_cpu
from rlite.rollout.environments.file import EnvironmentFile


@pytest.mark.nightly
def test_countdown_runs_from_nothing_to_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for name, value in {"NUM_TEST": 8, "NUM_DEMONSTRATIONS": 64, "STEPS": 1}.items():
        monkeypatch.setattr(run_on_cpu, name, value)
    try:
        run_on_cpu.main(tmp_path)
    finally:
        rlite.shutdown()
    curve = [json.loads(line) for line in (tmp_path / "curve.json").read_text().splitlines()]
    assert [row["step"] for row in curve] == [0, 1]
    assert "accuracy" in curve[0]
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_every_problem_has_a_solution_that_the_environment_accepts() -> None:
    known = list(run_on_cpu.problems())
    assert len({(*numbers, target) for numbers, target, _ in known}) == len(known) == 1950
    is_solution = EnvironmentFile(run_on_cpu.ENVIRONMENT).load().is_solution
    assert all(is_solution(solution, numbers, target) for numbers, target, solution in known)
