"""The metrics of a step describe everything that was generated for it, not what a filter has left."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlite.assembly.rl import PartsMaker
from rlite.data.rows import prompt_stream
from rlite.observability import stats_tracker
from rlite.rollout import CollectorOptions, LLMRequest, RolloutCollector, RolloutWorkflow, ScriptedEngine, trajectory
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from rlite.trainer.rl.rollouts import Generated, trajectory_rewards


def batch(rewards: list[float], groups: list[int], lengths: list[int], **columns: list[float]) -> TensorDict:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    values = {name: torch.tensor(column) for name, column in columns.items()}
    ids = {"group_ids": torch.tensor(groups), "rewards": torch.tensor(rewards)}
    return TensorDict({"loss_mask": mask, **ids, **values}, batch_size=[len(rewards)])


def test_rewards_and_lengths_are_described_over_all_batches_of_a_step() -> None:
    generated = Generated()
    generated.add(batch([1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], [1, 2, 3, 4], scores=[1.0, 1.0, 0.0, 1.0]))
    generated.add(batch([0.0, 0.0], [0, 1], [5, 6]), is_one_group=True)
    found = generated.metrics()
    assert found["reward"] == 0.5
    assert (found["reward_std"], found["reward_min"], found["reward_max"]) == (0.5, 0.0, 1.0)
    assert found["uniform_groups"] == pytest.approx(2 / 3)
    assert found["score"] == 0.75
    lengths = [found[f"response_length{part}"] for part in ("", "_min", "_max", "_p50")]
    assert lengths == [3.5, 1.0, 6.0, 3.5]
    assert found["response_length_p95"] == pytest.approx(5.75)
    generated.add(batch([3.0], [0], [1]))
    assert generated.metrics()["reward"] == 3.0, "the next step begins anew"


def test_a_trajectory_of_several_sequences_counts_once() -> None:
    generated = Generated()
    rows = batch([2.0, 2.0, 0.0], [0, 0, 0], [2, 3, 1], sequence_index=[0, 1, 0])
    generated.add(rows)
    found = generated.metrics()
    assert (found["reward"], found["response_length"], found["uniform_groups"]) == (1.0, 3.0, 0.0)
    assert trajectory_rewards(rows).mean().item() == 1.0


def test_each_reward_of_several_has_its_mean() -> None:
    generated = Generated()
    generated.add(batch([1.5, 0.5], [0, 0], [1, 1], **{"reward/format": [0.5, 0.5], "reward/answer": [1.0, 0.0]}))
    found = generated.metrics()
    assert (found["reward/format"], found["reward/answer"]) == (0.5, 0.5)


class Ask(RolloutWorkflow):
    """The responses to three prompts in four are all right; of the fourth, every other one."""

    def __init__(self) -> None:
        self.count = 0

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        response = await engine.agenerate(LLMRequest(input_ids=[1]))
        self.count += 1
        return trajectory(response, reward=1.0 if data["number"] % 4 else float(self.count % 2))


@pytest.fixture(params=[0, 1])
def rollouts(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Source of a trainer's batches: in turns with training, or ahead of it."""
    engine = ScriptedEngine([[7]])
    collector = RolloutCollector(engine, CollectorOptions(consumer_batch_size=4, max_head_offpolicyness=request.param))
    options = PpoConfig(
        actor=ActorOptions(model_name="x"),
        train_data=PromptOptions(prompts_per_rollout=4, responses_per_prompt=8),
        rollout=RolloutOptions(max_head_offpolicyness=request.param, max_refills=6),
    )
    prompts = prompt_stream([{"number": number} for number in range(64)], 4, seed=0)
    served = SimpleNamespace(collector=collector, prepare_batch=collector.prepare_batch)
    engines: Any = SimpleNamespace(rollout=served)
    stats_tracker.export()
    yield SimpleNamespace(engine=engine, rollouts=PartsMaker(options).rollouts(engines, Ask(), prompts))
    collector.close()


def test_the_reward_of_a_filtered_step_is_that_of_all_answers(rollouts: Any) -> None:
    rewards, trained, filtered = [], [], []
    for step in range(12):
        trained.append(trajectory_rewards(rollouts.rollouts.next_batch()).mean().item())
        rollouts.engine.set_version(step + 1)
        metrics = stats_tracker.export()
        rewards.append(metrics["reward"])
        filtered.append(metrics["num_filtered"])  # ahead of training, groups may be refused before their step
    assert sum(trained) / 12 == pytest.approx(0.5, abs=0.1)
    assert sum(filtered) > 12
    groups = [4 + number for number in filtered]
    all_answers = sum(number * reward for number, reward in zip(groups, rewards, strict=True))
    assert all_answers / sum(groups) == pytest.approx(0.875, abs=0.06)
