"""What a run is, and how it ended: its state on the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlite.trainer.run.folder import lock
from rlite.viewer.run import open_runs

START = {"kind": "start", "trainer": "grpo", "command": "rlite grpo", "total_steps": 3, "set": ["actor.lr"], "at": 5.0}
SAVE = {"kind": "save", "step": 2}


def state_of(folder: Path, links: list[Any], steps: int = 3, is_gone: bool = True) -> str:
    """Return the state of a run with these links, whose process has ended or is this one."""
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step + 1}, "loss": 1}}\n' for step in range(steps)))
    (folder / "chain.jsonl").write_text("".join(f"{json.dumps(link)}\n" for link in links))
    held = lock(folder)
    if is_gone:
        held.close()
    try:
        return open_runs([str(folder)])[0].state
    finally:
        held.close()


@pytest.mark.parametrize(
    ("links", "steps", "expected"),
    [
        ([START, SAVE, {"kind": "end", "step": 3}], 3, "finished"),
        ([START, {"kind": "end", "step": 2}], 2, "stopped"),
        ([START, {"kind": "end", "step": 2, "error": "KeyboardInterrupt"}], 2, "stopped"),
        ([START, {"kind": "end", "step": 2, "error": "WorkerDied"}], 2, "crashed"),
        ([START, SAVE], 2, "crashed"),
        ([START, {"kind": "end", "step": 2}, {**START, "kind": "resume"}], 2, "crashed"),
    ],
)
def test_a_run_that_has_ended_says_how(tmp_path: Path, links: list[Any], steps: int, expected: str) -> None:
    assert state_of(tmp_path, links, steps) == expected


def test_a_run_under_way_has_no_end(tmp_path: Path) -> None:
    assert state_of(tmp_path, [START, SAVE], is_gone=False) == ""
    assert state_of(tmp_path, [START, {"kind": "end", "step": 2}, {**START, "kind": "resume"}], is_gone=False) == ""


def test_a_run_of_an_earlier_version_ends_without_a_reason(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {total_steps: 3}")
    assert state_of(tmp_path, [], 3) == "finished"
    assert state_of(tmp_path, [], 2) == "stopped"


def test_a_hostile_chain_tells_short_texts_of_known_types(tmp_path: Path) -> None:
    hostile = {**START, "command": "x" * 10**6, "commit": ["a"], "versions": 7, "set": [{}] * 10**4, "at": "now"}
    links = [START, 5, "text", {"kind": "start"}, {"kind": "end", "step": "x"}, {**hostile, "total_steps": "many"}]
    assert state_of(tmp_path, links) == "crashed"
    [run] = open_runs([str(tmp_path)])
    about = run.chain.begun
    assert len(about["command"]) == 4000
    assert (about["commit"], about["version"], about["at"], about["total_steps"]) == ("['a']", "", None, None)
    assert len(about["set"]) == 2000
