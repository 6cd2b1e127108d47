"""The workflow of an environment's file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Unpack

from rlite.rollout.environments.file import is_gym_file
from rlite.rollout.environments.gym import GymEnvironment, GymWorkflow
from rlite.rollout.environments.workflow import Environment, EnvironmentWorkflow, ProcessOptions
from rlite.rollout.workflow import RolloutWorkflow


def environment_workflow(
    path: str | Path, timeout: float = 60.0, **options: Unpack[ProcessOptions]
) -> Callable[..., RolloutWorkflow]:
    """Return a function of (gconfig, tokenizer, max_turns, max_length) that makes workflows in a file's environment.

    The file is a GymEnvironment if it has a function `make` and no `step`. Otherwise it is an Environment. The file is
    loaded once in its sandbox process. Do not call this function from within an event loop.

    `timeout`: seconds for one call.
    """
    environment = (GymEnvironment if is_gym_file(path) else Environment)(path, timeout, **options)
    environment.check()
    if isinstance(environment, GymEnvironment):
        return partial(GymWorkflow, environment)
    return partial(EnvironmentWorkflow, environment)
