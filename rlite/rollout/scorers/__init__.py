"""Reward functions for common tasks, ready to use: `RewardFunction(math_verify_reward)`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlite.rollout.scorers.mathematics import math_verify_reward
    from rlite.rollout.scorers.reasoning import reasoning_gym_reward

# lazy: each is built on a package that takes a second to import, and a reward process needs one of them
_MODULE_OF = {
    "math_verify_reward": "rlite.rollout.scorers.mathematics",
    "reasoning_gym_reward": "rlite.rollout.scorers.reasoning",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
