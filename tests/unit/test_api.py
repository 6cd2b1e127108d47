"""`rlite.train` says no as the command does, before a model is loaded; rewards and data come in many forms."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy
import pytest

import rlite
from rlite import api
from rlite.assembly.commands.options import GenerateConfig
from rlite.assembly.workflows import own_rewards
from rlite.errors import ConfigError, DataError, UnknownOptionError
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.rewards.weighted import WeightedRewards
from rlite.trainer.held_out import HeldOutPromptOptions
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.program_objects import NOTHING

ROWS = [{"prompt": "2+2=", "answer": "4"}]


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


@pytest.mark.parametrize(
    ("algorithm", "keywords", "error", "said"),
    [
        ("gpro", {}, ConfigError, "'grpo'"),
        ("sft", {"actor.lrr": 1e-5}, UnknownOptionError, r"unknown key 'actor\.lrr'; did you mean 'actor\.lr'\?"),
        ("sft", {"actor": {"lr": "fast"}}, ConfigError, r"^actor\.lr=fast: expected a float \(argument\)"),
        ("sft", {"actor": {"lora.rank": 0}}, ConfigError, r"^actor\.lora\.rank=0: expected at least 1"),
        ("sft", {"total_steps": 3}, ConfigError, r"trainer\.total_steps is an option of data\.streaming=true"),
        (
            "grpo",
            {"reward": right, "data": iter(ROWS), "train_data.streaming": True},
            ConfigError,
            r"train_data\.streaming=true iterates the rows again .* list_iterator can be iterated once only",
        ),
        ("sft", {"reward": right}, UnknownOptionError, r"unknown key 'reward"),
        ("rm", {"actor.lr": 1e-5}, UnknownOptionError, r"unknown key 'actor\.lr'; did you mean 'critic\.lr'\?"),
        ("grpo", {}, ConfigError, r"missing: a source of rewards \(reward\.path"),
        ("grpo", {"reward": lambda text: 1.0}, ConfigError, "<lambda>.* has none of the accepted signatures"),
        ("grpo", {"reward": 3}, ConfigError, "reward=3: expected a function"),
        ("grpo", {"reward": (right, right)}, ConfigError, r"expected \(function, weight\); several rewards are a list"),
        ("grpo", {"rewards": right}, UnknownOptionError, "train: unknown keyword 'rewards'; did you mean 'reward'"),
        ("grpo", {"total_step": 3}, UnknownOptionError, "train: unknown keyword 'total_step'; .*'total_steps'"),
        ("grpo", {"reward": "nowhere.py:f"}, ImportError, r"reward\.path=nowhere\.py:f: no such file"),
        ("grpo", {"reward": right, "data": [{"prompt": "a", "anwser": "b"}]}, DataError, "did you mean 'anwser'"),
        ("grpo", {"reward": right, "rollout.env_path": "e.py"}, ConfigError, "reward and rollout.env_path are given"),
        ("grpo", {"reward": right, "data": []}, DataError, "train_data: no rows"),
        ("grpo", {"reward": right, "data": ["a"]}, DataError, "train_data, row index 0: expected a dict"),
        (
            "grpo",
            {"reward": right, "data": {"train": ROWS}},
            DataError,
            r"choose one of its entries \(data\['train'\]\)",
        ),
        ("grpo", {"reward": right, "data": 5}, DataError, "train_data=5: expected a path, or rows"),
    ],
)
def test_invalid_arguments_are_refused_as_on_the_command_line(
    algorithm: str, keywords: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        rlite.train(algorithm, **{"model": "nowhere/at/all", "data": ROWS, **keywords})


def test_options_may_be_nested_and_dotted() -> None:
    loaded = rlite.config.load(
        PpoConfig,
        ["actor.lr=1e-3"],
        given={
            "actor": {"model_name": "m", "lora.rank": 4, "parameter_groups": {"a": {"pattern": "x"}}},
            "adv.options": {},
            "rollout.train_sampling_params": {"stop": ["."]},
            "reward": {"a": {"path": "m:f"}},
            "critic.lr": numpy.float32(1),
        },
    )
    assert (loaded.actor.model_name, loaded.actor.lr, loaded.critic.lr) == ("m", 1e-3, 1.0)
    assert loaded.actor.lora is not None
    assert (loaded.actor.lora.rank, loaded.actor.parameter_groups["a"].pattern) == (4, "x")
    assert loaded.rollout.train_sampling_params.stop == ["."]
    assert loaded.reward["a"].path == "m:f"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (right, {"right": 1.0}),
        ([right, (right, 0.5)], {"right": 1.0, "right_2": 0.5}),
        ({"a": right, "b": (right, 2.0)}, {"a": 1.0, "b": 2.0}),
        ("my.py:f", {"f": 1.0}),
        ({"a": "my.py:f", "b": {"path": "my.py:g", "weight": 3.0}}, {"a": 1.0, "b": 3.0}),
        ({"path": "my.py:f", "weight": 3.0}, {"f": 3.0}),
        ({"a": {"path": right, "weight": 3.0, "max_concurrent": 4}}, {"a": 3.0}),
        (lambda completions, **columns: [1.0], {"lambda": 1.0}),
    ],
)
def test_rewards_come_alone_in_lists_and_by_name(given: Any, named: dict[str, float]) -> None:
    found, _ = api._split({"reward": given})
    assert all(isinstance(options["path"], str) for options in found.values())
    assert {name: options.get("weight", 1.0) for name, options in found.items()} == {
        f"reward.{name}": weight for name, weight in named.items()
    }


def mine(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    return 1.0


def test_a_set_keeps_its_own_reward_if_that_of_training_has_the_same_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "code.py").write_text("def mine(prompt, completions, prompt_ids, completion_ids, **row): return 0.25")
    taken: list[Any] = []
    monkeypatch.setattr(api.TRAINERS["grpo"].find_trainer(), "train", lambda *call: taken.extend(call) or {})
    sets = {"test_data.code.reward.path": f"{tmp_path}/code.py:mine", "test_data.math.reward": {"mine": (mine, 2.0)}}
    rlite.train("grpo", model="m", data=ROWS, test_data={"code": ROWS, "math": ROWS}, reward=mine, **sets)
    settings, given = taken
    assert given.functions() == {"mine": mine}
    of_code, of_math = (
        own_rewards(settings.test_data[name], f"test_data.{name}", given).make() for name in ("code", "math")
    )
    assert isinstance(of_code, RewardFunction)
    assert of_code.fn("p", "c", [1], [2]) == 0.25
    assert isinstance(of_math, WeightedRewards)
    assert [(part.function.fn, part.weight) for part in of_math.parts.values()] == [(mine, 2.0)]


def test_an_error_about_a_sets_reward_names_its_option() -> None:
    own = HeldOutPromptOptions(path="rows.jsonl", reward={"path": "nowhere.py:f"})
    with pytest.raises(ImportError, match=r"test_data\.code\.reward\.path=nowhere\.py:f: no such file"):
        own_rewards(own, "test_data.code", NOTHING)


def test_run_shows_its_folder_and_metrics(tmp_path: Path) -> None:
    run = api.TrainedRun(tmp_path, {"reward": 0.5, "actor/loss": 1e-5, "lr": 1.0})
    assert repr(run) == f"TrainedRun({tmp_path}, reward 0.5000, actor/loss 1.0e-05)"
    lines = [{"step": 1, "test_loss": 2.0}, {"step": 2, "loss": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    of_folder = api.TrainedRun(tmp_path, {})
    assert repr(of_folder) == f"TrainedRun({tmp_path}, step 2, loss 0.2500)"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # a run that goes on, or was killed
    assert (of_folder.metrics, of_folder.history) == (lines[-1], lines)
    assert repr(api.TrainedRun(tmp_path / "new", {})) == f"TrainedRun({tmp_path / 'new'})"


def test_a_run_generates_with_the_defaults_of_the_command() -> None:
    parameters = inspect.signature(api.TrainedRun.generate).parameters
    options = GenerateConfig(model="m", prompt="p")
    for name in ("max_new_tokens", "temperature", "chat"):
        assert parameters[name].default == getattr(options, name)
