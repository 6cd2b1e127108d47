"""Reward functions for common tasks, ready to use: `RewardFunction(math_verify_reward)`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlite import lazy

if TYPE_CHECKING:
    from rlite.rollout.scorers.mathematics import math_verify_reward
    from rlite.rollout.scorers.reasoning import reasoning_gym_reward

# lazy: each is built on a package that takes a second to import, and a reward process needs one of them
__all__, __getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "rlite.rollout.scorers.mathematics": "math_verify_reward",
        "rlite.rollout.scorers.reasoning": "reasoning_gym_reward",
    },
)
