"""The own code of a user: names that `--import` registers, on every rank; callbacks that stop, fail and resume."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import rlite
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.config import load
from rlite.data.sft import preference_rows, sft_rows
from rlite.errors import CallbackError
from rlite.trainer.callbacks import Callback
from rlite.trainer.dpo import DpoTrainer
from rlite.trainer.rm import RmTrainer
from rlite.trainer.sft import SftTrainer
from rlite.trainer.supervised_options import DpoConfig, RmConfig, SftConfig
from tests import forked_python
from tests.integration.worlds import environment
from tests.marks import nightly
from tests.tiny import build_model_dir

TRAINERS: dict[str, Any] = {"sft": (SftConfig, SftTrainer), "rm": (RmConfig, RmTrainer), "dpo": (DpoConfig, DpoTrainer)}
STOP = 3
OWN = """
from rlite.algorithms import LossInputs, TokenLoss, register_advantage, register_policy_loss
from rlite.rollout.registry import register_reward
from rlite.trainer.callbacks import Callback, register_callback


@register_policy_loss("squared")
def squared(inputs: LossInputs, *, strength: float = 1.0) -> TokenLoss:
    penalty = (inputs.logprobs - inputs.old_logprobs).square()
    return TokenLoss(strength * penalty - inputs.advantages * inputs.logprobs, {"penalty": penalty.detach()})


@register_advantage("above_median")
def above_median(rewards, group_ids):
    return rewards - rewards.median()


def share_of_letters(text):
    return sum(letter.isalpha() for letter in text) / max(len(text), 1)


@register_reward("letters")
def letters(prompt, completions, prompt_ids, completion_ids, **data):
    return share_of_letters(completions)


@register_callback("told")
class Told(Callback):
    def on_start(self, run, metrics):
        print("told: start at", run.step)

    def on_evaluate(self, run, metrics):
        print("told: evaluation at", run.step, "accuracy" in metrics)

    def on_step(self, run, metrics):
        print("told: step", run.step, "penalty" in metrics)
        if run.step == 2:
            run.stop("two are enough")

    def on_save(self, run, metrics):
        print("told: saved", run.step)

    def on_end(self, run, metrics):
        print("told: end at", run.step)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_model_dir(tmp_path_factory.mktemp("models") / "qwen2", hidden=64))


def told(folder: Path, *command: str) -> list[str]:
    """Return the output of the callback `told` in a program that ran to its end."""
    program = [forked_python.python(), *command]
    done = subprocess.run(program, cwd=folder, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return [line for line in done.stdout.splitlines() if line.startswith("told")]


@pytest.mark.nightly
def test_names_from_a_file_work_on_all_ranks(model: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(8)))
    said = told(
        tmp_path,
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "rlite.trainer.ppo"),
        *("--import", "own.py", f"actor.model_name={model}", "actor.gradient_checkpointing=false"),
        *("actor.policy_loss.name=squared", "actor.policy_loss.options.strength=0.5", "adv.estimator=above_median"),
        *(
            "reward.path=letters",
            "rollout.train_sampling_params.max_new_tokens=8",
            "rollout.dynamic_filtering=false",
        ),
        *("train_data.path=prompts.jsonl", "train_data.prompts_per_rollout=2", "train_data.responses_per_prompt=2"),
        *("test_data.path=prompts.jsonl", "trainer.test_freq=2", "trainer.total_steps=9", "trainer.save_dir=run"),
        "trainer.callbacks=[told]",
    )
    assert said == [
        "told: start at 0",
        "told: evaluation at 0 True",
        "told: step 1 True",
        "told: evaluation at 2 True",
        "told: step 2 True",
        "told: saved 2",
        "told: end at 2",
    ]
    assert (tmp_path / "run/state/step-2").is_dir()


class Stops(Callback):
    """Stops at the third step that it has seen, in whichever process."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step(self, run: Any, metrics: Any) -> None:
        self.seen.append(run.step)
        if len(self.seen) == STOP:
            run.stop("enough")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Broken(Callback):
    def on_step(self, run: Any, metrics: Any) -> None:
        if run.step == 2:
            raise ValueError("a mistake of its own")


def fit(kind: str, model: str, out: Path, *callbacks: Callback) -> int:
    """Train in a session of its own; return the step at the end."""
    options, cls = TRAINERS[kind]
    key = "critic" if kind == "rm" else "actor"
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(32)]
    rows: list[dict[str, str]] = [
        {"prompt": word, "response": word} if kind == "sft" else {"prompt": word, "chosen": "yes", "rejected": word}
        for word in words
    ]
    tokens = (sft_rows if kind == "sft" else preference_rows)(rows, byte_tokenizer(), 32)
    settings = [f"{key}.model_name={model}", f"{key}.gradient_checkpointing=false", f"trainer.save_dir={out}"]
    config = load(options, [*settings, "data.path=-", "data.batch_size=4"])
    rlite.init(num_devices=1, num_threads=1)
    try:
        trainer = cls(config, tokens, callbacks=callbacks)
        trainer.fit()
    finally:
        rlite.shutdown()
    return trainer.run.step


@pytest.mark.parametrize("kind", ["sft", *nightly(*(kind for kind in TRAINERS if kind != "sft"))])
def test_run_ended_by_a_callback_error_resumes_with_the_same_results(kind: str, model: str, tmp_path: Path) -> None:
    assert fit(kind, model, tmp_path / "whole", Stops()) == STOP
    with pytest.raises(CallbackError, match=r"'Broken' raised ValueError in on_step at step 2"):
        fit(kind, model, tmp_path / "broken", Broken(), Stops())
    assert [path.name for path in (tmp_path / "broken/state").iterdir()] == ["step-2"]
    stops = Stops()
    assert fit(kind, model, tmp_path / "broken", stops) == STOP
    assert stops.seen == [1, 2, 3]
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "broken")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STOP
    weights = [load_file(tmp_path / name / "latest" / "model.safetensors") for name in ("whole", "broken")]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    assert fit(kind, model, tmp_path / "broken", Stops()) == STOP, "the same command does not go on after a stop"
