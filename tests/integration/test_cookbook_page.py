"""Recipes of docs/cookbook.md that need more than the page's folder: DAPO's options in a run, pdb in a reward."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import rlite
from rlite.trainer import ppo
from tests.tiny import build_model_dir

ROOT = Path(__file__).parents[2]
PAGE, CALLBACKS = ROOT / "docs" / "cookbook.md", ROOT / "docs" / "callbacks.md"
SMALL = [
    *("train_data.prompts_per_rollout=2", "train_data.responses_per_prompt=4", "trainer.total_steps=1"),
    "rollout.train_sampling_params.max_new_tokens=8",
]


def block(language: str, mark: str, page: Path = PAGE) -> str:
    """The block of a page that has this mark."""
    blocks = re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return next(each for each in blocks if mark in each)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a model and prompts."""
    monkeypatch.chdir(tmp_path)
    build_model_dir("model", "qwen3", hidden=64)
    rows = [{"prompt": f"{a} + 2 =", "answer": str(a + 2)} for a in range(4)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.nightly
def test_the_options_of_dapo_train(folder: Path) -> None:
    Path("dapo.yaml").write_text(block("yaml", "# dapo.yaml").replace("MODEL", "model"))
    Path("right.py").write_text(block("python", "# right.py"))
    words = shlex.split(block("bash", "--config dapo.yaml"))
    given = words[words.index("rlite.trainer.ppo") + 1 :]
    short = ["reward.overlong.options={max_length: 8, cache: 4}", "actor.update_per_rollout=2", "rollout.max_refills=1"]
    ppo.main([*given, *SMALL, *short, "trainer.save_dir=run", "num_devices=1", "launcher=inprocess"])
    rlite.shutdown()
    (metrics,) = (json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines())
    assert metrics["reward/right"] == -1.0
    assert -1.0 <= metrics["reward/overlong"] <= 0.0
    saved = yaml.safe_load(Path("run/config.yaml").read_text())
    assert (saved["actor"]["clip"], saved["actor"]["clip_high"], saved["kl"]["type"]) == (0.2, 0.28, None)


@pytest.mark.nightly
@pytest.mark.parametrize("page", [PAGE, CALLBACKS], ids=lambda page: page.stem)
def test_breakpoint_in_a_reward_opens_pdb(page: Path, folder: Path) -> None:
    reward = "def correct(prompt, completions, prompt_ids, completion_ids, answer):\n    breakpoint()\n    return 1.0\n"
    Path("my.py").write_text(reward)
    words = shlex.split(block("bash", "| cat", page).partition("|")[0])[1:]
    given = [
        "actor.model_name=model",
        "train_data.path=prompts.jsonl",
        "rollout.dynamic_filtering=false",
        "num_devices=1",
    ]
    words = [words[0], *given, *(word for word in words[1:] if word not in ("...", "num_devices=1")), *SMALL]
    done = subprocess.run(
        [sys.executable, "-c", "from rlite.cli import main; main()", *words],
        input="p answer\n" + "c\n" * 8,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(Pdb)") >= 8
    assert re.search(r"\(Pdb\) '\d'", done.stdout)
