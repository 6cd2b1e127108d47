"""Tools: Python functions that a model may call, with a time-out, their failures in words."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from rlite.errors import ConfigError
from rlite.rollout.rewards.function import RewardError, RewardFunction, RewardTimeout, limited
from rlite.rollout.tools.formats import ToolCall
from rlite.sandbox.child import Passed

MAX_LENGTH = 8192
"""characters of a result; the rest is left out, and that is said"""


@dataclass(frozen=True)
class Tool:
    """A function with its JSON schema, as a chat template shows it.

    A synchronous function runs in a process that can be killed, as rewards do, and keeps nothing between two calls; an
    asynchronous one in the event loop.
    """

    schema: Mapping[str, Any]
    """{"type": "function", "function": {"name", "description", "parameters"}}"""
    function: Callable[..., Any]

    @classmethod
    def of(cls, tool: Any) -> Tool:
        """From a Tool, a function, or {"schema": ..., "call": function}.

        The schema of a function is that of its type hints and its docstring in Google's style. Raises: ConfigError.
        """
        if isinstance(tool, Tool):
            return tool
        if isinstance(tool, Mapping):
            schema, function = tool.get("schema"), tool.get("call")
            if not callable(function) or not isinstance(schema, Mapping):
                raise ConfigError(f"a tool has the keys {sorted(tool)}; expected schema (a JSON schema) and call")
            schema = schema if "function" in schema else {"type": "function", "function": schema}
            if not isinstance(schema["function"], Mapping) or not isinstance(schema["function"].get("name"), str):
                raise ConfigError(f"the schema of a tool is {schema}; expected name, description and parameters")
            return cls(schema, function)
        if not callable(tool):
            raise ConfigError(f"a tool is {tool!r}; expected a function, or {{'schema': ..., 'call': function}}")
        try:
            return cls(get_json_schema(tool), tool)
        except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
            raise ConfigError(
                f"the tool {getattr(tool, '__name__', tool)!r} has no schema: {error}; give its parameters type hints "
                "and a docstring with `Args:`, or give {'schema': ..., 'call': function}"
            ) from error

    @property
    def name(self) -> str:
        """What a call names it by."""
        return self.schema["function"]["name"]


@dataclass(frozen=True)
class ToolResult:
    """What came of a call, in words for the model."""

    text: str
    is_error: bool = False


class Toolbox:
    """The tools of one workflow, called by name.

    Args:
        tools: as `Tool.of` takes them.
        timeout: seconds for one call.
        env_vars: names of environment variables that their processes get as well (see RewardFunction).

    Raises: ConfigError for a tool that is none, or a name that occurs twice.
    """

    def __init__(self, tools: Iterable[Any], timeout: float = 30.0, env_vars: Sequence[str] = ()) -> None:
        self._tools = [Tool.of(tool) for tool in tools]
        names = [tool.name for tool in self._tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not names:
            raise ConfigError(f"tools: {', '.join(twice)} more than once" if twice else "tools: expected at least one")
        self._call = {tool.name: _runner(tool, timeout, env_vars) for tool in self._tools}

    @property
    def names(self) -> list[str]:
        """Of the tools."""
        return list(self._call)

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """For the chat template."""
        return [tool.schema for tool in self._tools]

    async def call(self, call: ToolCall) -> ToolResult:
        """Call a tool. What goes wrong with it is a result, too: the model may try again."""
        if call.name not in self._call:
            return ToolResult(f"Error: there is no tool {call.name}; there are: {', '.join(self._call)}", is_error=True)
        try:
            text = await self._call[call.name](call.arguments)
        except RewardTimeout:
            return ToolResult(f"Error: {call.name} took too long", is_error=True)
        except RewardError as error:
            what, _, _ = str(error).partition("\n")  # below it is the traceback
            return ToolResult(f"Error: {what.removeprefix(f'the tool {call.name} raised ')}", is_error=True)
        return ToolResult(text)


Runner = Callable[[Mapping[str, Any]], Awaitable[str]]


def _runner(tool: Tool, timeout: float, env_vars: Sequence[str]) -> Runner:
    """The tool as a function of its arguments that returns a text, and raises RewardError."""
    if inspect.iscoroutinefunction(tool.function):
        return partial(_in_loop, tool, timeout)
    function = RewardFunction(_ToolFunction(tool.function), timeout, what=f"the tool {tool.name}", env_vars=env_vars)
    return partial(_in_reward_process, function)


async def _in_reward_process(function: RewardFunction, arguments: Mapping[str, Any]) -> str:
    return await function.ask(_read_text, arguments=dict(arguments))


def _read_text(answer: Any) -> str | None:
    """What a process has passed, unless it has not cut it."""
    return answer if isinstance(answer, str) and len(answer) < MAX_LENGTH + 100 else None


async def _in_loop(tool: Tool, timeout: float, arguments: Mapping[str, Any]) -> str:
    async with limited(f"the tool {tool.name}", timeout):
        return _cut(as_text(await tool.function(**arguments)))


@dataclass(frozen=True)
class _ToolFunction:
    """A tool as it is run in a reward process."""

    function: Callable[..., Any]

    def __call__(self, arguments: Mapping[str, Any]) -> Passed:
        text = as_text(self.function(**arguments))
        text.encode()  # half a character cannot be tokenised
        return Passed(_cut(text))


def as_text(value: Any) -> str:
    """A result as the model reads it: a text as it is, else JSON. Raises: TypeError for what JSON cannot hold."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    return f"{text[:MAX_LENGTH]} ... ({len(text) - MAX_LENGTH} characters left out)" if len(text) > MAX_LENGTH else text
