"""The workflow of an environment that options name: a file, or an environment of another library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlite.errors import ConfigError
from rlite.rollout.environments.factory import environment_workflow
from rlite.rollout.environments.file import CONTRACTS, contract_of
from rlite.rollout.environments.gym import GymWorkflow
from rlite.rollout.environments.tool_episodes import ToolEnvironmentWorkflow
from rlite.rollout.environments.trl import TrlEnvironment
from rlite.rollout.registry import find_reward
from rlite.rollout.workflow import RolloutWorkflow

Maker = Callable[..., RolloutWorkflow]
"""function of (gconfig, tokenizer, max_turns, max_length)"""


def contract_workflow(
    path: str, config: Mapping[str, Any] | None = None, timeout: float = 60.0, **options: Any
) -> Maker:
    """Return a function of (gconfig, tokenizer, max_turns, max_length) that makes workflows in an environment.

    Do not call this function from within an event loop.

    Args:
        path: path of an environment's file, or CONTRACT:NAME, with a contract of `CONTRACTS`.
        config: further arguments of an environment CONTRACT:NAME.
        timeout: seconds for one call; with verifiers, for one episode.
        **options: see `ProcessOptions`.

    Raises:
        ConfigError: the environment does not exist, an argument is unknown, or the library is missing or too old.
        EnvironmentFailure: the environment cannot be loaded.
    """
    contract, name = contract_of(path)
    if not contract:
        if config:
            raise ConfigError(f"env_config={dict(config)}: these are arguments of an environment CONTRACT:NAME")
        return environment_workflow(path, timeout, **options)
    try:
        return _MAKERS[contract](name, {**(config or {}), "timeout": timeout}, options)
    except TypeError as error:
        expected = f"expected {CONTRACTS[contract]}"
        raise ConfigError(f"{path}, env_config={dict(config or {})}: {error}; {expected}") from error


def _verifiers(name: str, config: dict[str, Any], options: dict[str, Any]) -> Maker:
    from rlite.services.environments.verifiers import VerifiersEnvironment, VerifiersWorkflow  # aiohttp is optional

    own = {key: config.pop(key) for key in ("timeout", "renderer") if key in config}
    taskset = {"id": name, **config.pop("taskset", {})}
    environment = VerifiersEnvironment({**config, "taskset": taskset}, **own, **options)
    environment.check()

    def make(
        gconfig: Any,
        tokenizer: Any,
        max_turns: int | None = None,
        max_length: int | None = None,
        chat_template_options: Mapping[str, Any] | None = None,
    ) -> Any:
        if chat_template_options:
            told = f"chat_template_options={dict(chat_template_options)}: the harness of {environment.name}"
            raise ConfigError(f"{told} asks for prompts without any; leave them out")
        return VerifiersWorkflow(environment, gconfig, tokenizer, max_length)

    return make


def _trl(name: str, config: dict[str, Any], options: dict[str, Any]) -> Maker:
    paths = config.pop("reward_funcs", [])
    paths = [paths] if isinstance(paths, str) else paths
    rewards = [find_reward(path, f"env_config.reward_funcs={path}") for path in paths]
    environment = TrlEnvironment(name, rewards, **config, **options)
    environment.check()
    return partial(ToolEnvironmentWorkflow, environment)


def _openenv(name: str, config: dict[str, Any], options: dict[str, Any]) -> Maker:
    from rlite.services.environments.openenv import OpenEnv  # aiohttp is optional

    return partial(GymWorkflow, OpenEnv(name, **config))


def _openenv_tools(name: str, config: dict[str, Any], options: dict[str, Any]) -> Maker:
    from rlite.services.environments.openenv import OpenEnvTools  # aiohttp is optional

    return partial(ToolEnvironmentWorkflow, OpenEnvTools(name, **config))


def _ors(name: str, config: dict[str, Any], options: dict[str, Any]) -> Maker:
    from rlite.services.environments.ors import OrsEnvironment  # aiohttp is optional

    return partial(ToolEnvironmentWorkflow, OrsEnvironment(name, **config))


_MAKERS: dict[str, Callable[[str, dict[str, Any], dict[str, Any]], Maker]] = {
    "verifiers": _verifiers,
    "trl": _trl,
    "openenv": _openenv,
    "openenv-tools": _openenv_tools,
    "ors": _ors,
}
