"""Tables of the user's rewards and workflows, which commands find by name. This module imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlite.errors import ConfigError
from rlite.imports import find_function
from rlite.registry import Table

if TYPE_CHECKING:
    from rlite.rollout.workflow import RolloutWorkflow

REWARDS: Table[Callable[..., Any]] = Table("reward", given=())
"""reward functions by name, with a signature that `configured_rewards` knows, or RewardFunctions"""
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


def find_reward(path: str, what: str) -> Callable[..., Any]:
    """Return the function that a path names.

    Args:
        path: file.py:function, package.module:function, or the name of a registered reward.
        what: option and value that name it, for error messages.

    Raises:
        ConfigError: there is no such function, or no reward is registered under this name.
        ImportFailed: a file or module does not exist, or raised an exception. The message has the user's traceback.
    """
    if ":" in path or path.endswith(".py"):
        return find_function(path, what)
    if path not in REWARDS:
        raise ConfigError(f"{what}: expected file.py:function or package.module:function; {REWARDS.unknown(path)}")
    return REWARDS[path]
