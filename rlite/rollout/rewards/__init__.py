"""Compute rewards: functions in processes of their own, adapters to other libraries' signatures, and ready rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlite import imports

if TYPE_CHECKING:
    from rlite.rollout.rewards.adapters import from_trl, from_verl
    from rlite.rollout.rewards.function import RewardFunction
    from rlite.rollout.rewards.gsm8k import gsm8k_reward
    from rlite.rollout.rewards.math import math_verify_reward
    from rlite.rollout.rewards.overlong import overlong_penalty
    from rlite.rollout.rewards.reasoning import reasoning_gym_reward

# lazy: ready rewards are built on packages that take a second to import, and a reward process needs one of them
__all__, __getattr__, __dir__ = imports.exports(
    __name__,
    {
        "rlite.rollout.rewards.adapters": "from_trl from_verl",
        "rlite.rollout.rewards.function": "RewardFunction",
        "rlite.rollout.rewards.gsm8k": "gsm8k_reward",
        "rlite.rollout.rewards.math": "math_verify_reward",
        "rlite.rollout.rewards.overlong": "overlong_penalty",
        "rlite.rollout.rewards.reasoning": "reasoning_gym_reward",
    },
)
