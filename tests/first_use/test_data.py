"""First use of public datasets: the commands on their formats, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlite.trainer import dpo, sft

QUESTIONS = [f"{n} + {n} = ?" for n in range(24)]
SYSTEM = "Answer with one number."
COMMON = [f"data.system_prompt={SYSTEM}", "data.batch_size=8", "data.max_length=256", "actor.lr=3e-3"]
COMMON += ["trainer.n_epochs=4"]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def runs(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run of SFT on ShareGPT data."""
    runs = tmp_path_factory.mktemp("runs")
    rows = [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": "7"}]} for q in QUESTIONS]
    data = f"data.path={write(runs / 'talks.jsonl', rows)}"
    with (runs / "sft.log").open("w") as log, redirect_stdout(log):
        sft.main([*COMMON, data, f"actor.model_name={model}", f"trainer.save_dir={runs / 'sft'}"])
    return runs


def test_sft_on_sharegpt_conversations_with_a_system_prompt(runs: Path) -> None:
    assert "ShareGPT conversations (conversations)" in (runs / "sft.log").read_text()
    assert answer(runs / "sft" / "latest", QUESTIONS[3]).startswith("7<|im_end|>")


def test_dpo_on_ultrafeedback_rows_from_the_checkpoint_of_sft(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = {"chosen": "8", "rejected": "7"}
    rows = [{side: talk(q, text) for side, text in sides.items()} | {"prompt": q, "score": 9.0} for q in QUESTIONS]
    data = f"data.path={write(runs / 'pairs.jsonl', rows)}"
    dpo.main([*COMMON, data, f"actor.model_name={runs / 'sft' / 'latest'}", f"trainer.save_dir={runs / 'dpo'}"])
    assert "preferences between conversations (chosen, rejected)" in capsys.readouterr().out
    assert json.loads((runs / "dpo" / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"] == 1
    assert answer(runs / "dpo" / "latest", QUESTIONS[3]).startswith("8<|im_end|>")


def talk(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def answer(folder: Path, question: str) -> str:
    """Return what the model says to a question after the system prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = AutoModelForCausalLM.from_pretrained(folder).generate(**ids, max_new_tokens=4, do_sample=False)
    return tokenizer.decode(said[0, ids["input_ids"].shape[1] :])
