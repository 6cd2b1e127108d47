"""`rlite.train` in the program's own session, and under torchrun; every trainer, from data of every kind."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from tensordict import TensorDict

import rlite
from rlite.data.packs import with_keys
from rlite.errors import ConfigError
from rlite.runtime.cluster.session import has_session
from rlite.trainer.grpo import GrpoTrainer
from tests import forked_python
from tests.integration.worlds import environment
from tests.tiny import build_model_dir

SMALL = {"gradient_checkpointing": False}
PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "no"} for n in range(8)]
PROGRAM = """
import rlite

def length(completions, **columns):
    return [float(len(text)) for text in completions]

rows = [{"prompt": f"{n}+1="} for n in range(4)]
options = {"rollout.train_sampling_params.max_new_tokens": 4, "train_data.prompts_per_rollout": 2}
run = rlite.train("grpo", model=MODEL, data=rows, reward=length, save_dir="run", total_steps=1, **options)
print("told", "reward" in run.metrics, len(run.generate("1+1=", max_new_tokens=2)))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_model_dir(tmp_path_factory.mktemp("models") / "qwen2", hidden=64))


@pytest.fixture
def session() -> Iterator[Any]:
    yield rlite.init(num_devices=1, num_threads=1)
    rlite.shutdown()


def endless(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from rows


@pytest.mark.nightly
def test_every_trainer_runs_in_the_programs_session(model: str, tmp_path: Path, session: Any) -> None:
    shown = [{"prompt": row["prompt"], "response": row["chosen"]} for row in PAIRS]
    tables = {"sft": datasets.Dataset.from_list(shown), "dpo": PAIRS, "rm": endless(PAIRS)}
    runs = {
        name: rlite.train(
            name, model=model, data=data, save_dir=tmp_path / name,
            test_data={"one": data, "two": PAIRS[:2]} if name == "dpo" else None,
            **{"critic" if name == "rm" else "actor": SMALL, "data.batch_size": 4},
        )
        for name, data in tables.items()
    }  # fmt: skip
    assert rlite.current_session() is session
    assert all(len(run.history) == 2 and run.model.is_dir() for run in runs.values())
    assert {"one/test_loss", "two/test_loss"} <= runs["dpo"].metrics.keys()
    chat, text = [{"role": "user", "content": "1+1="}], "1+1="
    first, second = runs["sft"].generate([chat, text], max_new_tokens=8, temperature=0)
    assert first == second
    assert runs["sft"].generate(text, max_new_tokens=8, temperature=0, chat=False) != [first]
    with pytest.raises(ConfigError, match="is a reward model, which generates no text"):
        runs["rm"].generate("1+1=")


@pytest.mark.nightly
def test_ppo_trains_a_critic_and_the_same_call_finds_the_run_finished(model: str, tmp_path: Path) -> None:
    def call(**options: Any) -> Any:
        return rlite.train(
            "ppo", model=model, data=PAIRS, reward={"long": (length, 0.5), "one": lambda completions, **row: [1.0]},
            save_dir=tmp_path, total_steps=1, actor=SMALL, adv={"estimator": "gae"},
            **{"train_data.prompts_per_rollout": 4, "rollout.train_sampling_params": {"max_new_tokens": 4}}, **options,
        )  # fmt: skip

    run = call()
    assert not has_session()
    assert run.metrics["reward"] == pytest.approx(1 + 0.5 * run.metrics["reward/long"])
    assert (tmp_path / "critic_latest").is_dir()
    assert call().metrics["reward"] == run.metrics["reward"]
    with pytest.raises(ConfigError, match="another run"):
        call(**{"actor.lr": 1e-3})


@pytest.mark.nightly
def test_rewards_are_normalised_one_by_one_with_their_weights_and_returns_are_whitened(
    model: str, tmp_path: Path
) -> None:
    def train(estimator: str, weight: float) -> Any:
        return rlite.train(
            "ppo", model=model, data=PAIRS,
            reward={"long": (length, weight), "one": lambda completions, **row: [1.0] * len(completions)},
            save_dir=tmp_path / f"{estimator}-{weight}", total_steps=1, actor=SMALL, adv={"estimator": estimator},
            **{"train_data.prompts_per_rollout": 4, "rollout.train_sampling_params": {"max_new_tokens": 4}},
        ).metrics["grad_norm"]  # fmt: skip

    assert train("gdpo", 0.5) > 0
    assert train("gdpo", 0.0) == 0, "the reward that differs has no weight"
    assert train("reinforce_pp", 0.5) > 0


def length(prompt: str, completions: str, **row: Any) -> float:
    return float(len(completions))


class Doubled(GrpoTrainer):
    """A trainer of the program."""

    def with_advantages(self, batch: TensorDict) -> TensorDict:
        batch = super().with_advantages(batch)
        return with_keys(batch, advantages=2 * batch["advantages"])


def test_a_class_of_the_program_trains_and_what_its_reward_prints_is_kept(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def talks(prompt: str, completions: str, **row: Any) -> float:
        print(f"{len(completions)} characters")
        return float(len(completions))

    small = {"train_data.prompts_per_rollout": 2, "rollout.train_sampling_params": {"max_new_tokens": 4}}
    run = rlite.train(Doubled, model=model, data=PAIRS, reward=talks, save_dir=tmp_path, total_steps=1, **small)
    assert run.metrics["reward"] > 0
    lines = [json.loads(line) for line in (tmp_path / "prints.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {1}
    assert len({(line["row"], line["sample"]) for line in lines}) == 16
    assert capfd.readouterr().out.count("reward talks printed") == 1
    begin = json.loads((tmp_path / "chain.jsonl").read_text().splitlines()[0])
    assert begin["class"].endswith("test_api.Doubled")
    for wrong in (int, rlite.RliteTrainEngine, "grpoo", None):
        with pytest.raises(ConfigError, match=r"train\("):
            rlite.train(wrong, model=model, data=PAIRS)  # type: ignore[arg-type]


def test_a_run_that_fails_leaves_no_session(model: str, tmp_path: Path) -> None:
    def broken(prompt: str, completions: str, **row: Any) -> float:
        raise ValueError("broken")

    options = {"train_data.prompts_per_rollout": 4, "rollout.train_sampling_params": {"max_new_tokens": 4}}
    with pytest.raises(rlite.rollout.RolloutError, match="reward broken raised ValueError: broken"):
        rlite.train("grpo", model=model, data=PAIRS, reward=broken, save_dir=tmp_path, actor=SMALL, **options)
    assert not has_session()


def test_the_same_program_runs_under_torchrun(model: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("MODEL", repr(model)))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "program.py")
    program = [forked_python.python(), *launch]
    done = subprocess.run(program, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("told")] == ["told True 1"]
