"""Rewards that name the answer that they have judged."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rlite.rollout import RewardFunction, from_verl
from rlite.rollout.episode import Episode, running
from rlite.rollout.failures import RewardInvalid
from rlite.rollout.rewards.gsm8k import gsm8k_reward
from rlite.rollout.rewards.score import MAX_ANSWER, Reward, read_score, score
from rlite.rollout.rewards.weighted import Part, WeightedRewards


def last_word(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any) -> dict[str, Any]:
    words = completions.split()
    return {"score": len(words), "answer": words[-1] if words else None}


def judged(reward: Any, completions: str, **data: Any) -> tuple[float, str | None]:
    """The reward of a completion, and the answer that its episode has taken."""
    episode = Episode(time.monotonic())

    async def call() -> float:
        with running(episode):
            return await reward(prompt="?", completions=completions, prompt_ids=[1], completion_ids=[2], **data)

    return asyncio.run(call()), episode.answer


@pytest.mark.parametrize("in_process", [True, False])
def test_the_episode_takes_the_answer_that_the_reward_names(in_process: bool) -> None:
    reward = RewardFunction(last_word, in_process=in_process)
    assert judged(reward, "it is 42") == (3.0, "42")
    assert judged(reward, "") == (0.0, None)


def test_calls_of_a_batch_name_an_answer_each() -> None:
    def last_words(**lists: Any) -> list[Any]:
        return [last_word("", text, [], []) for text in lists["completions"]]

    assert judged(RewardFunction(last_words, in_process=True, batch_size=2), "so 7") == (2.0, "7")


def test_verls_dict_names_its_prediction() -> None:
    def compute_score(solution_str: str, ground_truth: str) -> dict[str, Any]:
        return {"score": float(solution_str == ground_truth), "acc": True, "pred": solution_str}

    assert judged(RewardFunction(from_verl(compute_score), in_process=True), "8", ground_truth="8") == (1.0, "8")


def test_a_sum_takes_the_answer_of_the_part_that_names_one() -> None:
    parts = {
        "length": Part(RewardFunction(lambda completions, **_: len(completions), in_process=True), 1.0),
        "word": Part(RewardFunction(last_word, in_process=True), 0.5),
    }
    assert judged(WeightedRewards(parts), "a b") == (4.0, "b")


def answer_after(reward: Any, *turns: str) -> str | None:
    """The answer of an episode whose turns are judged one by one."""
    episode = Episode(time.monotonic())

    async def judge() -> None:
        with running(episode):
            for text in turns:
                await reward(prompt="?", completions=text, prompt_ids=[1], completion_ids=[2])

    asyncio.run(judge())
    return episode.answer


def test_a_last_turn_without_an_answer_removes_that_of_an_earlier_turn() -> None:
    word = RewardFunction(last_word, in_process=True)
    length = RewardFunction(lambda completions, **_: len(completions), in_process=True)
    for reward in (word, WeightedRewards({"word": Part(word, 1.0), "length": Part(length, 1.0)})):
        assert answer_after(reward, "it is 42") == "42"
        assert answer_after(reward, "it is 42", "") is None
        assert answer_after(reward, "", "it is 42") == "42"


def test_a_reward_that_names_no_answers_leaves_those_of_another() -> None:
    word = RewardFunction(last_word, in_process=True)
    length = RewardFunction(lambda completions, **_: len(completions), in_process=True)

    async def both(**arguments: Any) -> None:
        await word(**arguments)
        await length(**arguments)

    assert answer_after(both, "it is 42") == "42"


def test_gsm8k_names_a_number_of_any_form() -> None:
    assert score(gsm8k_reward("", "so #### $1,000.", [], [], answer="1000")) == {"score": 1.0, "answer": "1000"}
    assert score(gsm8k_reward("", "#### 0.50", [], [], answer="7")) == {"score": 0.0, "answer": "0.5"}
    assert score(gsm8k_reward("", "I do not know", [], [], answer="7")) == 0.0


@pytest.mark.parametrize(
    "reply",
    [
        {"score": 1.0},
        {"score": "1", "answer": "x"},
        {"score": 1.0, "answer": 3},
        {"score": float("nan"), "answer": "x"},
    ],
)
def test_a_reply_of_another_form_is_no_reward(reply: Any) -> None:
    assert read_score(reply) is None


def test_an_answer_is_bounded_and_printable() -> None:
    reward = read_score(score({"score": 1, "answer": "\x1b[31m" + "x" * 5000}))
    assert isinstance(reward, Reward)
    assert reward.answer is not None
    assert "\x1b" not in reward.answer
    assert len(reward.answer) < MAX_ANSWER + 10


def test_a_dict_without_a_number_is_no_reward() -> None:
    with pytest.raises(RewardInvalid, match="expected a finite number"):
        judged(RewardFunction(lambda completions, **_: {"answer": completions}, in_process=True), "x")
