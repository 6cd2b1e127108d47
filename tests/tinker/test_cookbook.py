"""Recipes of the API's cookbook, unmodified and offline, on a tiny model and data made here: `make test-tinker`.

The recipes name models and data sets of the hub. Folders of these names stand where the recipes run.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.tinker.client import FOLDER, NEWEST, client_package
from tests.tinker.commands import TOKEN, environment, free_port, of_client, server
from tests.tiny import build_model_dir

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""a name whose chat format the cookbook knows"""
SOLUTION = 7
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SHOWN = (
    f"How many r's are in strawberry?{SUFFIX}",
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}",
)
"""the example with which rl_loop begins its prompts"""


@dataclass
class Cookbook:
    """A folder with a model and data, and a server of the model."""

    folder: Path
    port: int

    def cook(self, recipe: str, log: str, **options: Any) -> list[dict[str, Any]]:
        """Run a recipe, and return its metrics by step."""
        given = {"model_name": NAME, "log_path": self.folder / log, **options}
        command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *(f"{k}={v}" for k, v in given.items())]
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder / "hub"), **of_client(self.port)}
        variables = environment("cookbook", NEWEST, **offline)
        done = subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return [json.loads(line) for line in (self.folder / log / "metrics.jsonl").read_text().splitlines()]

    def saved(self, log: str) -> dict[str, Any]:
        """The last checkpoint of a recipe, as it noted it."""
        return json.loads((self.folder / log / "checkpoints.jsonl").read_text().splitlines()[-1])

    def data(self, name: str, config: str | None = None, **splits: list[dict[str, Any]]) -> None:
        """Write a data set under its name of the hub."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        for split, rows in splits.items():
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if config is not None:
            files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
            (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")


@pytest.fixture(scope="module")
def cookbook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cookbook]:
    client_package()
    if not (FOLDER / "cookbook").is_dir():
        pytest.skip(f"tinker_cookbook is not in {FOLDER}: `make test-tinker` installs it")
    made = Cookbook(tmp_path_factory.mktemp("cookbook"), free_port())
    model = build_model_dir(made.folder / NAME, "qwen3", hidden=64, initializer_range=0.2)  # it can be sure
    draw = random.Random(0)
    questions = [f"What is {draw.randrange(50)} + {draw.randrange(50)}?" for _ in range(1024)]
    turns = [(*SHOWN, f"{q}{SUFFIX}", f"\\boxed{{{draw.choice('357')}}}") for q in questions]
    roles = ("user", "assistant") * 2
    chats = [{"messages": [{"role": r, "content": t} for r, t in zip(roles, own, strict=True)]} for own in turns]
    pairs = [
        {"chosen": f"\n\nHuman: {q}\n\nAssistant: yes, 7", "rejected": f"\n\nHuman: {q}\n\nAssistant: no, 3"}
        for q in questions
    ]
    made.data("HuggingFaceH4/no_robots", train=chats)
    made.data("openai/gsm8k", "main", train=[{"question": q, "answer": f"#### {SOLUTION}"} for q in questions])
    made.data("Anthropic/hh-rlhf", train=pairs[:512], test=pairs[512:544])
    made.data("zwhe99/DeepMath-103K", train=[{"question": q} for q in questions])
    with server(model, made.folder / "state", made.port, f"name={NAME}"):
        yield made


@pytest.fixture(scope="module")
def taught(cookbook: Cookbook) -> list[dict[str, Any]]:
    """Metrics of the supervised loop: an adapter that answers with a boxed digit."""
    return cookbook.cook(
        "sl_loop",
        "taught",
        batch_size=8,
        learning_rate=1e-2,
        lora_rank=16,
        save_every=20,
        max_steps=60,
        train_on_what="last_assistant_message",
    )


def test_supervised_loop_learns_and_saves_what_expires(cookbook: Cookbook, taught: list[dict[str, Any]]) -> None:
    assert taught[-1]["train_mean_nll"] < 0.3 < 2 < taught[0]["train_mean_nll"]
    url = f"http://127.0.0.1:{cookbook.port}/api/v1/checkpoints"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"X-API-Key": TOKEN})) as answer:
        found = {each["tinker_path"]: each["expires_at"] for each in json.loads(answer.read())["checkpoints"]}
    assert found[cookbook.saved("taught")["state_path"]] is None
    assert sum(expires is not None for expires in found.values()) == 2


def test_rl_loop_with_importance_sampling_raises_the_reward(cookbook: Cookbook, taught: list[dict[str, Any]]) -> None:
    begun = cookbook.folder / "rewarded"
    begun.mkdir()
    own = {**cookbook.saved("taught"), "batch": 0}
    (begun / "checkpoints.jsonl").write_text(json.dumps(own) + "\n")
    found = cookbook.cook(
        "rl_loop",
        "rewarded",
        batch_size=4,
        group_size=8,
        learning_rate=4e-3,
        max_tokens=12,
        loss_fn="importance_sampling",
        max_steps=20,
    )
    rewards = [step["reward/total"] for step in found]
    assert 0.1 < sum(rewards[:4]) / 4 < 0.6
    assert sum(rewards[-4:]) / 4 > 0.8


def test_dpo_prefers_what_was_chosen(cookbook: Cookbook) -> None:
    found = cookbook.cook(
        "preference.dpo.train", "preferred", dataset="hhh", batch_size=16, learning_rate=1e-3, max_steps=12
    )
    assert found[0]["dpo_loss"] == pytest.approx(0.6931, abs=1e-3), "it begins as its reference"
    assert found[-1]["dpo_loss"] < 0.3
    assert found[-1]["accuracy"] == 1.0


def test_on_policy_distillation_reaches_its_teacher(cookbook: Cookbook, taught: list[dict[str, Any]]) -> None:
    found = cookbook.cook(
        "distillation.on_policy_distillation",
        "distilled",
        teacher_model=NAME,
        teacher_checkpoint=cookbook.saved("taught")["sampler_path"],
        dataset="deepmath",
        group_size=4,
        groups_per_batch=16,
        learning_rate=1e-2,
        lora_rank=16,
        max_tokens=12,
        eval_every=0,
        max_steps=25,
    )
    distances = [step["teacher_kl"] for step in found]
    assert sum(distances[-3:]) < 0.65 * sum(distances[:3])
