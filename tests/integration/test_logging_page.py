"""Commands and the program of docs/logging.md log to wandb, without a network, and to trackio."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import rlite
from rlite.trainer import grpo, sft
from tests.tiny import build_model_dir

PAGE = Path(__file__).parents[2] / "docs" / "logging.md"
SMALL = {
    "grpo": [
        *("actor.model_name=model", "train_data.path=sums.jsonl", "reward.path=my.py:correct", "num_devices=1"),
        *("train_data.prompts_per_rollout=2", "train_data.responses_per_prompt=2", "trainer.total_steps=1"),
        *("rollout.train_sampling_params.max_new_tokens=4", "rollout.dynamic_filtering=false"),
    ],
    "sft": ["actor.model_name=model", "data.path=rows.jsonl", "data.batch_size=4", "num_devices=1"],
}
"""what `...` stands for, by the name of the command"""


def block(language: str, mark: str) -> str:
    """The block of the page that has this mark."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return next(each for each in blocks if mark in each)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a model, tables and a reward; sinks reach no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    build_model_dir("model", "qwen3", hidden=64)
    rows = [{"prompt": f"{a} + 2 =", "answer": str(a + 2)} for a in range(4)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    learnt = [{"prompt": row["prompt"], "response": row["answer"]} for row in rows]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in learnt))
    Path("my.py").write_text("def correct(prompt, completions, prompt_ids, completion_ids, answer):\n    return 1.0\n")
    return tmp_path


def run(mark: str) -> str:
    """Run the command of the block that has this mark, and return the folder of its run."""
    (command,) = block("bash", mark).replace("\\\n", " ").splitlines()
    name, *words = [word for word in shlex.split(command)[1:] if word != "..."]
    {"grpo": grpo, "sft": sft}[name].main([*words, *SMALL[name]])
    rlite.shutdown()
    return next((word.partition("=")[2] for word in words if word.startswith("trainer.save_dir=")), f"runs/{name}")


@pytest.mark.nightly
def test_the_command_logs_to_wandb(folder: Path) -> None:
    run_folder = folder / run("trainer.entity=our-team")
    assert len(list(run_folder.glob("wandb/offline-run-*/run-*.wandb"))) == 1
    assert (run_folder / "wandb_run_id").read_text()


@pytest.mark.nightly
def test_the_command_logs_to_trackio(folder: Path) -> None:
    assert (folder / run("[jsonl,trackio]") / "trackio_run_name").read_text() == "sft-seed1"
    assert list((folder / "trackio").glob("sums*.db"))


@pytest.mark.nightly
def test_the_program_logs_to_wandb(folder: Path) -> None:
    rlite.init(num_devices=1, launcher="inprocess")
    own: dict[str, Any] = {"rows": [{"prompt": "1 + 2 =", "answer": "3"}] * 2, "correct": correct}
    program = block("python", '"use_wandb": True').replace('"MODEL"', '"model"')
    exec(program.replace("    save_dir", f"    **{SIZES!r},\n    save_dir"), own)
    rlite.shutdown()
    assert len(list((folder / "runs/sums/seed1").glob("wandb/offline-run-*"))) == 1


SIZES = {
    "train_data.prompts_per_rollout": 2,
    "train_data.responses_per_prompt": 2,
    "rollout.train_sampling_params.max_new_tokens": 4,
    "rollout.dynamic_filtering": False,
    "total_steps": 1,
}


def correct(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str) -> float:
    return 1.0
