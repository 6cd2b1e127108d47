from __future__ import annotations

from pathlib import Path

import pytest

from rlite.errors import ConfigError
from rlite.viewer.run import open_runs


def test_what_is_no_run_is_refused_with_all_problems(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "runs" / "ppo").mkdir(parents=True)
    (tmp_path / "runs" / "ppo" / "config.yaml").touch()
    with pytest.raises(ConfigError) as raised:
        open_runs([str(tmp_path / "gone"), str(tmp_path / "file"), str(tmp_path / "runs")])
    gone, file, parent = str(raised.value).splitlines()
    assert "no such folder" in gone
    assert f"found a file; give its folder: {tmp_path}" in file
    assert "not the folder of a run" in parent
    assert "runs below it: ppo" in parent


def test_half_a_run_is_shown(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"a: [\xff")
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "train-00000001.rows.parquet").write_bytes(b"PAR1")
    [run] = open_runs([str(tmp_path)])
    assert run.config == {}
    assert [problem.split(":")[0] for problem in run.problems] == ["config.yaml", "train-00000001.rows.parquet"]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "run" / "record").mkdir(parents=True)
    paths = [str(tmp_path / parent / "run") for parent in ("a", "b")]
    assert [run.name for run in open_runs(paths)] == paths
    assert [run.name for run in open_runs(paths[:1])] == ["run"]
