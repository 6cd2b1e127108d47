"""`reward.path=...` and `reward.NAME.path=...`: one reward or several, and never a mixture of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rlite.config import load, save, schema
from rlite.errors import ConfigError, UnknownOptionError
from rlite.rollout.rewards.options import RewardOptions
from rlite.trainer.rl.options import PpoConfig

MODEL = "actor.model_name=x"


@pytest.mark.parametrize(
    ("arguments", "yaml"),
    [
        (["reward.path=my.py:f", "reward.weight=2"], "reward: {path: my.py:f, weight: 2.0}"),
        (["reward.f.path=my.py:f", "reward.f.weight=2.0"], "reward: {f: {path: my.py:f, weight: 2}}"),
        (["reward={path: my.py:f, weight: 2.0}"], "{}"),
    ],
)
def test_one_reward_is_the_same_with_and_without_a_name(tmp_path: Path, arguments: list[str], yaml: str) -> None:
    expected = {"f": RewardOptions(path="my.py:f", weight=2.0)}
    config = load(PpoConfig, [MODEL, *arguments])
    assert config.reward == expected
    save(config, tmp_path / "saved.yaml")
    assert load(PpoConfig, ["--config", str(tmp_path / "saved.yaml")]) == config
    (tmp_path / "given.yaml").write_text(yaml)
    assert load(PpoConfig, [MODEL, "--config", str(tmp_path / "given.yaml"), *arguments]).reward == expected


def test_several_rewards_have_names_and_options_of_their_own() -> None:
    config = load(PpoConfig, [MODEL, "reward.a.path=a:f", "reward.a.env_vars=[KEY]", "reward.b-2.path=b"])
    assert config.reward == {"a": RewardOptions(path="a:f", env_vars=["KEY"]), "b-2": RewardOptions(path="b")}


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (
            ["reward.path=m:f", "reward.b.path=m:g"],
            ConfigError,
            r"^reward\.path is of a group without a name, and reward\.b has one",
        ),
        (["reward.path=m:f", "reward.timeout=soon"], ConfigError, r"^reward\.timeout=soon: expected a float"),
        (["reward.path=m:f", "reward.timeout=0"], ConfigError, r"^reward\.timeout=0\.0: expected more than 0 seconds"),
        (
            ["reward.path=m:f", "reward.wieght=2"],
            UnknownOptionError,
            r"'reward\.wieght'; did you mean 'reward\.weight'",
        ),
        (["reward.pth=m:f"], UnknownOptionError, r"'reward\.pth'; did you mean 'reward\.path'"),
        (["reward.a.pth=m:f"], UnknownOptionError, r"'reward\.a\.pth'; did you mean 'reward\.a\.path'"),
        (["reward.weight=2"], ConfigError, r"reward\.path: expected one of path, model and judge, found none"),
        (["reward.a.weight=2"], ConfigError, r"reward\.a\.path: expected one of path, model and judge, found none"),
        (["reward.right=m:f"], ConfigError, r"^reward\.right=m:f: expected reward\.right\.path=m:f"),
        (["reward=m:f"], ConfigError, r"^reward=m:f: expected reward\.path=m:f"),
        (["reward.weight.path=m:f"], UnknownOptionError, r"'reward\.weight\.path'; did you mean 'reward\.weight'"),
        (["reward={weight: {path: m:f}}"], ConfigError, r"^reward\.weight: a name .* none of its options"),
        (["reward.a/b.path=m:f"], ConfigError, r"^reward\.a/b: a name has letters"),
        (["reward.path=m:f", "rollout.env_path=e.py"], ConfigError, "^reward and rollout.env_path are given"),
        (["reward.path=m:f", "rollout.max_turns=2"], ConfigError, r"^rollout\.max_turns=2: reward\.\* is of single"),
    ],
)
def test_invalid_reward_options_are_refused_by_key(arguments: list[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        load(PpoConfig, [MODEL, *arguments])


@pytest.mark.parametrize(
    ("reward", "is_valid"),
    [({"path": "m:f"}, True), ({"a": {"path": "m:f", "weight": 2}}, True), ({"a": {"pth": "m:f"}}, False)],
)
def test_the_schema_takes_both_forms(reward: dict[str, Any], is_valid: bool) -> None:
    assert jsonschema.Draft202012Validator(schema(PpoConfig)).is_valid({"reward": reward}) is is_valid


def test_a_loss_by_k1_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match="loss_estimator=k1: its gradient is that of log pi, which is 0"):
        load(PpoConfig, ["actor.model_name=m", "kl.type=loss", "kl.loss_estimator=k1"])


def test_a_batch_of_one_response_teaches_nothing_without_a_critic() -> None:
    single = ["actor.model_name=m", "train_data.responses_per_prompt=1", "train_data.prompts_per_rollout=1"]
    with pytest.raises(ConfigError, match="every advantage is 0"):
        load(PpoConfig, single)
    for enough in ("adv.estimator=gae", "train_data.prompts_per_rollout=2", "kl.type=reward"):
        load(PpoConfig, [*single, enough])


def test_engines_on_the_same_devices_take_no_more_than_their_memory() -> None:
    def judged(name: str, **own: Any) -> list[str]:
        return [f"reward.{name}.judge.{key}={value}" for key, value in {"model": "j", "rubric": "r", **own}.items()]

    run = ["actor.model_name=m", *judged("one")]
    load(PpoConfig, [*run, *judged("two")])  # one engine
    load(PpoConfig, [*run, *judged("two", model="k"), "reward.two.num_devices=1"])
    load(PpoConfig, [*run, *judged("two", url="http://127.0.0.1:1/v1")])
    with pytest.raises(ConfigError, match=r"reward.two.judge.gpu_memory_utilization=0.3: .* take 1.2 of their memory"):
        load(PpoConfig, [*run, *judged("two", model="k")])
