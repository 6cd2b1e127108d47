"""Rewards that are the sum of several functions': each is reported under its name."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.rollout import RewardFunction, RolloutCollector, ScriptedEngine, SingleTurnWorkflow, from_trl
from rlite.rollout.conversation import MultiTurnWorkflow
from rlite.rollout.rewards.score import read_score
from rlite.trainer.rl.rollouts import Generated


@pytest.mark.parametrize("options", [{}, {"in_process": True}, {"batch_size": 2}])
@pytest.mark.parametrize("kind", [SingleTurnWorkflow, MultiTurnWorkflow])
def test_rewards_of_several_functions_are_reported_one_by_one(kind: Any, options: dict[str, Any]) -> None:
    def length(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    def if_even(completions: list[str], **columns: Any) -> list[float | None]:
        return [1.0 if len(text) % 2 == 0 else None for text in completions]

    reward = RewardFunction(from_trl([length, if_even], weights=[0.5, 10.0]), **options)
    engine = ScriptedEngine(lambda request: request.input_ids[: len(request.input_ids) // 2])
    with closing(RolloutCollector(engine)) as collector:
        workflow = kind(reward, {"max_new_tokens": 8}, byte_tokenizer())
        batch = collector.rollout_batch([{"prompt": "abcd"}, {"prompt": "abcdef"}], workflow)
    assert batch["rewards"].tolist() == [11.0, 1.5]
    assert batch["reward/length"].tolist() == [2.0, 3.0]
    generated = Generated()
    generated.add(batch, is_one_group=True)
    metrics = generated.metrics()
    assert (metrics["reward/length"], metrics["reward/if_even"]) == (2.5, 1.0), "what does not count is no part of it"


def test_functions_of_the_same_name_are_distinguished() -> None:
    assert from_trl([lambda **columns: [1.0], lambda **columns: [2.0]]).names == ("<lambda>", "<lambda>_1")


@pytest.mark.parametrize("forged", [1.0, [1.0], [1.0, [1.0]], [1.0, [1.0, "x"]], [float("nan"), [1.0, 1.0]], [1.0, {}]])
def test_an_answer_with_other_parts_than_the_functions_is_no_reward(forged: Any) -> None:
    assert read_score(forged, ("correct", "brief")) is None
