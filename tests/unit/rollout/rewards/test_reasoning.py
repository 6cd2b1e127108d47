from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from rlite.data.reasoning import build_problems
from rlite.rollout.rewards import reasoning_gym_reward
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.rewards.reasoning import verify_exactly
from rlite.runtime.sandbox.pool import close_shared_pool

TASKS = ["spell_backward", "chain_sum", "countdown", "number_sorting", "letter_counting", "simple_equations"]


@pytest.fixture(autouse=True, scope="module")
def _no_process_is_left() -> Iterator[None]:
    yield
    close_shared_pool()


def score(completions: str, row: dict[str, Any]) -> float:
    return reasoning_gym_reward("", completions, [], [], **row)


def exact(completions: str, row: dict[str, Any]) -> float:
    return verify_exactly("", completions, [], [], **row)


@pytest.mark.parametrize("task", TASKS)
def test_the_tasks_own_answers_are_right_bare_and_in_tags_and_others_are_not(task: str) -> None:
    for row in build_problems(task, 3, seed=0):
        answer = row["answer"]
        assert score(answer, row) == 1.0
        assert score(f"Let me <answer>see</answer> think.\n<answer> {answer} </answer> Done.", row) == 1.0
        assert score(f"<answer>{answer}", row) == 1.0, "cut short after the answer"
        assert score(f"<answer>{answer}</answer> or <answer>nonsense</answer>", row) < 0.5, "the last one counts"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("nonsense", ["", "no idea", "\x00\ufffd", "[[[", "1/0", "9" * 1_000_000, "a " * 500_000])
def test_nonsense_and_very_long_answers_get_little(task: str, nonsense: str) -> None:
    (row,) = build_problems(task, 1, seed=0)
    assert 0 <= score(nonsense, row) < 0.5


def test_it_runs_in_a_process() -> None:
    (row,) = build_problems("spell_backward", 1, seed=0)
    reward = RewardFunction(reasoning_gym_reward, num_processes=1)
    call = {"prompt": "", "prompt_ids": [], "completion_ids": []}
    assert asyncio.run(reward(**call, completions=row["answer"], **row)) == 1.0


@pytest.mark.parametrize("name", ["spell_backward", "chain_sum", "gcd", "number_sorting"])
def test_the_verifier_takes_a_tasks_own_answers_from_rows_that_went_through_json(name: str) -> None:
    for row in json.loads(json.dumps(build_problems(name, 5, seed=0))):
        assert score(f" {row['answer']}\n", row) == exact(row["answer"], row) == 1.0
        assert exact("", row) == 0.0


def test_partial_credit_is_the_tasks_own_and_never_full() -> None:
    row = next(row for row in build_problems("spell_backward", 200, seed=0) if len(row["answer"]) == 9)
    assert score(row["answer"][:4], row) == pytest.approx(4 / 9)
    too_long = row["answer"] + "x"
    assert score(too_long, row) == pytest.approx(1.0)  # nine ninths, which add up to more than 1
    assert exact(too_long, row) == exact(row["answer"][:4], row) == 0.0


def test_reward_functions_and_rows_pickle() -> None:
    row = build_problems("spell_backward", 1, seed=0)[0]
    reward, copy = pickle.loads(pickle.dumps((verify_exactly, row)))
    assert reward("", row["answer"], [], [], **copy) == 1.0
