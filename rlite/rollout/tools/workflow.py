"""Workflows whose model calls tools, in the format of calls that its chat template writes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, Unpack

from tensordict import TensorDict
from transformers.utils import get_json_schema

from rlite.data.chat.forms import Message
from rlite.data.chat.stops import without_end
from rlite.data.chat.template import ChatTemplate, TemplateRefusal, Tokenizer, has_chat_template
from rlite.data.prompts import raw_tokens
from rlite.data.rows import PROMPT_KEYS
from rlite.errors import ConfigError, DataError, did_you_mean
from rlite.rollout.conversation import Conversation, ConversationOptions, ConversationWorkflow
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.rewards.weighted import as_reward_function
from rlite.rollout.tools import formats
from rlite.rollout.tools.response_template import template_format
from rlite.rollout.tools.state import EpisodeState, MakeState, episode_state
from rlite.rollout.tools.toolbox import Toolbox, ToolResult
from rlite.rollout.workflow import reward_arguments
from rlite.types import AsyncInference, GenerationHyperparameters, LLMResponse


def find_probe_record(text: str, count: int) -> None:
    """Find a record.

    Args:
        text: what to find
        count: how many
    """


PROBE = formats.ToolCall(find_probe_record.__name__, {"text": "red apple", "count": 3})
TOOL = get_json_schema(find_probe_record)


def tool_call_format(
    form: str | formats.ToolCallFormat | None, tokenizer: Any, chat_template_options: Mapping[str, Any] | None = None
) -> formats.ToolCallFormat:
    """Return the format in which calls are read.

    `form`: a ToolCallFormat, which is taken as it is; the name of one; or None for the format that the tokenizer's
    response template or chat template has. For a template that writes no calls, the format is hermes.
    """
    if isinstance(form, formats.ToolCallFormat):
        return form
    if form is not None and (not isinstance(form, str) or form not in formats.FORMATS):
        raise ConfigError(f"tool call format {form!r}: {did_you_mean(str(form), formats.FORMATS)}")
    prompt, written = _write_probe(tokenizer, chat_template_options or {})
    if form is not None:
        candidates = [formats.FORMATS[form]]
    elif getattr(tokenizer, "response_template", None) is not None:
        candidates = [template_format(tokenizer, prompt)]
    else:
        candidates = list(formats.FORMATS.values())
    for candidate in candidates:
        if not written or _reads(candidate, tokenizer, written):
            return candidate
    names, known = ", ".join(candidate.name for candidate in candidates), ", ".join(formats.FORMATS)
    raise ConfigError(
        f"the model's chat template writes a call of a tool as {tokenizer.decode(written)!r}, which cannot be read "
        f"back (tried: {names}): give tool_format=, a name ({known}) or a ToolCallFormat of your own"
    )


def _write_probe(tokenizer: Any, options: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Return a prompt and the tokens of an answer that calls a tool; no tokens if the template writes no calls."""
    if not has_chat_template(tokenizer):
        return "", []
    template = ChatTemplate(tokenizer, {**options, "tools": [TOOL]})
    answer = {"role": "assistant", "content": "", "tool_calls": formats.numbered([PROBE], itertools.count(1))}
    try:
        prompt, written = template.written(answer)
    except TemplateRefusal:
        return "", []
    if template.ending is not None:  # the end of an answer need not be a special token
        written = written.removesuffix(template.ending.tail).removesuffix(template.ending.closing)
    return prompt, raw_tokens(tokenizer, [written])[0] if PROBE.name in written else []


def _reads(form: formats.ToolCallFormat, tokenizer: Any, written: list[int]) -> bool:
    """Return whether the format finds the probe in the template's tokens, decoded like an answer of the model."""
    text = form.text(tokenizer, without_end(tokenizer, written))
    return formats.typed(form.parse(text)[1], [TOOL]) == [PROBE]


class Tools(Protocol):
    """The tools of one episode."""

    is_done: bool
    """a call has ended the episode: the model is not asked again"""
    has_state: bool
    """calls change what the reward reads, so that calls of the last turn are made, too"""

    @property
    def names(self) -> Sequence[str]:
        """Names by which calls refer to the tools."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas for the chat template."""

    async def call(self, call: formats.ToolCall) -> ToolResult:
        """Return the result of a call. A failure is also a result."""


class ToolCallingWorkflow(ConversationWorkflow):
    """Base of workflows whose model calls tools.

    Args:
        gconfig: see `PromptWorkflow`.
        tokenizer: the model's tokenizer, with a chat template that shows tools.
        max_turns: see `ConversationWorkflow`.
        max_length: see `ConversationWorkflow`.
        tool_format: a name in `rlite.rollout.tools.formats.FORMATS`, or a ToolCallFormat; default: the format that
            the chat template teaches.
        **options: see `ConversationOptions`.

    Raises:
        ConfigError: an option is out of range, or the calls of the chat template cannot be read.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters | Mapping[str, Any],
        tokenizer: Tokenizer,
        max_turns: int,
        max_length: int | None,
        tool_format: str | formats.ToolCallFormat | None = None,
        **options: Unpack[ConversationOptions],
    ) -> None:
        super().__init__(gconfig, tokenizer, max_turns, max_length, **options)
        template_options = {**(options.get("chat_template_options") or {})}
        template_options.pop("tools", None)
        self.tool_format = tool_call_format(tool_format, tokenizer, template_options)

    async def play(
        self, engine: AsyncInference, data: Mapping[str, Any], tools: Tools, reward_fn: Callable[..., Awaitable[float]]
    ) -> TensorDict:
        """Return the trajectory of an episode: ask and call tools until the model calls none, or a call ends it.

        Args:
            engine: generates the model's turns.
            data: the item, with messages; its `tools` are shown unless the workflow's template options have tools.
            tools: answer the calls.
            reward_fn: called once at the end, as `ToolUseWorkflow` describes it.
        """
        conversation = self.begin(data)
        self._check_shown(conversation, tools.names)
        num_calls = num_errors = 0
        answer: Message = {}
        first: LLMResponse | None = None
        numbers = itertools.count(1)
        while (response := await conversation.ask(engine, self.gconfig)) is not None:
            first, last = first or response, response
            text = self.tool_format.text(self.tokenizer, conversation.said)
            content, found, malformed = await self.tool_format.read(text, conversation.text)
            calls = formats.typed(found, tools.schemas)
            answer = {"role": "assistant", "content": content if calls else conversation.answer}
            is_last = conversation.transcript.num_turns == self.max_turns
            if not (calls or malformed) or (is_last and not tools.has_state):
                break
            asked = formats.numbered(calls, numbers)
            answer = {**answer, "tool_calls": asked} if calls else answer
            results = await asyncio.gather(*(tools.call(call) for call in calls))
            num_calls += len(calls) + len(malformed)
            num_errors += sum(result.is_error for result in results) + len(malformed)
            if tools.is_done or is_last:
                break
            said = [
                {"role": "tool", "name": call.name, "tool_call_id": entry["id"], "content": result.text}
                for call, entry, result in zip(calls, asked, results, strict=True)
            ]
            conversation.reply(*said, *self._refusal(malformed, numbers if calls else None), answer=answer)
        assert first is not None  # the first turn has room, or the prompt is refused
        prompt, written = first.input_tokens, last.output_tokens
        arguments = reward_arguments(data, conversation.prompt, answer["content"], prompt, written)
        arguments["conversation"] = [*conversation.messages, *([answer] if conversation.is_answered else [])]
        reward = await reward_fn(**arguments)
        is_limited = is_last and bool(calls or malformed) and not tools.is_done
        values = {"num_tool_calls": num_calls, "num_tool_errors": num_errors, "turn_limited": is_limited}
        return conversation.transcript.trajectory(reward, **values)

    def _refusal(self, malformed: Sequence[str], numbers: Iterator[int] | None) -> list[Message]:
        """Return the result of calls that cannot be read, numbered if other calls of the turn have results."""
        if not malformed:
            return []
        told = "; ".join(f"{text.strip():.200}" for text in malformed)
        content = f"Error: this is no {self.tool_format.name} call of a tool, and was not made: {told}"
        if numbers is None:  # some templates refuse a result where nothing was called
            return [{"role": "user", "content": content}]
        [unknown] = formats.numbered([formats.ToolCall("unknown", {})], numbers)
        return [{"role": "tool", "name": "unknown", "tool_call_id": unknown["id"], "content": content}]

    def _check_shown(self, conversation: Conversation, names: Sequence[str]) -> None:
        if not conversation.is_chat:
            raise DataError("tools are shown by the chat template: expected an item with messages, found a raw prompt")
        hidden = [name for name in names if name not in conversation.prompt]
        if hidden:
            raise ConfigError(f"the model's chat template does not show the tools {', '.join(hidden)}")


class ToolUseWorkflow(ToolCallingWorkflow):
    """Turns in which the model calls tools, until it calls none or `max_turns` are over; then a reward.

    The item holds `messages`, or such a `prompt`. The chat template renders the tools and their results, as messages of
    the role tool. The calls of one turn run concurrently. A failed call returns an error result, which the model reads:
    an unknown name, an exception or a time-out. Generated tokens are never tokenised again.

    The reward function is called once, with the item, `completions` (the last turn's text), `completion_ids` (its
    tokens), `prompt` and `prompt_ids` (of the first turn), and `conversation`, all messages from the first to the last.

    The trajectory has the keys of `trajectory()`, all turns in one sequence (see `Conversation` for
    history="template"), and `sequence_index`, `num_turns`, `num_tool_calls`, `num_tool_errors` and
    `turn_limited` [k] (1 if `max_turns` ended the episode).

    Args:
        tools: functions with type hints and a docstring with `Args:`, or {"schema": ..., "call": function}. See `Tool`
            for where they run.
        reward_fn: a RewardFunction, or a function to make one from.
        gconfig: see `PromptWorkflow`.
        tokenizer: the model's tokenizer, with a chat template that shows tools.
        max_turns: see `ConversationWorkflow`.
        tool_timeout: seconds for one call.
        tool_format: a name in `rlite.rollout.tools.formats.FORMATS`, or a ToolCallFormat; default: the format that
            the chat template teaches.
        max_length: see `ConversationWorkflow`.
        tool_env_vars: names of environment variables that the processes of tools get as well (see RewardFunction).
        state: makes the state of an episode from a copy of its row: a class, or a function that may be async. Tools get
            it as their first parameter, `state` or `self`. Its methods are optional: `prompt()` returns the first
            messages or text of the user, so that a row needs no prompt; `report()` a dict of plain values that the
            reward receives as further arguments; `close()` ends it, also after a failure. `tool_timeout` holds for each
            call.
        **options: see `ConversationOptions`.

    Raises:
        ConfigError: an option is out of range, a tool is invalid, or the calls of the chat template cannot be read.
    """

    def __init__(
        self,
        tools: Iterable[Any],
        reward_fn: RewardFunction | Callable[..., Any],
        gconfig: GenerationHyperparameters | Mapping[str, Any],
        tokenizer: Tokenizer,
        max_turns: int = 8,
        tool_timeout: float = 30.0,
        tool_format: str | formats.ToolCallFormat | None = None,
        max_length: int | None = None,
        tool_env_vars: Sequence[str] = (),
        state: MakeState | None = None,
        **options: Unpack[ConversationOptions],
    ) -> None:
        self.toolbox = Toolbox(tools, tool_timeout, tool_env_vars, has_state=state is not None)
        self.make_state, self.tool_timeout = state, tool_timeout
        self.needs_prompt = not hasattr(state, "prompt")
        template_options = options.get("chat_template_options") or {}
        options["chat_template_options"] = {**template_options, "tools": self.toolbox.schemas}
        super().__init__(gconfig, tokenizer, max_turns, max_length, tool_format, **options)
        self.reward_fn = as_reward_function(reward_fn)

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict:
        """Return the trajectory of an episode: ask and call tools until the model calls none."""
        async with episode_state(self.make_state, data, self.tool_timeout) as state:
            if state is None:
                return await self.play(engine, data, self.toolbox, self.reward_fn)
            tools = _StatefulTools(self.toolbox, state)
            return await self.play(engine, await _with_prompt(data, state), tools, partial(self._reward, state))

    async def _reward(self, state: EpisodeState, **arguments: Any) -> float:
        return await self.reward_fn(**arguments, **await state.report())


class _StatefulTools:
    """The tools of one episode, which share its state."""

    is_done, has_state = False, True

    def __init__(self, toolbox: Toolbox, state: EpisodeState) -> None:
        self.names, self.schemas = toolbox.names, toolbox.schemas
        self.call = partial(toolbox.call, state=state)


async def _with_prompt(data: dict[str, Any], state: EpisodeState) -> dict[str, Any]:
    """Return an item whose prompt is that of the state, if it has one."""
    prompt = await state.ask("prompt")
    if prompt is None:
        return data
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    others = {name: value for name, value in data.items() if name not in PROMPT_KEYS}
    return {**others, "messages": messages}
