"""Schemas of the tools of environments with TRL's contract, read in a sandbox process. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlite.errors import ConfigError
from rlite.rollout.environments.trl_calls import find_factories, tool_names
from rlite.rollout.tools.toolbox import Tool


class ToolSchemas:
    """Function that reads the tools of an environment in its process, from type hints and docstrings."""

    def __init__(self, factory: Any) -> None:
        self.factory = factory

    def __call__(self, row: Mapping[str, Any]) -> Any:
        """Return the schemas, and whether the environment has a method `get_reward`."""
        environments = [factory() for factory in find_factories(self.factory, row)]
        for environment in environments:
            if not callable(getattr(environment, "reset", None)):
                raise ConfigError(f"{type(environment).__name__} has no method reset(**row)")
        tools = [Tool.of(getattr(one, name)) for one in environments for name in tool_names(type(one))]
        has_reward = all(callable(getattr(environment, "get_reward", None)) for environment in environments)
        return [[dict(tool.schema) for tool in tools], has_reward]
