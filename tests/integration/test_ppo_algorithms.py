"""PPO with all its parts on one device: environments of two turns, a critic, a reference, groups that are replaced."""

import json
import math
import sys

import pytest
import torch

import rlite
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.batch import KEYS
from rlite.rollout import Environment, EnvironmentWorkflow
from rlite.trainer import ppo
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.rl.options import (
    ActorOptions,
    AdvantageOptions,
    CriticOptions,
    KlOptions,
    PolicyLossOptions,
    PpoConfig,
    PromptOptions,
    RolloutOptions,
)
from tests.tiny import build_model_dir

ROWS = [{"prompt": f"{a}+{b}=", "extra_info": {"answer": str(a + b)}} for a in range(4) for b in range(4)]

TWO_TURNS = """
async def step(state, action, extra_info):
    turn = extra_info.get("turn", 0)
    digits = sum(character.isdigit() for character in action) / max(len(action), 1)
    return {"next_state": state + action + "so", "reward": REWARD, "score": 0.5, "done": turn == 1,
            "extra_info": {**extra_info, "turn": turn + 1}}
"""


@pytest.fixture
def model(tmp_path):
    return str(build_model_dir(tmp_path / "model", "qwen2", hidden=64))


@pytest.fixture(autouse=True)
def session():
    yield rlite.init(num_devices=1)
    rlite.shutdown()


def trainer(model, folder, total_steps, reward="digits", actor=None, rollout=None, run=None, **groups):
    folder.mkdir(exist_ok=True)
    (folder / "env.py").write_text(TWO_TURNS.replace("REWARD", reward))
    sampling = SamplingOptions(max_new_tokens=6)
    options = PpoConfig(
        actor=ActorOptions(**{"model_name": model, "lr": 3e-3, "gradient_checkpointing": False, **(actor or {})}),
        train_data=PromptOptions(prompts_per_rollout=4, responses_per_prompt=4),
        rollout=RolloutOptions(train_sampling_params=sampling, max_turns=2, **(rollout or {})),
        trainer=TrainerOptions(save_dir=str(folder), total_steps=total_steps, save_freq=2, **(run or {})),
        **groups,
    )
    environment = Environment(folder / "env.py", num_processes=1)
    workflow = EnvironmentWorkflow(environment, sampling.gconfig(), byte_tokenizer(), 2, options.max_length)
    return ppo.PpoTrainer(options, workflow, ROWS)


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def openai_ppo(model, folder, total_steps, **more):
    return trainer(
        model,
        folder,
        total_steps,
        kl=KlOptions(type="reward", coef=0.01),
        adv=AdvantageOptions(estimator="gae", lamda=0.95),
        **more,
    )


def test_each_phase_returns_a_new_batch_with_more_keys_of_the_table(model, tmp_path):
    run = openai_ppo(model, tmp_path / "run", 1, actor={"update_per_rollout": 2})
    run.start()
    batch, added = run.rollouts.next_batch(), []
    for phase in (run.logprobs.with_reference, run.critic.with_values, run.logprobs.with_old, run.with_advantages):
        keys = set(batch.keys())
        after = phase(batch)
        assert set(batch.keys()) == keys, "what a phase gets stays as it is"
        assert all(after[key] is batch[key] for key in keys), "tensors are shared"
        added += sorted(set(after.keys()) - keys)
        batch = after
    assert added == ["ref_logprobs", "values", "old_logprobs", "advantages", "returns"]
    assert {str(key) for key in batch.keys()} <= set(KEYS)  # noqa: SIM118
    run.run.close()


@pytest.mark.nightly
def test_models_that_take_turns_on_the_device_train_save_and_go_on(model, tmp_path):
    folder = tmp_path / "run"
    actor = {"offload_model": True, "update_per_rollout": 2, "freeze_steps": 1}
    actor |= {"max_length_per_device": 40, "max_inference_length_per_device": 4096}
    first = openai_ppo(model, folder, 2, actor=actor)
    first.fit()
    frozen, learnt = logged(folder)
    assert "loss" not in frozen, "the actor waits for the critic"
    assert frozen["kl"] == pytest.approx(0.0, abs=1e-5)
    assert frozen["critic/loss"] > 0
    assert math.isfinite(learnt["loss"])
    assert learnt["logprob_drift"] < 1e-4
    for row in (frozen, learnt):
        assert (row["turns"], row["score"]) == (2.0, 1.0)
        assert {"tokens_per_second", "seconds_values", "seconds_reference", "critic/grad_norm"} <= set(row)
    first.engines.critic.cuda()
    critic = first.engines.critic.state_dict()
    rlite.shutdown()
    rlite.init(num_devices=1)
    second = openai_ppo(model, folder, 3, actor=actor, run={"load_ckpt_from": "latest"})
    second.start()
    second.engines.critic.cuda()
    resumed = second.engines.critic.state_dict()
    assert all(torch.equal(resumed[name], critic[name]) for name in critic)
    rlite.shutdown()
    rlite.init(num_devices=1)
    openai_ppo(model, folder, 3, actor=actor, run={"load_ckpt_from": "latest"}).fit()
    rows = logged(folder)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["kl"] > 1e-3, "measured against what the run began with, not against where it was resumed"
    assert (folder / "state" / "step-3-critic").is_dir()


def test_a_critic_learns_what_a_frozen_actor_earns(model, tmp_path):
    folder = tmp_path / "run"
    openai_ppo(
        model,
        folder,
        6,
        reward="0.5",
        actor={"freeze_steps": 6, "update_per_rollout": 4},
        critic=CriticOptions(lr=3e-3, clip=math.inf),
        rollout={"dynamic_filtering": False},
    ).fit()
    rows = logged(folder)
    # each turn earns 0.5, and tokens before the first reward have a value of 1
    assert 0.5 < rows[-1]["critic/return"] < 1.0
    assert rows[-1]["critic/loss"] < 0.2 * rows[0]["critic/loss"]
    assert rows[-1]["critic/value"] == pytest.approx(rows[-1]["critic/return"], abs=0.15)


@pytest.mark.nightly
def test_a_kl_in_the_loss_holds_the_policy_where_it_was(model, tmp_path):
    moved = []
    for coef in (1e-9, 10.0):
        folder = tmp_path / str(coef)
        trainer(model, folder, 8, kl=KlOptions(type="loss", coef=coef)).fit()
        moved.append(logged(folder)[-1]["kl"])
        rlite.shutdown()
        rlite.init(num_devices=1)
    assert moved[1] < 0.5 * moved[0]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["loss", "reward"])
def test_the_weight_of_the_kl_follows_its_target_through_a_resume(kind, model, tmp_path):
    kl = KlOptions(type=kind, coef=0.5, adaptive_target=1e-4, adaptive_horizon=160.0)
    folder, actor = tmp_path / "run", {"off_policy_metrics": True}
    trainer(model, folder, 2, actor=actor, kl=kl).fit()
    rlite.shutdown()
    rlite.init(num_devices=1)
    trainer(model, folder, 4, actor=actor, kl=kl, run={"load_ckpt_from": "latest"}).fit()
    rows = logged(folder)
    expected = 0.5
    for row in rows:
        assert row["kl_coef"] == pytest.approx(expected)
        assert row["off_policy/kl"] == pytest.approx(0.0, abs=1e-5), "trainer and engine compute the same"
        assert row["off_policy/weight_effective_fraction"] == pytest.approx(1.0, abs=1e-4)
        expected *= 1 + min(max(row["kl"] / 1e-4 - 1, -0.2), 0.2) * 16 / 160
    assert rows[-1]["kl_coef"] != 0.5


@pytest.mark.nightly
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_equal_rewards_move_weights_by_weight_decay_and_then_by_the_kl_alone(decay, model, tmp_path):
    own = {"actor": {"weight_decay": decay}, "rollout": {"max_refills": 0}, "kl": KlOptions(type="loss", coef=0.1)}
    trainer(model, tmp_path / "run", 2, reward="0.0", **own).fit()
    norms = [row["grad_norm"] for row in logged(tmp_path / "run")]
    assert norms[0] == 0.0
    assert (norms[1] > 0.0) == (decay > 0.0)


def test_a_rejection_of_everything_teaches_nothing(model, tmp_path):
    weights = []
    for upper in (-1.0, 1.0):  # k3 is never below 0
        actor = {"rejection": {"upper": upper}, "update_per_rollout": 2}
        run = trainer(model, tmp_path / str(upper), 1, actor=actor, rollout={"dynamic_filtering": False})
        metrics = run.fit()
        assert metrics["rejected"] == float(upper < 0)
        weights.append(metrics["grad_norm"])
        rlite.shutdown()
        rlite.init(num_devices=1)
    assert weights[0] == 0.0
    assert weights[1] > 0.0


def test_a_loss_that_chooses_tokens_chooses_among_those_of_each_update(model, tmp_path):
    loss = PolicyLossOptions(name="clip_cov", options={"share": 1e-6, "cov_low": -100.0, "cov_high": 100.0})
    actor = {"policy_loss": loss, "update_per_rollout": 2, "max_length_per_device": 24}
    run = trainer(model, tmp_path / "run", 1, actor=actor, rollout={"dynamic_filtering": False})
    metrics = run.fit()
    assert metrics["num_microbatches"] > 2
    # one token of each update; by microbatch it would be one of each
    assert 0 < metrics["cov_clip_fraction"] * metrics["num_tokens"] <= 2


def test_prompts_that_teach_nothing_are_replaced(model, tmp_path):
    run = trainer(model, tmp_path / "run", 1, reward='float("+1" in state)', rollout={"max_refills": 2})
    run.start()
    batch = run.rollouts.next_batch()
    assert run.prompts.order.position == 4 + 4 + 4, "all groups are uniform, each round asks for all"
    assert len(batch["group_ids"].unique()) == 4
    assert len(batch) == 16
    run.run.close()


@pytest.mark.nightly
def test_the_recipe_of_openai_runs_from_the_command_line(model, tmp_path, monkeypatch):
    rlite.shutdown()
    (tmp_path / "env.py").write_text(TWO_TURNS.replace("REWARD", "digits"))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    monkeypatch.chdir(tmp_path)
    arguments = ["kl.type=reward", "kl.reward_estimator=k1", "adv.estimator=gae", "actor.entropy.coef=0.01"]
    arguments += [f"actor.model_name={model}", "actor.rollout.env_path=env.py", "rollout.max_turns=2"]
    arguments += ["train_data.path=rows.json", "train_data.prompts_per_rollout=4", "train_data.responses_per_prompt=4"]
    arguments += ["test_data.path=rows.json", "rollout.train_sampling_params.max_new_tokens=6", "trainer.total_steps=1"]
    monkeypatch.setattr(sys, "argv", ["ppo", *arguments])
    ppo.main(arguments)
    rows = logged(tmp_path / "runs" / "ppo")
    assert rows[0]["accuracy"] == 1.0, "the score of two turns"
    assert math.isfinite(rows[1]["loss"])
