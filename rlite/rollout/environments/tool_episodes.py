"""Environments whose actions are calls of tools: one episode of them, and the workflow that plays it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, Unpack

from tensordict import TensorDict

from rlite.data.chat.forms import Message
from rlite.data.chat.template import Tokenizer
from rlite.errors import ConfigError, DataError
from rlite.rollout.conversation import ConversationOptions
from rlite.rollout.failures import EnvironmentInvalid
from rlite.rollout.rewards.score import as_number
from rlite.rollout.tools.formats import ToolCall, ToolCallFormat
from rlite.rollout.tools.toolbox import ToolResult
from rlite.rollout.tools.workflow import ToolCallingWorkflow
from rlite.types import AsyncInference, GenerationHyperparameters


class ToolEpisode(ABC):
    """One episode. Its calls are made one after the other, in their order, since each may change the state.

    Args:
        messages: what the model reads first.
        schemas: JSON schemas of the tools.
    """

    has_state = True

    def __init__(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> None:
        self.messages, self.schemas = list(messages), schemas
        self.names = [schema["function"]["name"] for schema in schemas]
        self.is_done = False
        """a call has ended the episode"""
        self.rewards = 0.0
        """sum of the rewards of all calls"""
        self._turn = asyncio.Lock()

    async def call(self, call: ToolCall) -> ToolResult:
        """Return the result of a call. A failure is also a result, so the model may try again.

        Args:
            call: name and arguments.

        Raises:
            EnvironmentFailure: the environment failed, and not the tool alone.
        """
        async with self._turn:
            if self.is_done:
                return ToolResult("Error: the episode has ended", is_error=True)
            if call.name not in self.names:
                known = ", ".join(self.names)
                return ToolResult(f"Error: there is no tool {call.name}; there are: {known}", is_error=True)
            return await self._call(call)

    @abstractmethod
    async def _call(self, call: ToolCall) -> ToolResult:
        """Return the result of a call of a tool that exists."""

    async def reward(self, **arguments: Any) -> float:
        """Return the reward at the end, by default the sum of the rewards of all calls.

        Args:
            **arguments: those that `ToolUseWorkflow` gives its reward function.
        """
        return self.rewards


class ToolEnvironment(Protocol):
    """Environments of one kind."""

    def episode(self, data: Mapping[str, Any]) -> AbstractAsyncContextManager[ToolEpisode]:
        """Begin an episode of an item, which ends with the block."""


class ToolEnvironmentWorkflow(ToolCallingWorkflow):
    """A workflow whose model acts on an environment by calls of tools.

    An episode ends when the model calls no tool, when a call ends it, or after `max_turns` turns. A trajectory has the
    keys of `ToolUseWorkflow`.

    Args:
        environment: makes an episode of each item.
        gconfig: sampling parameters. `max_new_tokens` applies to each turn.
        tokenizer: the model's tokenizer, with a chat template that shows tools.
        max_turns: maximum number of the model's turns in one episode.
        max_length: number of tokens of one sequence at which generation stops. None is the engine's maximum.
        tool_format: see `ToolCallingWorkflow`.
        **options: see `ConversationOptions`.

    Raises:
        ConfigError: an option is out of range, or the template's calls cannot be read.
    """

    needs_prompt = False

    def __init__(
        self,
        environment: ToolEnvironment,
        gconfig: GenerationHyperparameters | Mapping[str, Any],
        tokenizer: Tokenizer,
        max_turns: int = 16,
        max_length: int | None = None,
        tool_format: str | ToolCallFormat | None = None,
        **options: Unpack[ConversationOptions],
    ) -> None:
        super().__init__(gconfig, tokenizer, max_turns, max_length, tool_format, **options)
        self.environment = environment

    def opening(self, data: Mapping[str, Any]) -> None:
        """Return None, because the environment decides the prompt."""

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict:
        """Return the trajectory of one episode.

        Args:
            engine: generates the model's turns.
            data: the item.
        """
        async with self.environment.episode(data) as episode:
            rest = {name: value for name, value in data.items() if name not in ("prompt", "messages", "input_ids")}
            item = {**rest, "messages": episode.messages, "tools": list(episode.schemas)}
            return await self.play(engine, item, episode, episode.reward)


def tool_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool that a server describes by `name`, `description` and `input_schema`."""
    parameters = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}


def reward_in(answer: Mapping[str, Any], name: str) -> float:
    """Return the reward in a server's answer; 0 if it has none."""
    value = answer.get("reward")
    if (number := as_number(0.0 if value is None else value)) is None:
        raise EnvironmentInvalid(f"{name} answered the reward {value!r:.100}; expected a finite number")
    return number


def task_index(data: Mapping[str, Any], expected: str) -> int:
    """Return the number of the item's task: `task`, or else `seed`."""
    index = data.get("task", data.get("seed"))
    if type(index) is not int or index < 0:
        raise DataError(f"the item has the keys {sorted(data)} and task={index!r}: expected task, {expected}")
    return index


def last_user_message(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages with a text after the last one, which is a user's."""
    last = messages[-1]
    if last.get("role") != "user" or not isinstance(last.get("content"), str):
        raise ConfigError(f"the prompt ends with {last!r:.100}: expected a message of a user, after which reset() adds")
    return [*messages[:-1], {**last, "content": last["content"] + text}]
