"""The model, its optimizer, its data and its rewards in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlite.assembly.plans import data_plan, model_plan, reward_plan
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.fsdp2.options import Fsdp2Options
from rlite.config import load
from rlite.engine.train import RliteTrainEngine
from rlite.rollout import SingleTurnWorkflow, from_trl
from rlite.rollout.rewards.groups import GroupReward
from rlite.rollout.rewards.weighted import Part, WeightedRewards
from rlite.trainer.model.modules import policy_module, trained_engine
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.supervised_options import DataOptions, SftConfig
from tests.tiny import build_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_model_dir(tmp_path_factory.mktemp("models") / "qwen2", hidden=32))


def plan(model: str, *options: str) -> dict[str, str]:
    actor = load(SftConfig, [f"actor.model_name={model}", "data.path=-", *options]).actor
    engine: RliteTrainEngine = trained_engine(policy_module, actor, total_steps=20)
    engine.options = Fsdp2Options()  # what build would keep
    return model_plan("m", engine, actor.max_grad_norm)


def test_the_optimizer_is_described_with_its_rate(model: str) -> None:
    assert plan(model)["optimizer"] == (
        "AdamW, lr 5e-06 (cosine to 0 after 2 steps of warm-up), weight decay 0.01, gradients clipped to norm 1"
    )
    constant = plan(model, "actor.scheduler=constant", "actor.warmup_ratio=0", "actor.optimizer=muon")
    assert constant["optimizer"].startswith("Muon and AdamW, lr 5e-06 (constant), ")


def test_the_share_of_trained_parameters_and_frozen_groups_are_shown(model: str) -> None:
    assert plan(model)["model"].endswith("M parameters, all trained")
    assert plan(model).keys() == {"model", "optimizer", "shared prefixes"}
    groups = {"emb": {"pattern": "embed", "freeze": True}, "n": {"pattern": "norm", "lr_factor": 2, "weight_decay": 0}}
    frozen = plan(model, f"actor.parameter_groups={json.dumps(groups)}")
    assert frozen["parameter groups"] == "emb (embed): frozen; n (norm): lr x 2, weight decay 0"
    assert 0 < float(frozen["model"].rpartition(", ")[2].removesuffix("% trained")) < 100
    adapters = plan(model, "actor.lora.rank=2")
    assert adapters["adapters"] == "rank 2, alpha 32, all-linear"
    assert 0 < float(adapters["model"].rpartition(", ")[2].removesuffix("% trained")) < 20


def test_the_system_prompt_and_options_of_the_template_are_shown_if_they_are_set() -> None:
    assert data_plan(DataOptions(path="-")) == {}
    options = DataOptions(path="-", system_prompt="Be brief.", chat_template_options={"enable_thinking": False})
    assert data_plan(options) == {"system prompt": "'Be brief.'", "chat template": "{'enable_thinking': False}"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["reward.path=my.py:correct"], "correct x 1 (my.py:correct)"),
        (["reward.a.path=my.py:f", "reward.b.path=n:g", "reward.b.weight=-0.5"], "a x 1 (my.py:f), b x -0.5 (n:g)"),
        (["rollout.env_path=env.py"], "environment env.py"),
        ([], "the program's workflow"),
    ],
)
def test_rewards_are_shown_with_their_weights(options: list[str], told: str) -> None:
    own = load(PpoConfig, ["actor.model_name=m", *options])
    assert reward_plan(own.reward, own.rollout, workflow(exact)) == told


def test_a_reward_that_compares_groups_is_told_so() -> None:
    options = load(PpoConfig, ["actor.model_name=m", "reward.path=my.py:f"])
    trl = GroupReward(from_trl(exact), in_process=True)
    for reward in (trl, WeightedRewards({"f": Part(trl, 0.5)})):
        told = reward_plan(options.reward, options.rollout, workflow(reward))
        assert told.endswith("the responses to a prompt are scored in one call")


def exact(**columns: Any) -> float:
    return 1.0


def workflow(reward: Any) -> SingleTurnWorkflow:
    return SingleTurnWorkflow(reward, {"max_new_tokens": 4}, byte_tokenizer())
