"""A model learns where answers end, and stops there: during the run, in its export, and when it is trained again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlite
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.vllm import worker as vllm_worker
from rlite.config import load
from rlite.nn.pretrained import end_ids
from rlite.trainer.dpo import DpoTrainer
from rlite.trainer.kto import KtoTrainer
from rlite.trainer.rm import RmTrainer
from rlite.trainer.sft import SftTrainer
from rlite.trainer.supervised_options import DpoConfig, KtoConfig, RmConfig, SftConfig
from tests.tiny import build_model_dir

OTHER = byte_tokenizer().convert_tokens_to_ids("<|endoftext|>")
END = byte_tokenizer().eos_token_id
QUESTION = [{"role": "user", "content": "hi"}]
ROWS: dict[str, Any] = {
    "sft": [{"messages": [*QUESTION, {"role": "assistant", "content": text}]} for text in ("yes", "no")],
    "sft raw": [{"prompt": "hi", "response": text} for text in ("yes", "no")],
    "dpo": [{"messages": QUESTION, "chosen": "yes", "rejected": "no"}] * 2,
    "rm": [{"messages": QUESTION, "chosen": "yes", "rejected": "no"}] * 2,
    "kto": [{"messages": QUESTION, "completion": text, "label": text == "yes"} for text in ("yes", "no")],
}
SHORT = """
def reward(prompt, completions, prompt_ids, completion_ids, **_):
    return float(len(completion_ids) < 24)
"""
TRAINERS: dict[str, Any] = {
    "sft": (SftConfig, SftTrainer),
    "sft raw": (SftConfig, SftTrainer),
    "dpo": (DpoConfig, DpoTrainer),
    "rm": (RmConfig, RmTrainer),
    "kto": (KtoConfig, KtoTrainer),
}


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that stops at another token than the end of its chat template."""
    path = build_model_dir(tmp_path_factory.mktemp("models") / "base", hidden=32, layers=1)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": OTHER, "temperature": 0.6}))
    return path


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


def train(kind: str, model: Path, folder: Path, **options: Any) -> Path:
    config, trainer = TRAINERS[kind]
    folder.mkdir(exist_ok=True)
    (folder / "rows.json").write_text(json.dumps(ROWS[kind]))
    key = "critic" if kind == "rm" else "actor"
    settings = {
        f"{key}.model_name": str(model),
        "data.path": str(folder / "rows.json"),
        "data.max_length": 64,
        "data.batch_size": 2,
        "trainer.save_dir": str(folder / "run"),
        **options,
    }
    trainer.train(load(config, [f"{name}={value}" for name, value in settings.items()]))
    return folder / "run" / "latest"


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_saved_model_stops_where_its_answers_end(
    kind: str, base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = train(kind, base_model, tmp_path)
    assert end_ids(saved) == (OTHER, END)
    assert json.loads((saved / "generation_config.json").read_text())["temperature"] == 0.6
    assert vllm_worker.end_ids is end_ids
    said = " ".join(capsys.readouterr().out.split())
    assert "'<|im_end|>' added to the model's end tokens ('<|endoftext|>')" in said
    train(kind, saved, tmp_path / "again")
    assert "added to the model's end tokens" not in capsys.readouterr().out


def test_a_kept_end_changes_no_model(base_model: Path, tmp_path: Path) -> None:
    assert end_ids(train("sft", base_model, tmp_path, **{"data.end_token": "keep"})) == (OTHER,)


def test_answers_of_an_evaluation_during_the_run_stop_there_too(base_model: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(SHORT)
    (tmp_path / "prompts.json").write_text(json.dumps([{"messages": QUESTION}]))
    options = {
        "trainer.n_epochs": 30,
        "trainer.test_freq": 30,
        "actor.lr": 0.02,
        "test_data.path": str(tmp_path / "prompts.json"),
        "test_data.reward.path": f"{tmp_path / 'reward.py'}:reward",
        "generation.max_new_tokens": 24,
    }
    train("sft", base_model, tmp_path, **options)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["accuracy"] for line in lines if "accuracy" in line] == [1.0]
