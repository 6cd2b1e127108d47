"""`rlite ppo` on tables of other formats: prompts, their system message and options reach training and evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlite
from rlite.assembly.quickstart.run import CHATML
from rlite.errors import DataError
from rlite.trainer import ppo
from tests.agents import tokenizer_with
from tests.recorded import recorded
from tests.tiny import build_model_dir

QUIET = "{% if enable_thinking is false and add_generation_prompt %}<think></think>{% endif %}"
ENVIRONMENT = """
async def step(state, action, extra_info):
    right = state.startswith("<|im_start|>system\\ns<|im_end|>") and state.endswith("assistant\\n<think></think>")
    score = float(right and extra_info["answer"] in (0, 1))
    return {"next_state": None, "reward": float(len(action)), "score": score, "done": True, "extra_info": extra_info}
"""


@pytest.fixture(autouse=True)
def no_session() -> Iterator[None]:
    yield
    rlite.shutdown()


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def command(folder: Path) -> list[str]:
    build_model_dir(folder / "model", hidden=64)
    tokenizer_with(CHATML + QUIET).save_pretrained(folder / "model")
    (folder / "env.py").write_text(ENVIRONMENT)
    talks = [{"talk": [{"from": "human", "value": f"{n}?"}], "key": n % 2} for n in range(6)]
    chats = [{"prompt": [{"role": "user", "content": f"{n}!"}], "answer": n % 2} for n in range(6)]
    return [
        *(f"actor.model_name={folder / 'model'}", "actor.gradient_checkpointing=false"),
        *(f"train_data.mixture.talks.path={write(folder / 'talks.jsonl', talks)}", "train_data.mixture.talks.weight=1"),
        *("train_data.mixture.talks.columns.conversations=talk", "train_data.mixture.talks.columns.answer=key"),
        *(f"train_data.mixture.chats.path={write(folder / 'chats.jsonl', chats)}", "train_data.mixture.chats.weight=2"),
        *("train_data.system_prompt=s", "train_data.chat_template_options={enable_thinking: false}"),
        *("train_data.prompts_per_rollout=6", "train_data.responses_per_prompt=2"),
        *(f"rollout.env_path={folder / 'env.py'}", "rollout.train_sampling_params.max_new_tokens=4"),
        *(f"test_data.path={folder / 'chats.jsonl'}", f"trainer.save_dir={folder / 'run'}"),
    ]


@pytest.mark.nightly
def test_a_mixture_is_trained_on_resumed_and_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = command(tmp_path)
    ppo.main([*given, "trainer.total_steps=1"])
    assert "a mixture of talks 33.3%, chats 66.7%: talks ShareGPT conversations" in capsys.readouterr().out
    ppo.main([*given, "trainer.total_steps=2"])
    assert "resumed from step 1" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["accuracy"] for row in rows if "accuracy" in row][-1] == 1
    assert [row["score"] for row in rows if row["step"]] == [1, 1]
    prompts = [row["segments"][0]["text"] for row in recorded(tmp_path / "run") if row["segments"]]
    assert all(prompt.startswith("<|im_start|>system\ns") and prompt.endswith("<think></think>") for prompt in prompts)


def test_rows_that_disagree_end_the_command_before_a_model_is_loaded(tmp_path: Path) -> None:
    given = command(tmp_path)
    write(tmp_path / "chats.jsonl", [{"prompt": "raw"}, {"prompt": [{"role": "user", "content": "q"}]}])
    with pytest.raises(DataError, match=r"train_data\.mixture\.chats\.path=.*row index 1: is chat prompts with prompt"):
        ppo.main([arg for arg in given if "system_prompt" not in arg])
    assert not (tmp_path / "run").exists()
