from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("math_verify")

from rlite.errors import DataError
from rlite.rollout.failures import RewardRaised, RewardTimeout
from rlite.rollout.rewards import math_verify_reward
from rlite.rollout.rewards.function import RewardFunction
from rlite.runtime.sandbox.pool import close_shared_pool


@pytest.fixture(autouse=True, scope="module")
def _no_process_is_left() -> Iterator[None]:
    yield
    close_shared_pool()


def score(completions: str, answer: Any) -> float:
    return math_verify_reward("", completions, [], [], answer=answer)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("Half of it, so $\\frac{2}{4}$.", "1/2", 1.0),
        ("Half of it, so 0.5", "\\frac{1}{2}", 1.0),
        ("First 3, then 4, so \\boxed{4}", 4, 1.0),
        ("First 3, then 4, so \\boxed{3}", 4, 0.0),
        ("\\boxed{(x+1)^2}", "x^2 + 2x + 1", 1.0),
        ("\\boxed{x^2 + 2x}", "$x^2 + 2x + 1$", 0.0),
        ("The answer is 1,234.", "1234", 1.0),
        ("\\boxed{\\{1, 2\\}}", "\\boxed{\\{2, 1\\}}", 1.0),
    ],
)
def test_answers_are_compared_by_their_meaning(completion: str, answer: Any, expected: float) -> None:
    assert score(completion, answer) == expected


@pytest.mark.parametrize(
    ("answers", "name"),
    [
        (["1/2", "0.5", "so 0.50", "2/4", "\\boxed{\\frac{2}{4}}", "$\\frac12$"], "1/2"),
        (["3", "3.0", "\\boxed{6/2}", "6/2"], "3"),
        (["-0.25", "-1/4"], "-1/4"),
        (["\\boxed{x^2 + 2x}"], "x**2 + 2*x"),
        (["\\boxed{1/0}", "1/0"], "zoo"),
    ],
)
def test_equal_numbers_have_one_name_and_are_one_vote_of_a_majority(answers: list[str], name: str) -> None:
    assert [math_verify_reward("", text, [], [], answer="7").answer for text in answers] == [name] * len(answers)


@pytest.mark.parametrize(
    "nonsense",
    ["", " ", "no idea", "\\boxed{", "$$$", "\\frac{", "\x00\ufffd", "}" * 50, "1/0", "\\boxed{1/0}", "∞ − ∞"],
)
def test_nonsense_is_false(nonsense: str) -> None:
    assert score(nonsense, "7") == 0.0


@pytest.mark.parametrize("piece", ["1", "1 ", "(", "\\boxed{", "$", "\\frac{1}{", "1+", "a "])
def test_a_very_long_completion_is_read_from_its_end_and_soon(piece: str) -> None:
    began = time.process_time()
    assert score(piece * 200_000, "7") == 0.0
    assert score(piece * 200_000 + " so $7$", "7") == 1.0
    assert time.process_time() - began < 40, "quadratic time in its length would take hours"


def test_an_answer_of_the_data_that_is_none_is_not_a_zero() -> None:
    with pytest.raises(DataError, match="finds no mathematical expression"):
        score("\\boxed{1}", "")


def test_it_runs_in_a_process_where_a_computation_without_end_is_killed() -> None:
    reward = RewardFunction(math_verify_reward, timeout=60, num_processes=1)
    hasty = RewardFunction(math_verify_reward, timeout=0.5, num_processes=1)
    call = {"prompt": "", "prompt_ids": [], "completion_ids": []}
    assert asyncio.run(reward(**call, completions="so $\\frac{2}{4}$", answer="0.5")) == 1.0
    with pytest.raises(RewardTimeout):
        asyncio.run(hasty(**call, completions="\\boxed{99999999!}", answer="5"))
    with pytest.raises(RewardRaised, match="DataError"):
        asyncio.run(reward(**call, completions="1", answer=""))


def test_math_process_loads_neither_torch_nor_other_scorers() -> None:
    program = "import sys; from rlite.rollout.rewards import math_verify_reward; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert {"torch", "reasoning_gym", "transformers"} & set(done.stdout.split()) == set()
    assert "math_verify" in done.stdout.split(), done.stderr
