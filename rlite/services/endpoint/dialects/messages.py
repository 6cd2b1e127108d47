"""Anthropic's Messages, and the count of a conversation's tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rlite.data.chat.forms import Message
from rlite.services.endpoint.dialects import bodies
from rlite.services.endpoint.dialects.blocks import Block, BlockEvent, block_events, blocks_of, marked
from rlite.services.endpoint.dialects.bodies import ABSENT, Expected, JsonObject, Parts, Text
from rlite.services.endpoint.exchange import Choice, Delta, Dialect, Exchange, Json, calls_of
from rlite.services.endpoint.recording import Turn
from rlite.services.endpoint.requests import UNSUPPORTED, ApiError, ModelRequest, invalid, unsupported
from rlite.types import GenerationHyperparameters

NOTES = {"metadata", "thinking", "service_tier", "cache_control", "context_management", "speed", "inference_geo"}
OFF: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],)}
BLOCKS = "blocks of type 'text', 'thinking', 'tool_use' and 'tool_result', all their texts as text"
ROLES = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}
"""types of blocks that a message of each role may have"""
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""type of an error by its status"""


class _Thinking(JsonObject):
    type: Literal["thinking"] = ABSENT
    thinking: str = ABSENT
    signature: str = ""


class _ToolUse(JsonObject):
    type: Literal["tool_use"] = ABSENT
    id: str = ABSENT
    name: str = ABSENT
    input: dict[str, Any] = ABSENT


class _ToolResult(JsonObject):
    type: Literal["tool_result"] = ABSENT
    tool_use_id: str = ABSENT
    content: Parts = []


_Part = bodies.TextPart | _Thinking | _ToolUse | _ToolResult


class _Message(JsonObject):
    role: Annotated[Literal["user", "assistant", "system"], Expected("one of user, assistant, system")] = ABSENT
    content: Annotated[
        list[Annotated[_Part, Field(union_mode="left_to_right"), Expected(BLOCKS, UNSUPPORTED)]],
        Field(fail_fast=True),
        BeforeValidator(bodies.as_parts),
    ] = ABSENT

    def plain(self, at: str) -> Iterator[Message]:
        """Yield the message as templates take it: results of tools are messages of their own."""
        for number, part in enumerate(self.content):
            if part.type not in ROLES[self.role]:
                raise unsupported(f"{at}.content[{number}].type", part.type, f"{ROLES[self.role]} of {self.role}")
        texts = [part for part in self.content if isinstance(part, bodies.TextPart)]
        if self.role == "assistant":
            yield self._answer(texts)
            return
        results = [part for part in self.content if isinstance(part, _ToolResult)]
        for result in results:
            yield {"role": "tool", "content": bodies.text_of(result.content), "tool_call_id": result.tool_use_id}
        if texts or not results:
            yield {"role": self.role, "content": bodies.text_of(texts)}

    def _answer(self, texts: Sequence[bodies.TextPart]) -> Message:
        thoughts = [marked(part.thinking, part.signature) for part in self.content if isinstance(part, _Thinking)]
        calls = [bodies.called(part.id, part.name, part.input) for part in self.content if isinstance(part, _ToolUse)]
        message: Message = {"role": "assistant", "content": "".join(thoughts) + bodies.text_of(texts)}
        return {**message, "tool_calls": calls} if calls else message


class _Tool(bodies.Tool):
    type: Annotated[Literal["custom"], Expected("'custom'", UNSUPPORTED)] = "custom"
    input_schema: bodies.Schema = ABSENT


class _ToolChoice(JsonObject):
    type: Annotated[Literal["auto", "none"], Expected(bodies.TOOL_CHOICE, UNSUPPORTED)] = "auto"


class _OutputConfig(JsonObject):
    format: Annotated[None, Expected("nothing", UNSUPPORTED)] = None


class _Body(bodies.GenerationBody):
    off, notes = OFF, frozenset(NOTES)

    n: bodies.One = 1
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)] = ABSENT
    system: Parts = []
    tools: Annotated[list[_Tool], Field(fail_fast=True)] = []
    tool_choice: _ToolChoice = _ToolChoice()
    stop_sequences: Annotated[list[Text], Field(max_length=bodies.MAX_STOPS), Expected(bodies.STOPS)] = []
    output_config: _OutputConfig = _OutputConfig()


def read(body: Any, model: str, defaults: GenerationHyperparameters, is_generating: bool = True) -> ModelRequest:
    """Read a body of /v1/messages.

    `is_generating`: False counts the tokens of the prompt alone.
    """
    read = bodies.validated(_Body, body, model)
    if read.messages[-1].role == "assistant":
        raise invalid("messages", "the assistant's message at the end", "a message of the user at the end")
    stop, is_stream = read.stop_sequences or read.stop, read.stream and is_generating
    read = read.model_copy(update={"stop": stop, "stream": is_stream})
    system: list[Message] = [{"role": "system", "content": bodies.text_of(read.system)}] if read.system else []
    tools = bodies.functions(read.tools, body, "input_schema")
    return ModelRequest(
        messages=[*system, *(part for at, one in enumerate(read.messages) for part in one.plain(f"messages[{at}]"))],
        tools=tools or None,
        may_call=bool(tools) and read.tool_choice.type == "auto",
        is_generating=is_generating,
        **read.common(defaults),
    )


def whole(exchange: Exchange, choices: Sequence[Choice], scores: object = None) -> Json:
    """Return the response to a request that does not stream."""
    [choice] = choices
    content = [_whole_block(block) for block in blocks_of(exchange, choice)]
    return _message(exchange, content, len(choice.turn.output_ids), _end(exchange, choice.turn))


async def stream(exchange: Exchange, events: AsyncIterator[Delta | Choice]) -> AsyncGenerator[Json, None]:
    """Yield the events of the response to a request that streams."""
    async for event in block_events(exchange, events):
        if event is None:
            empty = {"stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": _message(exchange, [], 0, empty)}
        elif isinstance(event, BlockEvent):
            for message in _block_messages(event):
                yield message
        else:
            usage = {"input_tokens": exchange.num_prompt_tokens, "output_tokens": len(event.turn.output_ids)}
            yield {"type": "message_delta", "delta": _end(exchange, event.turn), "usage": usage}
            exchange.delivered.append(event.turn)
            yield {"type": "message_stop"}


def _message(exchange: Exchange, content: list[Json], num_output: int, end: Json) -> Json:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    usage = {"input_tokens": exchange.num_prompt_tokens, "output_tokens": num_output, **cached}
    about = {"id": exchange.id, "type": "message", "role": "assistant", "model": exchange.model}
    return {**about, "content": content, **end, "usage": usage}


def _end(exchange: Exchange, turn: Turn) -> Json:
    """Return why an answer ends."""
    stop = next((stop for stop in exchange.request.gconfig.stop if turn.stop_text.startswith(stop)), None)
    reason = "max_tokens" if turn.finish_reason == "length" else "stop_sequence" if stop else "end_turn"
    return {"stop_reason": "tool_use" if calls_of(turn) else reason, "stop_sequence": stop}


def _whole_block(block: Block) -> Json:
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": block.marks}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": json.loads(block.text)}


EMPTY: dict[str, Json] = {"thought": {"thinking": "", "signature": ""}, "text": {"text": ""}, "call": {"input": {}}}
"""parts of a block at its beginning"""
DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""type of a delta and the key of its text"""


def _block_messages(event: BlockEvent) -> Iterator[Json]:
    block = event.block
    if event.kind == "begin":
        empty = {
            **_whole_block(Block(block.kind, 0, "{}", call_id=block.call_id, name=block.name)),
            **EMPTY[block.kind],
        }
        yield {"type": "content_block_start", "index": block.index, "content_block": empty}
        return
    delta = {"type": "content_block_delta", "index": block.index}
    if event.kind == "text":
        kind, key = DELTAS[block.kind]
        yield {**delta, "delta": {"type": kind, key: event.text}}
        return
    if block.kind == "thought":
        yield {**delta, "delta": {"type": "signature_delta", "signature": block.marks}}
    yield {"type": "content_block_stop", "index": block.index}


def counted(exchange: Exchange, choices: object, scores: object = None) -> Json:
    """Return the number of tokens of a conversation."""
    return {"input_tokens": exchange.num_prompt_tokens}


def error_body(error: ApiError) -> Json:
    """Return an error in Anthropic's form."""
    kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.told}}


MESSAGES = Dialect(
    path="/v1/messages", prefix="msg_", read=read, whole=whole, stream=stream, error=error_body, has_named_events=True
)
_counting = partial(read, is_generating=False)
COUNT = replace(MESSAGES, path="/v1/messages/count_tokens", prefix="count_", read=_counting, whole=counted)
