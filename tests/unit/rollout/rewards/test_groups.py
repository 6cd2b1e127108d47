from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.rollout import (
    CollectorOptions,
    GenerationHyperparameters,
    LLMRequest,
    RewardRaised,
    RolloutCollector,
    ScriptedEngine,
    SingleTurnWorkflow,
    from_trl,
)
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.rollout.rewards.groups import GroupReward
from rlite.rollout.rewards.options import RewardOptions

TOKENIZER = byte_tokenizer()
ANSWERS = ["a", "bbb", "cc", "dddd"]


def rank(completions: list[str], **columns: Any) -> list[float]:
    """Place of each completion among all, by length."""
    order = sorted(completions, key=len)
    return [float(order.index(text)) for text in completions]


def answer_of(request: LLMRequest) -> list[int]:
    assert request.gconfig.seed is not None
    text = ANSWERS[request.gconfig.seed % len(ANSWERS)]
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]


def collected(reward: Any, group_size: int = 4, retries: int = 0) -> Any:
    workflow = SingleTurnWorkflow(reward, GenerationHyperparameters(max_new_tokens=8), TOKENIZER)
    options = CollectorOptions(request_retries=retries, seed=3)
    with closing(RolloutCollector(ScriptedEngine(answer_of), options)) as collector:
        return collector.rollout_batch([{"prompt": "p"}, {"prompt": "q"}], workflow, group_size=group_size)


def test_a_function_of_trl_gets_the_completions_of_its_group_in_one_call() -> None:
    batch = collected(GroupReward(from_trl(rank), in_process=True))
    for group in batch["group_ids"].unique():
        rows = batch["group_ids"] == group
        lengths = batch["loss_mask"][rows].sum(1).tolist()
        assert batch["rewards"][rows].tolist() == [sorted(lengths).index(length) for length in lengths]


def test_the_rewards_of_a_config_compare_groups_if_they_have_trls_signature() -> None:
    options = {"rank": RewardOptions(path="unused.py:rank", in_process=True)}
    assert isinstance(ChosenRewards(options, {"rank": rank}).make(), GroupReward)


def test_an_episode_without_siblings_is_scored_alone() -> None:
    reward = GroupReward(from_trl(rank), in_process=True)
    keywords = {"prompt": "p", "completions": "aa", "prompt_ids": [1], "completion_ids": [2]}
    assert asyncio.run(reward(**keywords)) == 0.0


def test_a_call_that_fails_once_is_repeated_with_all_siblings() -> None:
    sizes: list[int] = []

    def flaky(completions: list[str], **columns: Any) -> list[float]:
        sizes.append(len(completions))
        if len(sizes) == 1:
            raise OSError("the judge is away")
        return rank(completions)

    batch = collected(GroupReward(from_trl(flaky), in_process=True), retries=1)
    assert sizes == [4, 4, 4]
    assert len(batch["rewards"]) == 8


def test_a_call_that_fails_for_good_fails_every_episode_of_the_group() -> None:
    def broken(completions: list[str], **columns: Any) -> list[float]:
        raise OSError("no judge")

    reward = GroupReward(from_trl(broken), in_process=True)
    keywords = {"prompt": "p", "completions": "aa", "prompt_ids": [1], "completion_ids": [2]}
    with pytest.raises(RewardRaised, match="no judge"):
        asyncio.run(reward(**keywords))
