"""The weighted sum of several reward functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlite.rollout.failures import RewardInvalid
from rlite.rollout.rewards.function import RewardFunction, noted
from rlite.rollout.rewards.groups import GroupReward
from rlite.rollout.rewards.score import Reward
from rlite.runtime.event_loop import side_by_side


class Part(NamedTuple):
    """One of several rewards."""

    function: RewardFunction
    weight: float


class WeightedRewards:
    """The weighted sum of several reward functions, which run concurrently.

    A function with TRL's signature may return None for a completion to which it does not apply. It then does not count.

    `parts`: the rewards by name. The name is that of the metric `reward/NAME`, the mean before the weight.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = dict(parts)

    async def __call__(self, /, **arguments: Any) -> Reward:
        """Return the sum, with its parts."""
        rewards = await side_by_side([part.function(**arguments) for part in self.parts.values()])
        values = dict(zip(self.parts, map(_value, rewards), strict=True))
        counted = [self.parts[name].weight * value for name, value in values.items() if not math.isnan(value)]
        if not counted:
            raise RewardInvalid(f"none of the rewards {', '.join(values)} applies to the completion: all are None")
        reward = Reward(math.fsum(counted))
        reward.parts = values
        reward.answer = next((each.answer for each in rewards if isinstance(each, Reward) and each.answer), None)
        noted(self, reward)
        return reward


def compares_groups(reward: RewardFunction | WeightedRewards) -> bool:
    """Return whether a reward function, or one of several, gets the completions of a group in one call."""
    parts = reward.parts.values() if isinstance(reward, WeightedRewards) else [Part(reward, 1.0)]
    return any(isinstance(part.function, GroupReward) for part in parts)


def _value(reward: float) -> float:
    """Return a part's reward; NaN if its function returned None, which `TrlReward.is_part` reports as its one part."""
    parts = list(reward.parts.values()) if isinstance(reward, Reward) else []
    return math.nan if len(parts) == 1 and math.isnan(parts[0]) else float(reward)


def as_reward_function(reward_fn: Callable[..., Any]) -> RewardFunction | WeightedRewards:
    """Return a RewardFunction or WeightedRewards unchanged, or a RewardFunction made from a function."""
    return reward_fn if isinstance(reward_fn, RewardFunction | WeightedRewards) else RewardFunction(reward_fn)
