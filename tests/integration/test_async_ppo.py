"""PPO beside its rollouts: they overlap, nothing is older than the bound, and a restart loses and repeats nothing."""

import json

import pytest

import rlite
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import ConfigError
from rlite.rollout import SingleTurnWorkflow
from rlite.trainer.options import SamplingOptions as Sampling
from rlite.trainer.options import TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.device_plan import divide_devices
from rlite.trainer.rl.options import ActorOptions, PolicyLossOptions, PpoConfig, PromptOptions, RolloutOptions
from tests.integration.rewards import digits
from tests.recorded import recorded
from tests.tiny import build_model_dir

ROWS = [{"prompt": f"{number}:", "number": number} for number in range(10, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(build_model_dir(tmp_path_factory.mktemp("model"), "qwen3", hidden=64))


@pytest.fixture
def session():
    yield rlite.init(num_devices=2, launcher="ray")
    rlite.shutdown()


def trainer(model, save_dir, total_steps, load=None, prompts=4, **rollout):
    sampling = Sampling(max_new_tokens=8)
    options = PpoConfig(
        actor=ActorOptions(
            model_name=model, lr=3e-3, policy_loss=PolicyLossOptions(name="decoupled_ppo"), tis_coef=None
        ),
        train_data=PromptOptions(prompts_per_rollout=prompts, responses_per_prompt=8),
        rollout=RolloutOptions(
            train_sampling_params=sampling, max_model_len=64, max_num_seqs=64, max_head_offpolicyness=1, **rollout
        ),
        trainer=TrainerOptions(save_dir=str(save_dir), total_steps=total_steps, save_freq=4, load_ckpt_from=load),
    )
    return PpoTrainer(options, SingleTurnWorkflow(digits, sampling.gconfig(), byte_tokenizer()), ROWS)


def logged(save_dir):
    return [json.loads(line) for line in (save_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_rollouts_run_ahead_of_training_by_no_more_than_the_bound(model, tmp_path, session):
    run = trainer(model, tmp_path, total_steps=20, prompts=8, verify_sync=5)
    run.fit()
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 21))
    staleness = [row["rollout/staleness"] for row in rows]
    assert staleness[0] == 0
    assert max(staleness) == 1
    assert sum(row["reward"] for row in rows[-3:]) > sum(row["reward"] for row in rows[:3]) + 0.6
    assert run.engines.rollout.get_version() == 20
    assert run.engines.rollout.proof is not None


def steps(run, count):
    """Train so many steps; returns the numbers of the rows that each of them consumed."""
    consumed = []
    for _ in range(count):
        batch = run.with_advantages(run.logprobs.with_old(run.rollouts.next_batch()))
        prompts = [row["input_ids"][row["attention_mask"].bool() & ~row["loss_mask"].bool()] for row in batch]
        consumed.append(sorted({int(run.engines.rollout.tokenizer.decode(ids).rstrip(":")) for ids in prompts}))
        run.update(batch)
        run.sync()
        run.finish_step(batch)
    return consumed


@pytest.mark.nightly
def test_a_restart_loses_and_repeats_no_prompt(model, tmp_path, session):
    """Stopped two steps after a checkpoint, with prompts under way: every row is used once in the epoch."""
    first = trainer(model, tmp_path, total_steps=20, dynamic_filtering=False)
    first.start()
    before = steps(first, 6)[:4]
    first.run.close()
    rlite.shutdown()

    rlite.init(num_devices=2, launcher="ray")
    second = trainer(model, tmp_path, total_steps=20, load="latest", dynamic_filtering=False)
    second.start()
    counters = second.engines.rollout.collector.counters
    assert counters.consumed == 16
    assert counters.waiting + counters.running + counters.ready >= 4, "what ran ahead goes on"
    after = steps(second, 16)
    assert sorted(number for numbers in before + after for number in numbers) == [row["number"] for row in ROWS]
    for observer in second.run.observers:
        observer.before_save(second.run)
    rows = recorded(tmp_path)
    places = [(row["group"], row["sample"]) for row in rows]
    assert len(set(places)) == len(places) == 20 * 4 * 8, "each rollout once"
    for step, numbers in enumerate(before + after, start=1):
        assert sorted({10 + int(row["item"]) for row in rows if row["step"] == step}) == numbers


def test_devices_are_divided_where_rollouts_run_ahead():
    ahead = RolloutOptions(max_head_offpolicyness=1)
    assert divide_devices(8, RolloutOptions()) == (8, 8)
    assert divide_devices(8, ahead) == (4, 4)
    assert divide_devices(5, RolloutOptions(max_head_offpolicyness=1, tp_size=2)) == (3, 2)
    assert divide_devices(8, RolloutOptions(max_head_offpolicyness=1, num_devices=6)) == (2, 6)
    for world, options in ((1, ahead), (2, RolloutOptions(max_head_offpolicyness=1, num_devices=2))):
        with pytest.raises(ConfigError, match=f"need devices of their own, {world} of them, and there are {world}"):
            divide_devices(world, options)
    with pytest.raises(ConfigError, match=r"rollout\.tp_size=3 does not divide"):
        divide_devices(8, RolloutOptions(tp_size=3))


def test_options_that_do_not_go_together_are_refused():
    with pytest.raises(ConfigError, match="deterministic=true promises the same bits"):
        RolloutOptions(max_head_offpolicyness=1, deterministic=True)
    with pytest.raises(ConfigError, match="set both or neither"):
        RolloutOptions(num_devices=1)
