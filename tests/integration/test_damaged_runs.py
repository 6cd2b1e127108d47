"""Runs and bundles that somebody has damaged: each command ends with a message that names the place."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlite.assembly.proof import replay
from rlite.assembly.proof.audit import audit
from rlite.assembly.proof.options import AuditConfig
from rlite.errors import ConfigError, DataError
from tests.damaged_runs import COMMANDS, damage, run_command
from tests.integration.test_proof import edit, replayed
from tests.integration.test_proof import grpo as grpo
from tests.recorded_run import Shape, write_run


@pytest.fixture(scope="module")
def run(grpo: Path) -> Path:
    """A finished run, with a bundle of its last step beside it."""
    replay.main([str(grpo), "--step", "6", "--bundle", f"{grpo}.zip", "--with-data", "--with-weights"])
    return grpo


def setting(column: str, value: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda rows: rows[4].update({column: value})


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("rows", setting("step", -1), "rows whose step is below 0"),
        ("rows", setting("seconds_generate", float("nan")), "rows whose seconds_generate is below 0, or no finite"),
        ("rows", setting("group", 2**62), "rows whose group is below 0"),
        ("tokens", setting("logprobs", None), "logprobs does not have one value for each token"),
        ("tokens", setting("logprobs", [float("nan")]), "logprobs does not have one value for each token"),
        ("tokens", lambda rows: rows[4]["logprobs"].__setitem__(2, float("inf")), r"token 2: logprobs has inf; expect"),
        ("tokens", lambda rows: rows[4]["versions"].__setitem__(2, -9), "token 2: versions has -9; expected -1"),
    ],
)
def test_a_value_out_of_range_is_named(
    kind: str, change: Callable[[list[dict[str, Any]]], None], told: str, grpo: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(grpo, run)
    edit(run / "record" / f"train-00000004.{kind}.parquet", change)
    found = audit(options_of(run)).found
    assert any("00000004" in place or "step 4" in place for place, _ in found)
    if kind == "rows":  # of which a replay reads the fates alone
        assert any(re.search(told, problem) for _, problem in found)
        assert any(re.search(told, note) for note in replayed(run, 4).notes)
        return
    with pytest.raises(DataError, match=told):
        replayed(run, 4)


def options_of(run: Path) -> AuditConfig:
    return AuditConfig(run=str(run), replay="none")


@pytest.mark.parametrize("name", ["metrics.jsonl", "chain.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_named(name: str, grpo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(grpo, run)
    (run / name).unlink()
    (run / name).mkdir()
    with pytest.raises(DataError, match=rf"{name}: cannot be read: Is a directory"):
        replay.main([str(run), "--step", "4"])


def test_lines_that_are_no_metrics_are_missing(grpo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(grpo, run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[2] = '[{"step": 3}]'
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = [problem for place, problem in audit(options_of(run)).found if place == "metrics.jsonl"]
    assert "it has no line of the steps 3 to 3 that can be read" in found


def test_a_step_far_beyond_the_run_is_refused_at_once(grpo: Path) -> None:
    with pytest.raises(ConfigError, match="the run has 6 steps"):
        replay.main([str(grpo), "--step", str(2**62)])


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*COMMANDS])
def test_no_damage_ends_in_a_traceback(name: str, run: Path, tmp_path: Path) -> None:
    source = write_run(tmp_path / "source", Shape(steps=10, groups=6, samples=2)) if name == "simulate" else run
    for seed in range(200):
        told = damage(source, name, seed, tmp_path / "run")
        ended, text = run_command(name, tmp_path / "run")
        assert ended != "traceback", f"{name}, seed {seed}: {told}\n{text}"
