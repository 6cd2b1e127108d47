"""Tool use: the model calls tools, reads their results, and answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

from tensordict import TensorDict

from rlite.data.chat.forms import Message
from rlite.data.chat.template import Tokenizer
from rlite.errors import ConfigError, DataError
from rlite.rollout.conversation import Conversation, ConversationOptions, ConversationWorkflow
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.rewards.weighted import as_reward_function
from rlite.rollout.tools.formats import ToolCall, ToolCallFormat, numbered, typed
from rlite.rollout.tools.response_template import tool_call_format
from rlite.rollout.tools.toolbox import Toolbox
from rlite.rollout.workflow import reward_arguments
from rlite.types import AsyncInference, GenerationHyperparameters, LLMResponse


class ToolUseWorkflow(ConversationWorkflow):
    """Turns in which the model calls tools, until it calls none or `max_turns` are over; then a reward.

    The item holds `messages`, or such a `prompt`. The chat template renders the tools and their results, as messages of
    the role tool. The calls of one turn run concurrently. A failed call returns an error result, which the model reads:
    an unknown name, an exception or a time-out. Generated tokens are never tokenised again.

    The reward function is called once, with the item, `completions` (the last turn's text), `completion_ids` (its
    tokens), `prompt` and `prompt_ids` (of the first turn), and `conversation`, all messages from the first to the last.

    The trajectory has the keys of `trajectory()`, all turns in one sequence (see `Conversation` for
    history="template"), and `sequence_index`, `num_turns`, `num_tool_calls` and `num_tool_errors` [k].

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
        tool_format: str | ToolCallFormat | None = None,
        max_length: int | None = None,
        tool_env_vars: Sequence[str] = (),
        **options: Unpack[ConversationOptions],
    ) -> None:
        self.toolbox = Toolbox(tools, tool_timeout, tool_env_vars)
        template_options = options.get("chat_template_options") or {}
        options["chat_template_options"] = {**template_options, "tools": self.toolbox.schemas}
        super().__init__(gconfig, tokenizer, max_turns, max_length, **options)
        self.reward_fn = as_reward_function(reward_fn)
        self.tool_format = tool_call_format(tool_format, tokenizer, template_options)

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict:
        """Return the trajectory of an episode: ask and call tools until the model calls none."""
        conversation = self.begin(data)
        self._check_shown(conversation)
        num_calls = num_errors = 0
        answer: Message = {}
        first: LLMResponse | None = None
        numbers = itertools.count(1)
        while (response := await conversation.ask(engine, self.gconfig)) is not None:
            first, last = first or response, response
            text = self.tool_format.text(self.tokenizer, conversation.said)
            content, found, malformed = await self.tool_format.read(text, conversation.text)
            calls = typed(found, self.toolbox.schemas)
            answer = {"role": "assistant", "content": content if calls else conversation.answer}
            if not (calls or malformed) or conversation.transcript.num_turns == self.max_turns:
                break
            asked = numbered(calls, numbers)
            answer = {**answer, "tool_calls": asked} if calls else answer
            results = await asyncio.gather(*(self.toolbox.call(call) for call in calls))
            num_calls += len(calls) + len(malformed)
            num_errors += sum(result.is_error for result in results) + len(malformed)
            said = [
                {"role": "tool", "name": call.name, "tool_call_id": entry["id"], "content": result.text}
                for call, entry, result in zip(calls, asked, results, strict=True)
            ]
            number = numbered([ToolCall("unknown", {})], numbers)[0]["id"] if calls and malformed else None
            conversation.reply(*said, *self._refusal(malformed, number), answer=answer)
        assert first is not None  # the first turn has room, or the prompt is refused
        prompt, written = first.input_tokens, last.output_tokens
        arguments = reward_arguments(data, conversation.prompt, answer["content"], prompt, written)
        arguments["conversation"] = [*conversation.messages, *([answer] if conversation.is_answered else [])]
        reward = await self.reward_fn(**arguments)
        return conversation.transcript.trajectory(reward, num_tool_calls=num_calls, num_tool_errors=num_errors)

    def _refusal(self, malformed: Sequence[str], number: str | None) -> list[Message]:
        """Return the result of calls that cannot be read, with a number if other calls of the turn have results."""
        if not malformed:
            return []
        told = "; ".join(f"{text.strip():.200}" for text in malformed)
        content = f"Error: this is no {self.tool_format.name} call of a tool, and was not made: {told}"
        if number is None:  # some templates refuse a result where nothing was called
            return [{"role": "user", "content": content}]
        return [{"role": "tool", "name": "unknown", "tool_call_id": number, "content": content}]

    def _check_shown(self, conversation: Conversation) -> None:
        if not conversation.is_chat:
            raise DataError("tools are shown by the chat template: expected an item with messages, found a raw prompt")
        hidden = [name for name in self.toolbox.names if name not in conversation.prompt]
        if hidden:
            raise ConfigError(f"the model's chat template does not show the tools {', '.join(hidden)}")
