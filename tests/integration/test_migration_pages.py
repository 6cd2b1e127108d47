"""Commands, recipes and programs on the pages for users of other libraries and of mixtures work."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import init_empty_weights
from transformers import Qwen3ForCausalLM

import rlite
import rlite.control
import rlite.nn
from rlite.cli import COMMANDS
from rlite.config import load
from rlite.trainer import ppo, sft
from tests.mixtures import build_mixture_dir
from tests.tiny import build_model_dir

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("coming-from-*.md"))
MIXTURES = DOCS / "mixtures.md"
RLITE = DOCS / "coming-from-rlite-rl2-areal-dlrover.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def program(page: Path, mark: str) -> str:
    """The Python program of a page that has this mark."""
    (found,) = (block for block in blocks(page, "python") if mark in block)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_model_dir(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", hidden=64))


@pytest.mark.parametrize("page", [*PAGES, MIXTURES], ids=lambda page: page.stem)
def test_the_options_of_commands_exist(page: Path) -> None:
    commands = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    for command in commands:
        words = shlex.split(command)
        name = words[words.index("-m") + 1].rpartition(".")[2] if "-m" in words else words[1]
        # functions of rewards are the reader's own files
        settings = [word for word in words if re.match(r"[a-z_.]+=", word) and not word.startswith("reward.")]
        options = COMMANDS[name].find_options()
        load(options, settings, aliases=options.aliases)


def test_every_page_has_a_command_or_a_recipe() -> None:
    assert len(PAGES) == 4
    assert all(blocks(page, "bash") or blocks(page, "yaml") for page in PAGES)


def test_the_recipe_for_users_of_prime_rl_trains(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = DOCS / "coming-from-prime-rl.md"
    (recipe,) = blocks(page, "yaml")
    Path("rl.yaml").write_text(recipe)
    Path("reverse_text.py").write_text(program(page, "async def step"))
    rows = [{"messages": [{"role": "user", "content": f"Reverse {word}."}], "text": word} for word in ("ab", "cd")]
    Path("reverse_text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert yaml.safe_load(recipe)["rollout"]["max_head_offpolicyness"] == 1
    small = [f"actor.model_name={model}", "train_data.prompts_per_rollout=2", "train_data.responses_per_prompt=2"]
    small += ["rollout.train_sampling_params.max_new_tokens=4", "trainer.total_steps=1", "trainer.save_dir=run"]
    alone = ["launcher=inprocess", "num_devices=1", "rollout.max_head_offpolicyness=0", "rollout.num_devices=null"]
    ppo.main(["--config", "rl.yaml", *small, *alone, "rollout.dynamic_filtering=false"])
    (metrics,) = (json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines())
    assert metrics["reward"] == 0.0
    own: dict[str, Any] = {}
    exec(program(page, "async def step"), own)
    assert own["step"] is not None


def test_the_program_for_users_of_rlite_runs(model: str) -> None:
    own: dict[str, Any] = {}
    try:
        exec(program(RLITE, "RLiteInferenceEngine").replace("Qwen/Qwen2.5-7B-Instruct", model), own)
        assert [len(output.outputs[0].token_ids) <= 10 for output in own["outputs"]] == [True] * 3
        assert own["engine"].options.max_model_len == 1024
    finally:
        rlite.shutdown()


class Policy(rlite.nn.HuggingFaceFsdp2TrainModule, Qwen3ForCausalLM):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_loss_for_users_of_areal_raises_the_probability_of_what_was_rewarded(model: str) -> None:
    own: dict[str, Any] = {}
    exec(program(RLITE, "def reinforce_loss"), own)
    rlite.init("cpu", 1)
    try:
        with init_empty_weights():
            engine = rlite.RliteTrainEngine(Policy.from_pretrained(model))
        engine.build()
        ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])
        batch = {
            "input_ids": ids,
            "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool),
            "loss_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]]),
            "rewards": torch.tensor([1.0, 0.0]),
        }
        losses = [engine.train_batch(batch, own["reinforce_loss"], own["num_tokens"])["loss"] for _ in range(3)]
        assert losses[2] < losses[0]
        first = -torch.log_softmax(Qwen3ForCausalLM.from_pretrained(model)(ids[:1]).logits[0, :-1], -1)
        assert losses[0] == pytest.approx(first[range(3), ids[0, 1:]].sum().item() / 5, rel=1e-4)
    finally:
        rlite.shutdown()


def test_the_classes_for_users_of_dlrover_are_a_job() -> None:
    own: dict[str, Any] = {"__name__": "job"}
    exec(program(RLITE, "BaseWorkload"), own)
    builder = rlite.control.RLJobBuilder().node_num(1).device_per_node(1).device_type("CPU").config({})
    assert builder.trainer(own["Trainer"]).actor(own["Actor"]).total(1).per_node(1).end().build() is not None


def test_the_adapters_of_experts_on_the_page_of_mixtures_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = build_mixture_dir(tmp_path / "model", "qwen3_moe")
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "response": "{n + 1}"}}\n' for n in range(4)))
    (block,) = blocks(MIXTURES, "bash")[:1]
    commands = block.replace("\\\n", " ").replace("MODEL", str(model)).splitlines()
    (words,) = (shlex.split(command)[2:] for command in commands if command.startswith("rlite sft"))
    small = ["data.batch_size=4", "trainer.n_epochs=1", "trainer.save_dir=run", "launcher=inprocess", "num_devices=1"]
    sft.main([*words, *small])
    assert (tmp_path / "run/latest/adapter/adapter_config.json").exists()
    (metrics,) = (json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines())
    assert metrics["moe/load_max"] >= 1
