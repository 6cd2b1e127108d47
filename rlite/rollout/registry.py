"""Tables of the user's rewards and workflows, which commands find by name. This module imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlite.registry import Table

if TYPE_CHECKING:
    from rlite.rollout.workflow import RolloutWorkflow

REWARDS: Table[Callable[..., Any]] = Table("reward", given=())
"""reward functions by name, with one of the signatures of `rlite.rollout.rewards.signatures`, or RewardFunctions"""
WORKFLOWS: Table[Callable[..., RolloutWorkflow]] = Table("workflow", given=("gconfig", "tokenizer"))
"""functions (gconfig, tokenizer) -> RolloutWorkflow by name"""


def register_reward(name: str) -> Callable[[Any], Any]:
    """Register a reward of single-turn answers for `reward.path=name`.

    Args:
        name: the value of `reward.path`.

    Returns:
        A decorator of a function with one of the accepted signatures, or of a RewardFunction. It returns the function
        unchanged, and raises ConfigError if the name is taken.
    """
    return REWARDS.register(name)


def register_workflow(name: str) -> Callable[[Any], Any]:
    """Register a function `(gconfig, tokenizer) -> RolloutWorkflow` for `rollout.workflow=name`.

    It is called twice: with the sampling parameters of training, and of evaluation.

    Args:
        name: the value of `rollout.workflow`.

    Returns:
        A decorator, which returns the function unchanged. It raises ConfigError if the name is taken.
    """
    return WORKFLOWS.register(name)
