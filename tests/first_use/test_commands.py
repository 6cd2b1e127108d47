"""First use of the commands: KTO on labelled answers, and GRPO with adapters and a KL."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from peft import PeftConfig

from rlite.cli import main


def rlite(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["rlite", *arguments])
    main()


def metrics(run: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def test_kto_on_answers_with_a_label(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": f"{number}?", "completion": answer, "label": answer == "yes"}
        for number in range(64)
        for answer in ("yes", "no")
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["data.batch_size=32", "actor.lr=1e-3", "actor.gradient_checkpointing=false"]
    rlite(monkeypatch, "kto", f"actor.model_name={model}", "data.path=rows.jsonl", *options)
    assert metrics("runs/kto")[0]["margin"] == 0.0
    assert metrics("runs/kto")[-1]["margin"] > 0.2


def test_grpo_with_adapters_and_a_kl(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{number}?"}) + "\n" for number in range(8)))
    Path("letters.py").write_text(
        "def letters(prompt, completions, prompt_ids, completion_ids, **row):\n"
        "    return sum(map(str.isalpha, completions))\n"
    )
    options = ["actor.lora.rank=4", "actor.lr=1e-2", "trainer.total_steps=2", "train_data.prompts_per_rollout=8"]
    options += ["reward.path=letters.py:letters", "rollout.train_sampling_params.max_new_tokens=8"]
    given = [f"actor.model_name={model}", "train_data.path=prompts.jsonl"]
    rlite(monkeypatch, "grpo", *given, *options)
    first, second = metrics("runs/grpo")
    assert first["kl"] == 0.0 < second["kl"]
    assert PeftConfig.from_pretrained("runs/grpo/latest/adapter").r == 4
