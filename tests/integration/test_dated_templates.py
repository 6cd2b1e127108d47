"""Chat templates that write the time: a run has the time of its start, and resumes with it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import rlite
from rlite.errors import CheckpointError
from rlite.runtime.storage.atomic import MANIFEST, seal
from tests.tiny import build_model_dir

CLOCK_OF_TEMPLATE = "{{ strftime_now('%d %B %Y, %H:%M:%S.%f') }}"
ROWS = [
    {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]}
    for n in range(8)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = build_model_dir(tmp_path_factory.mktemp("models") / "qwen2", hidden=64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CLOCK_OF_TEMPLATE + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


def train(model: str, folder: Path, epochs: int, **options: Any) -> dict[str, Any]:
    options = {"actor.gradient_checkpointing": False, "data.batch_size": 4, "data.max_length": 256, **options}
    rlite.train("sft", model=model, data=ROWS, save_dir=folder, n_epochs=epochs, **options)
    [newest] = sorted((folder / "state").glob("step-*"))[-1:]
    return json.loads((newest / "facts.json").read_text())


@pytest.mark.nightly
def test_a_run_resumes_with_the_time_of_its_start(model: str, tmp_path: Path) -> None:
    before = datetime.now()
    first = train(model, tmp_path / "run", 1)
    assert before < datetime.fromisoformat(first["started"]) < datetime.now()
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    second = train(model, tmp_path / "run", 2)
    assert (second["step"], second["started"]) == (4, first["started"])
    path = tmp_path / "other" / "state" / "step-2"
    elsewhere = train(model, tmp_path / "elsewhere", 2, **{"trainer.load_ckpt_from": str(path)})
    assert (elsewhere["step"], elsewhere["started"]) == (4, first["started"])
    anew = train(model, tmp_path / "run", 1, **{"trainer.overwrite": True})
    assert anew["started"] > first["started"]


@pytest.mark.nightly
def test_a_checkpoint_without_a_time_resumes_with_the_time_of_its_config(model: str, tmp_path: Path) -> None:
    facts = train(model, tmp_path / "run", 1)
    started = datetime.fromisoformat(facts.pop("started"))
    checkpoint = tmp_path / "run" / "state" / "step-2"
    (checkpoint / MANIFEST).unlink()
    seal(checkpoint, facts)
    written = round(started.timestamp() * 1_000_000)
    for wrong in (86_400_000_000, 0):
        os.utime(tmp_path / "run" / "config.yaml", ns=((written - wrong) * 1000,) * 2)
        with pytest.raises(CheckpointError, match="another content") if wrong else nullcontext():
            train(model, tmp_path / "run", 2)
    assert (tmp_path / "run" / "state" / "step-4").is_dir()


@pytest.mark.nightly
def test_an_evaluation_goes_on_with_the_time_of_its_first_samples(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def correct(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **row: Any) -> float:
        prompts.append(prompt)
        return 1.0

    prompts: list[str] = []
    rows = [{"prompt": each["messages"][:1]} for each in ROWS[:3]]

    def asked(folder: str, model: str = model, other: str | None = None) -> set[str]:
        """Evaluate, and return the times in all prompts."""
        prompts.clear()
        options = {"reward.correct.in_process": True, "max_new_tokens": 2, "out": tmp_path / folder}
        rlite.evaluate(model, other, data=rows, reward=correct, **options)
        return {prompt.partition("<|")[0] for prompt in prompts}

    journal = tmp_path / "a" / "samples" / f"{Path(model).name}.jsonl"
    [first] = asked("a")
    header, *samples = journal.read_text().splitlines()
    time = datetime.fromisoformat(json.loads(header)["time"])
    assert time.strftime("%d %B %Y, %H:%M:%S.%f") == first
    earlier = time - timedelta(days=3)
    journal.write_text("\n".join([header.replace(time.isoformat(), earlier.isoformat()), samples[0], ""]))
    assert asked("a") == {earlier.strftime("%d %B %Y, %H:%M:%S.%f")}
    assert f"write {earlier:%Y-%m-%d}, as in the samples that are there" in capfd.readouterr().err
    assert asked("b", str(tmp_path / "a"), model) == {earlier.strftime("%d %B %Y, %H:%M:%S.%f")}
    [again] = asked("c")
    assert again > first
