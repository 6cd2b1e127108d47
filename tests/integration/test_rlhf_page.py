"""docs/rlhf.md: its three commands run on a tiny model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import rlite
from rlite.trainer import ppo, rm
from tests.tiny import build_model_dir

PAGE = Path(__file__).parents[2] / "docs" / "rlhf.md"


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found


def test_a_reward_model_ppo_with_its_critic_and_dpo_are_three_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = str(build_model_dir("model", hidden=64))
    chats = [{"messages": [{"role": "user", "content": f"{n}?"}]} for n in range(4)]
    pairs = [{**chat, "chosen": "aaa", "rejected": "zzz"} for chat in chats]
    for name, rows in (("prompts", chats), ("pairs", pairs)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [shlex.split(line) for line in block("bash").replace("\\\n", " ").splitlines()]
    scored, learnt, (_, program) = words
    small = ["launcher=inprocess", "num_devices=1"]
    rm.main([*(word.replace("MODEL", model) for word in scored[2:]), *small, "data.batch_size=4", "data.max_length=64"])
    rlite.shutdown()
    few = [
        "train_data.prompts_per_rollout=4",
        "rollout.train_sampling_params.max_new_tokens=6",
        "trainer.total_steps=2",
    ]
    ppo.main([*(word.replace("MODEL", model) for word in learnt[2:]), *small, *few])
    rlite.shutdown()
    rows = [json.loads(line) for line in Path("runs/ppo/metrics.jsonl").read_text().splitlines()]
    assert all("reward" in row and "critic/loss" in row for row in rows)
    assert program == "dpo.py"
    rlite.init(num_devices=1, launcher="inprocess")
    found: dict[str, object] = {}
    exec(block("python"), found)
    rlite.shutdown()
    made = found["pairs"]
    assert isinstance(made, list)
    assert 1 <= len(made) <= 8
    assert all(pair["prompt"].endswith("assistant\n") for pair in made)
    assert not any("<|im_end|>" in pair[side] for pair in made for side in ("chosen", "rejected"))
    assert Path("runs/dpo/latest/config.json").is_file()
