"""From the file at `rollout.env_path` to workflows in its environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rlite.rollout.environments.file import is_gym_file
from rlite.rollout.environments.gym import GymEnvironment, GymWorkflow
from rlite.rollout.environments.step import Environment, EnvironmentWorkflow
from rlite.rollout.workflow import RolloutWorkflow


def environment_workflow(
    path: str | Path,
    timeout: float = 60.0,
    num_processes: int | None = None,
    memory_limit_gib: float | None = None,
    env_vars: Sequence[str] = (),
) -> Callable[..., RolloutWorkflow]:
    """What makes workflows of (gconfig, tokenizer, max_turns, max_length) in the environment of a file.

    With a function `make` in it and no `step` it is a GymEnvironment, else an Environment. It is loaded where it will
    run, to see that it can be; not from within an event loop.

    Raises: ConfigError if there is no such file, or it is no Python; RewardError with the reason if it cannot be
        loaded, or has neither.
    """
    if is_gym_file(path):
        gym = GymEnvironment(path, timeout, num_processes, memory_limit_gib=memory_limit_gib, env_vars=env_vars)
        gym.check()
        return partial(GymWorkflow, gym)
    environment = Environment(path, timeout, num_processes, memory_limit_gib, env_vars)
    environment.check()
    return partial(EnvironmentWorkflow, environment)
