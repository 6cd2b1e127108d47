"""Exchange of a request and its reply, independent of the dialect in which both are written."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from rlite.data.chat.forms import Message
from rlite.data.chat.template import Tokenizer
from rlite.rollout.tools.formats import ToolCall, numbered
from rlite.runtime.event_loop import SHORT_TEXT, beside_loop
from rlite.services.endpoint.prompts import Prompt
from rlite.services.endpoint.recording import Turn
from rlite.services.endpoint.requests import ApiError, ModelRequest, unexpected
from rlite.types import GenerationHyperparameters, PromptLogprobs, TokenChunk

logger = logging.getLogger(__name__)
Json = dict[str, Any]
SHOWN_CHARACTERS = 100
"""approximate number of characters of a token and its log-probabilities in a response"""


@dataclass(frozen=True)
class Delta:
    """New part of one choice: settled text (it may be empty), and the tokens that arrived."""

    index: int
    text: str
    chunk: TokenChunk


@dataclass(frozen=True)
class Choice:
    """Complete choice. `rest` is the end of its content that no delta has."""

    index: int
    turn: Turn
    content: str
    rest: str


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A request under way, with the fields that all parts of its response share."""

    request: ModelRequest
    prompts: Sequence[Prompt]
    model: str
    tokenizer: Tokenizer
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    turns: list[Turn] = field(default_factory=list)
    """turns of the choices that have begun"""
    delivered: list[Turn] = field(default_factory=list)
    """turns whose last chunk of a stream was handed over"""

    @property
    def num_choices(self) -> int:
        """Number of choices of all prompts."""
        return self.request.num_choices * len(self.prompts)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of a choice."""
        return self.prompts[index // self.request.num_choices]

    def echoed(self, index: int) -> str:
        """Return the text of a choice's prompt if the request wants it before the answer."""
        prompt = self.prompt(index)
        return (prompt.text or self.tokenizer.decode(prompt.token_ids)) if self.request.is_echo else ""

    @cached_property
    def token_text(self) -> Callable[[int], str]:
        """The text of a token. Each token is decoded once."""
        decode = self.tokenizer.decode  # without `self`, which would be a cycle that outlives the request
        return cache(lambda token: decode([token]))

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts. A prompt that several choices share counts once."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens that the choices have so far."""
        return sum(len(turn.output_ids) for turn in self.turns)

    @property
    def usage(self) -> dict[str, int]:
        """Counts of tokens, in OpenAI's words."""
        num_prompt, num_output = self.num_prompt_tokens, self.num_output_tokens
        return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}

    @property
    def num_shown(self) -> int:
        """Approximate number of characters that token by token stand in the whole response."""
        is_shown = self.request.has_logprobs or self.request.returns_token_ids
        return (
            SHOWN_CHARACTERS * (self.num_prompt_tokens * self.request.num_choices + self.num_output_tokens) * is_shown
        )


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """An interface in which clients write requests and read responses: pure functions of JSON values."""

    path: str
    """route of its requests"""
    prefix: str
    """beginning of the ids of its responses"""
    read: Callable[[Any, str, GenerationHyperparameters], ModelRequest]
    """body, name of the model, sampling parameters that the body does not set -> the request, or an ApiError"""
    whole: Callable[[Exchange, Sequence[Choice], Sequence[PromptLogprobs] | None], Json]
    """exchange, all choices by index, log-probabilities if the request needs them -> the response"""
    stream: Callable[[Exchange, AsyncIterator[Delta | Choice]], AsyncGenerator[Json, None]]
    """exchange, parts of the choices as they arrive -> the messages of a stream"""
    error: Callable[[ApiError], Json]
    """error -> the body of its response"""
    has_named_events: bool = False
    """events of a stream have the name of their type, and none is `[DONE]`"""

    def event(self, message: Json) -> bytes:
        """Return a message of a stream as a server-sent event."""
        name = f"event: {message['type']}\n" if self.has_named_events else ""
        return f"{name}data: {json.dumps(message)}\n\n".encode()

    def failure(self, error: ApiError) -> bytes:
        """Return the event of a stream that fails."""
        return self.event({**self.error(error), "type": "error"} if self.has_named_events else self.error(error))

    @property
    def end(self) -> bytes:
        """The bytes after the last event of a stream."""
        return b"" if self.has_named_events else b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Reply:
    """Answer to a request: one object, or for a stream one after the other.

    Read `messages` to its end once the client has everything. Leaving it earlier ends the generation, and its turns
    count as aborted, unless it is a stream that has handed over the last chunk of each choice.
    """

    dialect: Dialect
    exchange: Exchange
    messages: AsyncGenerator[Json, None]

    @property
    def is_stream(self) -> bool:
        """True for server-sent events."""
        return self.exchange.request.is_stream

    @property
    def delivered(self) -> list[Turn]:
        """Turns whose last chunk was handed over; emptied where that does not mean that the client has it."""
        return self.exchange.delivered

    @property
    def content_type(self) -> str:
        """Media type of the encoded reply."""
        return "text/event-stream" if self.is_stream else "application/json"

    async def encoded(self) -> AsyncGenerator[bytes, None]:
        """Yield the body of the response: one JSON object, or server-sent events. The reply is closed at the end."""
        is_begun = False
        async with contextlib.aclosing(self.messages):
            try:
                async for message in self.messages:
                    is_begun = True
                    if self.is_stream:
                        yield self.dialect.event(message)
                    else:
                        size = self.exchange.num_shown
                        encode = _encoded_slowly if size > SHORT_TEXT else _encoded
                        yield await beside_loop(size, encode, message)
            except Exception as error:
                if not (is_begun and self.is_stream):
                    raise
                if not isinstance(error, ApiError):
                    log_failure("an answer failed in the middle of its stream", error)
                    error = unexpected(error)
                yield self.dialect.failure(error)
            else:
                if self.is_stream and self.dialect.end:
                    yield self.dialect.end


def log_failure(what: str, error: BaseException) -> None:
    """Log the traceback of a request that failed. The exception's text, which may hold a prompt, is left out."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: %s, at\n%s", what, type(error).__name__, frames)


def assistant_message(content: str, calls: Sequence[ToolCall], numbers: Iterator[int]) -> Message:
    """Return the assistant's message. Later requests are compared with it."""
    message = {"role": "assistant", "content": content}
    return {**message, "tool_calls": numbered(calls, numbers)} if calls else message


def calls_of(turn: Turn) -> list[dict[str, Any]]:
    """Return the calls of an answer with their arguments as JSON text, as clients receive them."""
    calls = [] if turn.answer is None else turn.answer.get("tool_calls", [])
    return [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in calls
    ]


def _encoded(message: Json) -> bytes:
    return json.dumps(message).encode()


def _encoded_slowly(message: Json) -> bytes:
    """Return JSON. Unlike `json.dumps`, this lets other threads run meanwhile."""
    return "".join(json.JSONEncoder().iterencode(message)).encode()
