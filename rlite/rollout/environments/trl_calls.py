"""Environments with TRL's contract: their calls in sandbox processes. No torch here.

The memory of an episode is the environment, as bytes, with the states of the random number generators.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlite.errors import ConfigError
from rlite.rollout.environments.file import EnvironmentFile, check_length
from rlite.rollout.environments.gym_calls import pickled, seeded, unpickled
from rlite.rollout.rewards.adapters import TrlReward
from rlite.rollout.tools.results import result_text

NOT_TOOLS = ("reset", "get_reward")


def tool_names(kind: type) -> list[str]:
    """Return the names of the tools of an environment's class: its public methods but `reset` and `get_reward`."""
    names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
    return [name for name in names if name not in NOT_TOOLS]


class FactoryFile(EnvironmentFile):
    """A factory of environments in a Python file, which is its class or a function.

    `name`: name of the class, the function, or a dict of them by the name of the environment.
    """

    def __init__(self, path: str, name: str) -> None:
        self.name = name
        super().__init__(path)

    def load(self) -> Any:
        """Return the factory."""
        if not hasattr(module := super().load(), self.name):
            raise ConfigError(f"rollout.env_path={self.path}:{self.name}: the file has no {self.name}")
        return getattr(module, self.name)


class TrlFunction:
    """A factory of environments, or factories by the item's `environment`, as TRL's `environment_factory`."""

    def __init__(self, factory: Any) -> None:
        self.factory = factory

    async def __call__(self, method: str, memory: bytes = b"", **arguments: Any) -> Any:
        """Return the answer of `reset`, `call` or `reward`.

        `**arguments`: `row` and `seed` for `reset`; `name` and `arguments` for `call`. Returns [memory, text] of reset;
        [memory, text, is_error, is_done] of a call; the reward.
        """
        if method == "reset":
            return await self._reset(**arguments)
        environment = unpickled(memory)
        if method == "reward":
            return await _awaited(environment.get_reward())
        return await _call(environment, **arguments)

    async def _reset(self, row: Mapping[str, Any], seed: int | None) -> Any:
        if seed is not None:
            seeded(seed)
        factories = find_factories(self.factory, row)
        if len(factories) > 1:
            raise ConfigError(f"the row has no environment, which names one of {len(factories)} factories")
        environment = factories[0]()
        given = {name: value for name, value in row.items() if name != "environment"}
        text = await _awaited(environment.reset(**given))
        if not isinstance(text, str | None):
            raise ConfigError(f"reset() returned {text!r:.200}; expected a text or None")
        check_length(text, "reset()")
        return [pickled(environment), text]


def find_factories(factory: Any, row: Mapping[str, Any]) -> list[Callable[[], Any]]:
    """Return the factory of a row; if the row has no `environment`, all of them."""
    found = factory.load() if isinstance(factory, FactoryFile) else factory
    if not isinstance(found, Mapping):
        return [found]
    name = row.get("environment")
    if name is not None and name not in found:
        raise ConfigError(f"the row has environment={name!r}; expected one of {', '.join(found)}")
    return list(found.values()) if name is None else [found[name]]


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def _call(environment: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        text, is_error = result_text(await _awaited(getattr(environment, name)(**arguments))), False
    except Exception as error:
        text, is_error = f"Error: {type(error).__name__}: {error}"[:2000], True
    return [pickled(environment), text, is_error, getattr(environment, "done", False) is True]


@dataclass(frozen=True)
class EnvironmentReward(TrlReward):
    """TRL's reward functions, which get `environments`, the environments at the end of their episodes."""

    def __call__(
        self,
        /,
        prompt: Any,
        completions: Any,
        prompt_ids: Any,
        completion_ids: Any,
        environments: Any = (),
        **data: Any,
    ) -> Any:
        """Return the rewards of completions whose environments are given as bytes."""
        is_batch = isinstance(environments, list)
        found = [unpickled(memory) for memory in environments] if is_batch else unpickled(environments)
        return super().__call__(prompt, completions, prompt_ids, completion_ids, environments=found, **data)
