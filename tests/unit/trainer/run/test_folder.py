"""The folder of a run: one run at a time, and what an overwritten run leaves."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from rlite.errors import FolderInUse
from rlite.trainer.run.folder import CONFIG, clear, lock


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """The folder of a run that has saved a checkpoint."""
    (tmp_path / "state" / "step-4").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    return tmp_path


def test_overwriting_a_run_keeps_other_files(used: Path) -> None:
    for name in ("latest", "critic_latest", "best"):
        (used / name).mkdir()
    own = {"train.jsonl": "", "results.json": "[1, 2]"}
    for name, content in own.items():
        (used / name).write_text(content)
    clear(used)
    assert sorted(path.name for path in used.iterdir()) == sorted(["config.yaml", "metrics.jsonl", *own])


def test_an_overwritten_run_leaves_no_checkpoint_no_record_and_no_results(used: Path) -> None:
    (used / "record").mkdir()
    (used / "record" / "train-00000001.rows.parquet").touch()
    (used / "trace.json").touch()
    (used / "trace.1.json").touch()
    (used / "results.json").write_text('{"models": {"latest": {"model": "runs/ppo"}}}')
    clear(used)
    assert not [name for name in ("record", "trace.json", "trace.1.json", "results.json") if (used / name).exists()]
    assert not (used / "state").exists()


def test_a_folder_has_one_run_at_a_time_within_a_process_too(tmp_path: Path) -> None:
    first = lock(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(FolderInUse, match=r"save_dir=.*run: another run is under way there"):
            lock(tmp_path / "run")
    assert _is_locked(tmp_path / "run"), "a refused attempt leaves the lock as it is"
    first.close()
    assert not _is_locked(tmp_path / "run")
    second = lock(tmp_path / "run")
    first.close()
    assert _is_locked(tmp_path / "run"), "who has let go does so once"
    second.close()


def test_a_folder_that_was_made_for_a_lock_alone_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for name in ("run", "kept", "used"):
        held = lock(tmp_path / name)
        if name == "used":
            (tmp_path / name / CONFIG).touch()
        held.close()
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "used"}


def test_a_lock_of_a_folder_that_is_removed_meanwhile_is_a_lock_of_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lock_file, removed = tmp_path / "run", fcntl.lockf, []

    def lock_late(file: TextIO, how: int) -> None:
        if not removed:  # by its last holder, in another process
            removed.extend([(folder / ".lock").unlink(), folder.rmdir()])
        lock_file(file, how)

    monkeypatch.setattr(fcntl, "lockf", lock_late)
    held = lock(folder)
    assert removed
    assert _is_locked(folder)
    held.close()
    assert not folder.exists()


def _is_locked(folder: Path) -> bool:
    """Whether another process finds the folder locked."""
    code = "import sys, fcntl; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", code, str(folder / ".lock")]
    return (folder / ".lock").exists() and subprocess.run(command, capture_output=True).returncode != 0
