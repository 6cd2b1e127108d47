"""Run tools: Python functions that a model may call, with a time-out. Failures become texts."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from rlite.errors import ConfigError
from rlite.rollout.tools.formats import ToolCall
from rlite.rollout.tools.results import read_text, result_text
from rlite.rollout.tools.state import EpisodeState, takes_state, without_state
from rlite.runtime.event_loop import converted
from rlite.runtime.sandbox.calls import SANDBOX_ERRORS, SandboxError, SandboxTimeout
from rlite.runtime.sandbox.function import SandboxFunction


@dataclass(frozen=True)
class Tool:
    """A function with its JSON schema for the chat template.

    A synchronous function runs in a process that can be killed, as rewards do, and keeps nothing between two calls. An
    asynchronous function runs in the event loop. A function whose first parameter is `state` or `self` gets the state
    of the episode there, and runs in a thread of the episode; see `rlite.rollout.tools.state`.
    """

    schema: Mapping[str, Any]
    """{"type": "function", "function": {"name", "description", "parameters"}}"""
    function: Callable[..., Any]

    @classmethod
    def of(cls, tool: Any) -> Tool:
        """Return the tool for a Tool, a function, or {"schema": ..., "call": function}.

        Args:
            tool: the tool. A function's schema comes from its type hints and its docstring in Google style.

        Raises:
            ConfigError: the argument is not a tool, or no schema can be derived from the function.
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
            return cls(get_json_schema(without_state(tool) if takes_state(tool) else tool), tool)
        except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
            raise ConfigError(
                f"the tool {getattr(tool, '__name__', tool)!r} has no schema: {error}; give its parameters type hints "
                "and a docstring with `Args:`, or give {'schema': ..., 'call': function}"
            ) from error

    @property
    def needs_state(self) -> bool:
        """True if the function gets the state of the episode."""
        return takes_state(self.function)

    @property
    def name(self) -> str:
        """Name by which a call refers to the tool."""
        return self.schema["function"]["name"]


class ToolResult(NamedTuple):
    """The result of a call, in the form that the model reads."""

    text: str
    is_error: bool = False


class Toolbox:
    """The tools of one workflow, called by name.

    `timeout`: seconds for one call.
    """

    is_done = has_state = False
    """a call of a tool ends no episode, and changes nothing that a reward reads"""

    def __init__(
        self, tools: Iterable[Any], timeout: float = 30.0, env_vars: Sequence[str] = (), has_state: bool = False
    ) -> None:
        found = [Tool.of(tool) for tool in tools]
        if not has_state and (needing := [tool.name for tool in found if tool.needs_state]):
            told = f"the first parameter of {', '.join(needing)} is the state of the episode"
            raise ConfigError(f"tools: {told}; give ToolUseWorkflow a state=, or rename the parameter")
        self.names = [tool.name for tool in found]
        self.schemas = [tool.schema for tool in found]
        """schemas for the chat template"""
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice or not found:
            raise ConfigError(f"tools: {', '.join(twice)} more than once" if twice else "tools: expected at least one")
        self._call = {tool.name: _runner(tool, timeout, env_vars) for tool in found if not tool.needs_state}
        self._stateful = {tool.name: tool.function for tool in found if tool.needs_state}

    async def call(self, call: ToolCall, state: EpisodeState | None = None) -> ToolResult:
        """Return the result of a tool call. A failure is also a result, so the model may try again."""
        if call.name not in self.names:
            return ToolResult(f"Error: there is no tool {call.name}; there are: {', '.join(self.names)}", is_error=True)
        try:
            if call.name in self._stateful:
                assert state is not None
                return ToolResult(await state.use(self._stateful[call.name], call.arguments))
            return ToolResult(await self._call[call.name](call.arguments))
        except SandboxTimeout:
            return ToolResult(f"Error: {call.name} took too long", is_error=True)
        except SandboxError as error:
            first = str(error).partition("\n")[0]  # below is the traceback
            what = first.partition(" raised ")[2] or first
            return ToolResult(f"Error: {what}", is_error=True)


def _runner(tool: Tool, timeout: float, env_vars: Sequence[str]) -> Callable[[Mapping[str, Any]], Awaitable[str]]:
    """Return a function of the tool's arguments that returns a text, and raises SandboxError on failure."""
    what = f"the tool {tool.name}"
    if inspect.iscoroutinefunction(tool.function):

        async def text_of(arguments: Mapping[str, Any]) -> str:
            return result_text(await tool.function(**arguments))

        return lambda arguments: converted(text_of(arguments), timeout, what, SANDBOX_ERRORS)
    function = SandboxFunction(tool.function, timeout, what=what, env_vars=env_vars, finish=result_text)
    return lambda arguments: function.ask(read_text, **arguments)
