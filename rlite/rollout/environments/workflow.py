"""Create workflows from the environment file at `rollout.env_path`."""

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
    """Return a function of (gconfig, tokenizer, max_turns, max_length) that makes workflows in a file's environment.

    The file is a GymEnvironment if it has a function `make` and no `step`. Otherwise it is an Environment. The file is
    loaded once in its sandbox process. Do not call this function from within an event loop.

    Args:
        path: path of the file.
        timeout: seconds for one call.
        num_processes: number of calls that run at the same time. Default: the cores, at most 8.
        memory_limit_gib: resident memory that a process may have, in GiB. None sets no limit.
        env_vars: names of environment variables that the process also receives.

    Raises:
        ConfigError: there is no such file, or it is not a Python file.
        EnvironmentFailure: the file cannot be loaded, or has neither function.
    """
    environment: GymEnvironment | Environment
    if is_gym_file(path):
        environment = GymEnvironment(path, timeout, num_processes, memory_limit_gib=memory_limit_gib, env_vars=env_vars)
        workflow: Callable[..., RolloutWorkflow] = partial(GymWorkflow, environment)
    else:
        environment = Environment(path, timeout, num_processes, memory_limit_gib, env_vars)
        workflow = partial(EnvironmentWorkflow, environment)
    environment.check()
    return workflow
