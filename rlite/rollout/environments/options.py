"""Options of an environment that is a user's file. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from rlite.config import Count, Options, Positive, Seconds
from rlite.errors import ConfigError
from rlite.rollout.registry import WORKFLOWS


def _check_workflow(name: str) -> str:
    if name not in WORKFLOWS:
        raise ConfigError(WORKFLOWS.unknown(name))
    return name


WorkflowName = Annotated[str, AfterValidator(_check_workflow)]
"""name of a registered workflow"""


class EnvironmentOptions(Options):
    """An environment or a registered workflow, in place of rewards."""

    env_path: str | None = None
    """Python file with `async step(state, action, extra_info)`, which returns the keys in STEP_KEYS of
    rlite.rollout.environments.child; or with `make(**env_options)`, which returns a Gym-like environment: then rows
    have a `seed`, and no prompt"""
    workflow: WorkflowName | None = None
    """name of a registered workflow, in place of env_path and of rewards"""
    env_timeout: Seconds = 60.0
    """seconds for one step of the environment"""
    env_processes: Count | None = None
    """steps of environments that run at the same time; default: the cores, at most 8"""
    env_memory_limit_gib: Positive | None = None
    """resident memory that an environment's process may have; a step that takes more fails, alone; null: no limit"""
    env_vars: list[str] = []
    """names of environment variables that the environment's processes get as well, such as the key of an API: they see
    none of the run's secrets"""
    max_turns: Count = 1
    """turns of the model in one episode"""

    def problems_with(self, rewards: Mapping[str, Any], group: str = "") -> Iterator[str]:
        """Yield a message for rewards of single answers beside several turns.

        Args:
            rewards: the rewards by name; there may be none.
            group: key of these options, with a dot at its end.
        """
        if rewards and self.max_turns > 1:
            yield (
                f"{group}max_turns={self.max_turns}: reward.* is of single answers; for several turns use "
                f"{group}env_path"
            )

    @property
    def process_options(self) -> dict[str, Any]:
        """Keyword arguments of `environment_workflow` about the environment's processes."""
        return {
            "timeout": self.env_timeout,
            "num_processes": self.env_processes,
            "memory_limit_gib": self.env_memory_limit_gib,
            "env_vars": self.env_vars,
        }
