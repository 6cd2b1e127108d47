from __future__ import annotations

import asyncio

import pytest

from rlite.errors import ConfigError
from rlite.rollout.rewards import overlong_penalty
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.rollout.rewards.options import RewardOptions

PATH = "rlite.rollout.rewards:overlong_penalty"


@pytest.mark.parametrize(
    ("length", "expected"),
    # DAPO, equation 13, with L_max = 20480 and L_cache = 4096, the values of the paper
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (99999, -1.0)],
)
def test_the_penalty_is_that_of_dapo(length: int, expected: float) -> None:
    found = overlong_penalty("", "", [], range(length), max_length=20480, cache=4096)
    assert found == pytest.approx(expected)


def test_it_is_a_part_of_the_rewards_of_a_config() -> None:
    options = {"max_length": 10, "cache": 4}
    rewards = {
        "overlong": RewardOptions(path=PATH, options=options, in_process=True, weight=2.0),
        "right": RewardOptions(path=f"{__file__}:right", in_process=True),
    }
    reward = ChosenRewards(rewards, {}).make()
    found = asyncio.run(reward(prompt="", completions="", prompt_ids=[], completion_ids=[0] * 8))
    assert found == 1.0 + 2.0 * -0.5


def right(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int]) -> float:
    return 1.0


def test_wrong_options_are_refused_before_a_run() -> None:
    with pytest.raises(ConfigError, match=r"reward.options.max_lenght: did you mean 'max_length'"):
        ChosenRewards({"a": RewardOptions(path=f"{__file__}:strict", options={"max_lenght": 1})}, {})
    with pytest.raises(ConfigError, match="expected 0 < cache"):
        overlong_penalty("", "", [], [], max_length=4, cache=5)


def strict(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], *, max_length: int = 1
) -> float:
    return 1.0
