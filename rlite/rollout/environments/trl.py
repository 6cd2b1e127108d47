"""Environments with TRL's contract (`environment_factory`), in processes that can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack

from rlite.data.chat.forms import Message
from rlite.errors import ConfigError
from rlite.rollout.environments.tool_episodes import ToolEpisode, last_user_message
from rlite.rollout.environments.trl_calls import EnvironmentReward, FactoryFile, TrlFunction
from rlite.rollout.environments.trl_schemas import ToolSchemas
from rlite.rollout.environments.workflow import ProcessOptions, sandboxed
from rlite.rollout.rewards.adapters import from_trl
from rlite.rollout.rewards.groups import GroupReward
from rlite.rollout.rewards.score import as_number
from rlite.rollout.tools.formats import ToolCall
from rlite.rollout.tools.toolbox import ToolResult


class TrlEpisode(ToolEpisode):
    """One episode of an environment with TRL's contract.

    `messages`: what the model reads first. `schemas`: JSON schemas of the tools. `memory`: the environment, as bytes.
    `reward_fn`: TRL's reward functions; None: the environment's own reward counts alone.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        memory: bytes,
        ask: Callable[..., Any],
        reward_fn: GroupReward | None,
        has_reward: bool,
    ) -> None:
        super().__init__(messages, schemas)
        self._memory, self._ask, self._reward_fn, self._has_reward = memory, ask, reward_fn, has_reward

    async def _call(self, call: ToolCall) -> ToolResult:
        asked = {"memory": self._memory, "name": call.name, "arguments": call.arguments}
        self._memory, text, is_error, self.is_done = await self._ask(_read_call, method="call", **asked)
        return ToolResult(text, is_error)

    async def reward(self, **arguments: Any) -> float:
        """Return the environment's own reward and those of TRL's functions, which may compare the whole group."""
        rewards = []
        if self._has_reward:
            rewards.append(await self._ask(as_number, method="reward", memory=self._memory))
        if self._reward_fn is not None:
            rewards.append(await self._reward_fn(environments=self._memory, **arguments))
        return rewards[0] if len(rewards) == 1 else sum(rewards)


class TrlEnvironment:
    """Environments that TRL's `environment_factory` makes, one for each episode, in processes that can be killed.

    An environment has `reset(**row)`, which returns a text for the end of the last user message, or None. Its other
    public methods with type hints and docstrings are the model's tools. It may have `get_reward()`, and a field `done`
    that ends the episode when it becomes true. Methods may be async. Between two calls an environment is pickled: keep
    connections out of its fields, or open them in the methods.

    Args:
        factory: the class of the environments, a function that returns one, or a dict of these by the row's
            `environment`; or the path file.py:NAME of one of these.
        reward_funcs: TRL's reward functions, `f(prompts, completions, environments, **columns)`, which get the
            completions of a whole group. Their sum is added to the environment's own reward.
        timeout: seconds for one call.
        **options: see `ProcessOptions`.

    Raises:
        ConfigError: the file does not exist, or an option is out of range.
    """

    def __init__(
        self,
        factory: Any,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
        timeout: float = 60.0,
        **options: Unpack[ProcessOptions],
    ) -> None:
        path, _, name = factory.rpartition(":") if isinstance(factory, str) else ("", "", "")
        if isinstance(factory, str) and not Path(path).suffix == ".py":
            raise ConfigError(f"environment_factory={factory!r}: expected file.py:NAME, the class or its factory")
        factory = FactoryFile(path, name) if isinstance(factory, str) else factory
        what = f"the environment {getattr(factory, 'name', getattr(factory, '__name__', 'factory'))}"
        self._ask = sandboxed(TrlFunction(factory), timeout, what=what, **options).ask
        self._schemas_of = sandboxed(ToolSchemas(factory), max(timeout, 60.0), what=what, **options).ask
        self._known: dict[Any, Any] = {}
        self._reward_fn = None
        if callable(reward_funcs) or reward_funcs:
            plain = from_trl(reward_funcs, is_conversational=None)
            own = EnvironmentReward(**{each.name: getattr(plain, each.name) for each in fields(plain)})
            self._reward_fn = GroupReward(own, timeout=timeout, what=f"the rewards of {what}")

    def check(self) -> list[str]:
        """Load the factories in their process. Do not call this method from within an event loop.

        Returns:
            The names of the tools.

        Raises:
            EnvironmentFailure: the factory cannot be loaded, or an environment breaks the contract.
            ConfigError: the environment has neither a reward of its own nor reward functions.
        """
        schemas, _ = asyncio.run(self._described({}))
        return [schema["function"]["name"] for schema in schemas]

    @asynccontextmanager
    async def episode(self, data: Mapping[str, Any]) -> AsyncIterator[TrlEpisode]:
        """Begin an episode.

        Args:
            data: the row, which `reset` gets. Its prompt is a list of messages; without one, it is what `reset` says.

        Yields:
            The episode.

        Raises:
            EnvironmentFailure: a call failed. The class depends on the outcome.
            ConfigError: there is no reward, or the prompt does not end with a user's text.
        """
        schemas, has_reward = await self._described(data)
        asked = {"row": dict(data), "seed": data.get("seed")}
        memory, text = await self._ask(_read_reset, method="reset", **asked)
        messages = data.get("messages", data.get("prompt")) or [{"role": "user", "content": ""}]
        if not isinstance(messages, list):
            messages = [{"role": "user", "content": messages}]
        messages = last_user_message(messages, text) if text else messages
        yield TrlEpisode(messages, schemas, memory, self._ask, self._reward_fn, has_reward)

    async def _described(self, row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        name = row.get("environment")
        if name not in self._known:
            schemas, has_reward = await self._schemas_of(_read_description, row={"environment": name})
            if not has_reward and self._reward_fn is None:
                raise ConfigError(
                    "the environment has no get_reward(), and there are no reward_funcs: give one of them"
                )
            self._known[name] = schemas, has_reward
        return self._known[name]


def _reader(*kinds: Any) -> Callable[[Any], Any]:
    """Return a function that returns a list of values of these types, and None for any other answer of a process."""

    def read(answer: Any) -> list[Any] | None:
        is_expected = isinstance(answer, list) and len(answer) == len(kinds) and all(map(isinstance, answer, kinds))
        return answer if is_expected else None

    return read


_read_description, _read_reset = _reader(list, bool), _reader(bytes, str | None)
_read_call = _reader(bytes, str, bool, bool)
