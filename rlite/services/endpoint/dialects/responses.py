"""OpenAI's Responses. The server keeps no conversation: a request holds all of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from rlite.data.chat.forms import Message
from rlite.services.endpoint.dialects import bodies
from rlite.services.endpoint.dialects.blocks import Block, BlockEvent, block_events, blocks_of, marked
from rlite.services.endpoint.dialects.bodies import ABSENT, Expected, Function, Integer, JsonObject, Parts
from rlite.services.endpoint.dialects.openai import error_body
from rlite.services.endpoint.exchange import Choice, Delta, Dialect, Exchange, Json
from rlite.services.endpoint.recording import Turn
from rlite.services.endpoint.requests import UNSUPPORTED, ModelRequest
from rlite.types import GenerationHyperparameters

OFF: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "modalities": (["text"],),
}
NOTES = {"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata", "service_tier"}
NOTES |= {"store", "reasoning", "parallel_tool_calls", "client_metadata"}
ITEMS = "items of type message, function_call, function_call_output and reasoning, all their contents text"
STATELESS = "nothing: the server keeps no conversation, so send all of it in `input`"
REPEATED = {"instructions", "temperature", "top_p", "max_output_tokens", "tools", "tool_choice", "metadata"}
REPEATED |= {"reasoning"}


class _MessageItem(JsonObject):
    role: Literal["user", "assistant", "system", "developer"] = ABSENT
    content: Parts = ABSENT


class _Call(JsonObject):
    call_id: str = ABSENT
    name: str = ABSENT
    arguments: str = ABSENT


class _Result(JsonObject):
    call_id: str = ABSENT
    output: Parts = ABSENT


class _ReasoningText(JsonObject):
    type: Literal["reasoning_text", "summary_text"] = ABSENT
    text: str = ABSENT


class _Reasoning(JsonObject):
    summary: list[_ReasoningText] = []
    content: list[_ReasoningText] = []
    encrypted_content: str | None = None


def _kind_of(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else None


_Item = Annotated[
    Annotated[_MessageItem, Tag("message")]
    | Annotated[_Call, Tag("function_call")]
    | Annotated[_Result, Tag("function_call_output")]
    | Annotated[_Reasoning, Tag("reasoning")],
    Discriminator(_kind_of),
    Expected(ITEMS, UNSUPPORTED),
]


class _Tool(bodies.Tool):
    type: Function = ABSENT
    parameters: bodies.Schema | None = None


class _Format(JsonObject):
    type: Annotated[Literal["text"], Expected("'text'", UNSUPPORTED)] = "text"


class _TextOptions(JsonObject):
    format: _Format = _Format()


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class _Body(bodies.GenerationBody):
    off, notes = OFF, frozenset(NOTES)

    n: bodies.One = 1
    input: Annotated[list[_Item], Field(min_length=1, fail_fast=True), BeforeValidator(_as_items)] = ABSENT
    instructions: bodies.Text | None = None
    max_output_tokens: Integer | None = None
    tools: Annotated[list[_Tool], Field(fail_fast=True)] = []
    tool_choice: Annotated[Literal["auto", "none"], Expected(bodies.TOOL_CHOICE, UNSUPPORTED)] = "auto"
    text: _TextOptions = _TextOptions()
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Expected("reasoning.encrypted_content")] = []
    previous_response_id: Annotated[None, Expected(STATELESS, UNSUPPORTED)] = None
    conversation: Annotated[None, Expected(STATELESS, UNSUPPORTED)] = None


def read(body: Any, model: str, defaults: GenerationHyperparameters) -> ModelRequest:
    """Read a body of /v1/responses."""
    read = bodies.validated(_Body, body, model)
    read = read.model_copy(update={"max_completion_tokens": read.max_output_tokens})
    system: list[Message] = [{"role": "system", "content": read.instructions}] if read.instructions else []
    tools = bodies.functions(read.tools, body, "parameters")
    return ModelRequest(
        messages=[*system, *_conversation(read.input)],
        tools=tools or None,
        may_call=bool(tools) and read.tool_choice == "auto",
        repeated={key: value for key in REPEATED if (value := body.get(key)) is not None},
        **read.common(defaults),
    )


def _conversation(items: Sequence[_MessageItem | _Call | _Result | _Reasoning]) -> Iterator[Message]:
    """Yield the messages of items. The items of one answer, thoughts, text and calls, are one message."""
    answer: Message | None = None
    is_thinking = False
    for item in items:
        if isinstance(item, _Result) or (isinstance(item, _MessageItem) and item.role != "assistant"):
            if answer is not None:
                yield answer
            answer = None
            if isinstance(item, _Result):
                yield {"role": "tool", "content": bodies.text_of(item.output), "tool_call_id": item.call_id}
            else:
                role = "system" if item.role == "developer" else item.role
                yield {"role": role, "content": bodies.text_of(item.content)}
            continue
        if answer is not None and not isinstance(item, _Call) and not is_thinking:
            yield answer
            answer = None
        answer = answer or {"role": "assistant", "content": ""}
        is_thinking = isinstance(item, _Reasoning)
        if isinstance(item, _Call):
            calls = [*answer.get("tool_calls", ()), bodies.called(item.call_id, item.name, item.arguments)]
            answer = {**answer, "tool_calls": calls}
        else:
            answer = {**answer, "content": answer["content"] + _text_of(item)}
    if answer is not None:
        yield answer


def _text_of(item: _MessageItem | _Reasoning) -> str:
    if isinstance(item, _MessageItem):
        return bodies.text_of(item.content)
    return marked("\n".join(part.text for part in item.content or item.summary), item.encrypted_content)


def whole(exchange: Exchange, choices: Sequence[Choice], scores: object = None) -> Json:
    """Return the response to a request that does not stream."""
    [choice] = choices
    return _response(exchange, blocks_of(exchange, choice), choice.turn)


async def stream(exchange: Exchange, events: AsyncIterator[Delta | Choice]) -> AsyncGenerator[Json, None]:
    """Yield the events of the response to a request that streams."""
    blocks: list[Block] = []
    numbers = count()
    async for event in block_events(exchange, events):
        if event is None:
            begun = _response(exchange, [], None)
            messages: list[Json] = [
                {"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")
            ]
        elif isinstance(event, BlockEvent):
            if event.kind == "begin":
                blocks.append(event.block)
            messages = list(_block_messages(exchange, event))
        else:
            response = _response(exchange, blocks, event.turn)
            exchange.delivered.append(event.turn)
            messages = [{"type": f"response.{response['status']}", "response": response}]
        for message in messages:
            yield {**message, "sequence_number": next(numbers)}


def _response(exchange: Exchange, blocks: Sequence[Block], turn: Turn | None) -> Json:
    """Return a response object, of a turn that has ended or of one that begins."""
    status = "in_progress" if turn is None else "incomplete" if turn.finish_reason == "length" else "completed"
    num_input, num_output = exchange.num_prompt_tokens, 0 if turn is None else len(turn.output_ids)
    usage = {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input + num_output,
    }
    return {
        "id": exchange.id,
        "object": "response",
        "created_at": exchange.created,
        "model": exchange.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "text": {"format": {"type": "text"}},
        **exchange.request.repeated,
        "output": [_item(exchange, block, status) for block in blocks],
        "usage": None if turn is None else usage,
    }


def _item(exchange: Exchange, block: Block, status: str) -> Json:
    """Return a block as an item of the output."""
    suffix = f"{exchange.id.removeprefix('resp_')}_{block.index}"
    if block.kind == "call":
        about = {"id": f"fc_{suffix}", "type": "function_call", "status": status}
        return {**about, "call_id": block.call_id, "name": block.name, "arguments": block.text}
    if block.kind == "thought":
        content = [{"type": "reasoning_text", "text": block.text}] if block.text else []
        about = {"id": f"rs_{suffix}", "type": "reasoning", "status": status}
        return {**about, "summary": [], "content": content, "encrypted_content": block.marks or None}
    about = {"id": f"msg_{suffix}", "type": "message", "status": status, "role": "assistant"}
    return {**about, "content": [_text_part(block.text)] if block.text else []}


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


EVENTS = {
    "text": ("response.output_text", "text"),
    "thought": ("response.reasoning_text", "text"),
    "call": ("response.function_call_arguments", "arguments"),
}
"""beginning of the names of a block's events, and the key of its whole text"""


def _block_messages(exchange: Exchange, event: BlockEvent) -> Iterator[Json]:
    block = event.block
    status = "completed" if event.kind == "end" else "in_progress"
    item = _item(exchange, block, status)
    name, key = EVENTS[block.kind]
    outer = {"output_index": block.index, "item_id": item["id"]}
    place = outer if block.kind == "call" else {**outer, "content_index": 0}
    extra: Json = {"logprobs": []} if block.kind == "text" else {}
    if event.kind == "begin":
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind == "text":
            yield {"type": "response.content_part.added", **place, "part": _text_part("")}
    elif event.kind == "text":
        yield {"type": f"{name}.delta", **place, "delta": event.text, **extra}
    else:
        called = {"name": block.name} if block.kind == "call" else {}
        yield {"type": f"{name}.done", **place, key: block.text, **extra, **called}
        if block.kind == "text":
            yield {"type": "response.content_part.done", **place, "part": _text_part(block.text)}
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}


RESPONSES = Dialect(
    path="/v1/responses", prefix="resp_", read=read, whole=whole, stream=stream, error=error_body, has_named_events=True
)
