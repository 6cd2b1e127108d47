"""Sources of batches: one source continues with the groups that the other one leaves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlite.assembly.rl import PartsMaker
from rlite.data.rows import prompt_stream
from rlite.errors import DataError
from rlite.rollout import CollectorOptions, LLMRequest, RolloutCollector, RolloutWorkflow, ScriptedEngine, trajectory
from rlite.trainer.rl.filtering import VariedGroups
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from rlite.trainer.rl.rollouts import Generated, Rollouts
from rlite.trainer.rl.rollouts_ahead import RolloutsAhead

ROWS = [{"input_ids": [number], "number": number} for number in range(1, 25)]


class Ask(RolloutWorkflow):
    """One answer, whose reward is the row's number."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        response = await engine.agenerate(LLMRequest(input_ids=data["input_ids"]))
        return trajectory(response, reward=float(data["number"]))


@pytest.fixture
def rollouts() -> Iterator[Any]:
    """Makes what the trainer gets its batches from, around a scripted engine; `version` is where it is."""
    collectors = []

    def make(ahead: int, version: int = 0, position: int = 0, workflow: RolloutWorkflow | None = None) -> Any:
        engine = ScriptedEngine([[7]], version=version)
        collectors.append(
            RolloutCollector(engine, CollectorOptions(consumer_batch_size=4, max_head_offpolicyness=ahead))
        )
        options = PpoConfig(
            actor=ActorOptions(model_name="x"),
            train_data=PromptOptions(prompts_per_rollout=4, responses_per_prompt=1),
            rollout=RolloutOptions(max_head_offpolicyness=ahead),
        )
        prompts = prompt_stream(ROWS, 4, seed=0)
        prompts.order.take(position)
        rollout = collectors[-1]
        rollout.collector = rollout  # type: ignore[attr-defined]  # an engine has one
        made = PartsMaker(options).rollouts(SimpleNamespace(rollout=rollout), workflow or Ask(), prompts)  # type: ignore[arg-type]
        assert type(made) is (RolloutsAhead if ahead else Rollouts)
        return SimpleNamespace(engine=engine, prompts=prompts, rollouts=made, collector=rollout)

    yield make
    for collector in collectors:
        collector.close()


def numbers(batch: TensorDict) -> list[int]:
    return [int(reward) for reward in batch["rewards"]]


@pytest.mark.parametrize(("first", "then"), [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_change_of_rollout_mode_uses_every_prompt_once(rollouts: Any, first: int, then: int) -> None:
    before = rollouts(first)
    used = []
    for step in range(2):
        used += numbers(before.rollouts.next_batch())
        before.engine.set_version(step + 1)
    state, position = before.rollouts.state_dict(), before.prompts.order.position
    after = rollouts(then, version=2, position=position)
    after.rollouts.load_state_dict(state)
    for step in range(2, 6):
        used += numbers(after.rollouts.next_batch())
        after.engine.set_version(step + 1)
    assert sorted(used) == [row["number"] for row in ROWS]


def test_refills_that_ask_a_prompt_again_draw_other_samples_and_always_the_same() -> None:
    def seeds() -> list[int | None]:
        drawn: list[int | None] = []

        def answer(request: LLMRequest) -> list[int]:
            drawn.append(request.gconfig.seed)
            return [7]

        collector = RolloutCollector(ScriptedEngine(answer, version=3), CollectorOptions(seed=1))
        options = PpoConfig(
            actor=ActorOptions(model_name="x"),
            train_data=PromptOptions(prompts_per_rollout=2, responses_per_prompt=2),
            rollout=RolloutOptions(max_refills=3),
        )
        engines: Any = SimpleNamespace(rollout=SimpleNamespace(collector=collector))
        PartsMaker(options).rollouts(engines, Ask(), prompt_stream(ROWS[:2], 2, seed=0)).next_batch()
        collector.close()
        return drawn

    first = seeds()  # all rewards of a prompt are the same, so that both of them are asked in each of four rounds
    assert len(set(first)) == len(first) == 2 * 2 * 4
    assert sorted(seeds(), key=str) == sorted(first, key=str)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_workflow_that_gives_no_rewards_is_told_so(rollouts: Any, ahead: int) -> None:
    class Unrewarded(Ask):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
            return (await super().arun_episode(engine, data)).exclude("rewards")

    made = rollouts(ahead, workflow=Unrewarded())
    with pytest.raises(DataError, match="no 'rewards', which the workflow must return"):
        made.rollouts.next_batch()


@pytest.mark.parametrize("ahead", [0, 1])
def test_rewards_of_single_tokens_are_refused_before_groups_are_filtered(rollouts: Any, ahead: int) -> None:
    class RewardedByToken(Ask):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
            found = await super().arun_episode(engine, data)
            return found.update({"rewards": torch.zeros(found["input_ids"].shape)})

    made = rollouts(ahead, workflow=RewardedByToken())
    with pytest.raises(
        DataError, match=r"rewards has shape \[4, 2\]; expected \[4\], one for each row: .*token_rewards"
    ):
        made.rollouts.next_batch()
    group = TensorDict({"rewards": torch.ones(2, 3)}, batch_size=[2])
    with pytest.raises(DataError, match=r"rewards has shape \[2, 3\]"):
        VariedGroups(budget=2, refused=Generated().add)(group)


def test_unfinished_prompts_are_yielded_first_and_once() -> None:
    prompts = prompt_stream(ROWS, 4, seed=0)
    prompts.returned = [{"number": number} for number in range(6)]
    batches = iter(prompts)
    assert [row["number"] for row in next(batches)] == list(range(6))
    assert len(next(batches)) == 4
    prompts.returned = [{"number": 99}]
    assert prompts.next(2)[0] == {"number": 99}
    assert prompts.order.position == 4 + 1
