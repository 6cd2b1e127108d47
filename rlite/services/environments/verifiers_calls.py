"""Calls of a verifiers environment in sandbox processes. No torch here; verifiers is imported in these processes."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import sys
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

KEY = "RLITE_EPISODE_KEY"
"""environment variable that has the token of an episode, inside of its process"""

_LOADED: dict[str, LoadedEnvironment] = {}
"""environments of this process by their config; functions of equal configs share one"""
USED = ("verifiers.v1.clients.train", "renderers.client", "transformers.models.auto.tokenization_auto")
"""modules that an episode imports when it begins"""


class VerifiersFunction:
    """An environment of verifiers: `check` loads it, `run` plays one episode. It is loaded once in each process.

    `config`: verifiers' config of the environment, as `[env]` in its files. `renderer`: verifiers' names and values for
    the renderer; None: no episodes are played.
    """

    def __init__(self, config: Mapping[str, Any], renderer: Mapping[str, Any] | None = None) -> None:
        self.config, self.renderer = dict(config), renderer

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name in ("verifiers.v1", *USED):  # beforehand, because they take longer than a call
            importlib.import_module(name)
        if self.renderer is not None:
            asyncio.run(_warm_up(_client(self.renderer)))

    async def __call__(self, method: str, **arguments: Any) -> Any:
        """Return the number of tasks in a list (None: endless), or the end of an episode."""
        if (key := repr(self.config)) not in _LOADED:
            _LOADED[key] = LoadedEnvironment(self.config)
        env = _LOADED[key]
        if method == "check":
            return [env.num_tasks]
        return await env.run(renderer=self.renderer, **arguments)


class LoadedEnvironment:
    """An environment in this process.

    `config`: as of `VerifiersFunction`. A taskset id that ends with .py is a file.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        taskset = dict(config["taskset"])
        if (file := Path(taskset["id"])).suffix == ".py":
            sys.path.insert(0, str(file.absolute().parent))
            taskset["id"] = file.stem
        self.env = loaders.load_environment(_local({**config, "taskset": taskset}, loaders.resolve_env_config))
        self._tasks: list[Any] = []
        self._left = iter(self.env.taskset)
        self.num_tasks = None
        if self.env.taskset.bounded:
            self._tasks = list(self._left)
            self.num_tasks = len(self._tasks)

    def task(self, index: int) -> Any:
        """Return a task by its place; places beyond the last one begin anew."""
        if self.num_tasks is None:
            self._tasks += itertools.islice(self._left, max(index + 1 - len(self._tasks), 0))
        return self._tasks[index % len(self._tasks)]

    async def run(
        self, index: int, model: str, base_url: str, key: str, sampling: Mapping[str, Any], renderer: Any
    ) -> Any:
        """Play one episode.

        `index`: place of the task. Returns the errors of the episode, and for each trace its reward, its rewards by
        name, its errors, whether it is trained on, and the tokens of its branches.
        """
        vf, os.environ[KEY] = importlib.import_module("verifiers.v1"), key
        client = _client({**renderer, "base_url": base_url})
        context = vf.ModelContext(model, client=client, sampling=vf.SamplingConfig(**sampling))
        async with self.env.serving():
            [slot] = self.env.slots(self.task(index), n=1)
            episode = await self.env.run_slot(slot, context)
        return [_errors(episode), [_trace(trace) for trace in episode.traces]]


def _client(values: Mapping[str, Any]) -> Any:
    clients = importlib.import_module("verifiers.v1.configs.client")
    return clients.TrainClientConfig(type="train", api_key_var=KEY, **values)


async def _warm_up(client: Any) -> None:
    """Render a message: the renderer stays in the process, and its template is compiled outside of any episode.

    A process that makes code in a call serves no further one.
    """
    train = importlib.import_module("verifiers.v1.clients.train")
    pool = train.ElasticRendererPool(client.renderer_model_name, client.renderer, multiplex=client.multiplex)
    slot = await pool.grow()
    slot.renderer.render([{"role": "user", "content": "?"}], add_generation_prompt=True)


def _local(config: Mapping[str, Any], resolve: Callable[[Any], Any]) -> Any:
    """Return the resolved config. Agents whose runtime it does not set run on this machine, and in no cloud."""
    roles = importlib.import_module("verifiers.v1.configs.agent").agent_config_fields(resolve(config))
    own = {name: {"runtime": {"type": "subprocess"}, **config.get(name, {})} for name in roles}
    return resolve({**config, **own})


def _errors(source: Any) -> list[str]:
    """Return the errors of an episode or a trace that has not succeeded, the last one first."""
    told = [f"{error.type}: {error.message}"[:2000] for error in source.errors[::-1]]
    return [] if source.ok else told or ["it has not succeeded, and names no error"]


def _trace(trace: Any) -> Any:
    rewards = {name: float(reward.value) for name, reward in trace.rewards.items() if reward is not None}
    branches = [array("I", branch.token_ids).tobytes() for branch in trace.branches]
    return [float(trace.reward), rewards, _errors(trace), bool(trace.agent.trainable), branches]
