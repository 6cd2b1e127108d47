"""Responses in OpenAI's interface: whole objects and chunks of streams, as JSON values.

Text of tokens as they arrive. Text that can still change is held back.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from rlite.data.chat.forms import Message
from rlite.data.chat.stops import split_at_stop
from rlite.data.chat.template import Tokenizer
from rlite.data.prompts import end_of
from rlite.rollout.tools.formats import ToolCall, ToolCallFormat, num_before, numbered, typed
from rlite.runtime.event_loop import beside_loop
from rlite.services.endpoint.recording import Turn
from rlite.services.endpoint.requests import ApiError, ModelRequest, Prompt, unexpected
from rlite.types import PromptLogprobs, StopReason, TokenChunk

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

    def around(self, choices: list[dict[str, Any]], is_chunk: bool) -> dict[str, Any]:
        """Return a response, or one chunk of it."""
        kind = "text_completion"
        if self.request.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def usage(self, num_output: int) -> dict[str, int]:
        """Return counts of tokens. A prompt that several choices share counts once."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


@dataclass(frozen=True)
class Reply:
    """Answer to a request: one object, or with `is_stream` one after the other.

    Read `messages` to its end once the client has everything. Leaving it earlier ends the generation, and its turns
    count as aborted, unless it is a stream that has handed over the last chunk of each choice.
    """

    is_stream: bool
    messages: AsyncGenerator[dict[str, Any], None]
    delivered: list[Turn] = field(default_factory=list)
    """turns whose last chunk was handed over; emptied where that does not mean that the client has it"""

    @property
    def content_type(self) -> str:
        """Media type of the encoded reply."""
        return "text/event-stream" if self.is_stream else "application/json"

    async def encoded(self) -> AsyncGenerator[bytes, None]:
        """Yield the body of the response: one JSON object, or server-sent events. The reply is closed at the end.

        Raises:
            ApiError: the reply fails before its first message. A later failure of a stream is an event.
        """
        is_begun = False
        async with contextlib.aclosing(self.messages):
            try:
                async for message in self.messages:
                    is_begun = True
                    if self.is_stream:
                        yield _event(json.dumps(message))
                    else:
                        num_choices = sum(choice["logprobs"] is not None for choice in message["choices"])
                        size = SHOWN_CHARACTERS * num_choices * message["usage"]["total_tokens"]
                        yield await beside_loop(size, _encoded, message)
            except Exception as error:
                if not (is_begun and self.is_stream):
                    raise
                if not isinstance(error, ApiError):
                    logger.exception("an answer failed in the middle of its stream")
                    error = unexpected(error)
                yield _event(json.dumps(error.body()))
            else:
                if self.is_stream:
                    yield _event("[DONE]")


def answer(content: str, calls: Sequence[ToolCall], numbers: Iterator[int]) -> Message:
    """Return the assistant's message. Later requests are compared with it.

    Args:
        content: the text outside of calls.
        calls: the calls of tools.
        numbers: gives each call its id.
    """
    message = {"role": "assistant", "content": content}
    return {**message, "tool_calls": numbered(calls, numbers)} if calls else message


def whole(exchange: Exchange, choices: Sequence[Choice], scores: Sequence[PromptLogprobs] | None = None) -> Json:
    """Return the response to a request that does not stream.

    Args:
        exchange: the shared fields.
        choices: all choices, by index.
        scores: log-probabilities of the prompt and the answer of each choice, if the request needs them.
    """
    parts = []
    for choice in choices:
        turn, calls = choice.turn, calls_of(choice.turn)
        if scores is None:
            shown = logprobs(exchange, list(zip(turn.output_ids, turn.logprobs, strict=True)))
        else:
            shown = scored_logprobs(exchange, turn, scores[choice.index])
        said: dict[str, Any] = {"text": exchange.echoed(choice.index) + choice.content}
        if exchange.request.is_chat:
            called = {"content": choice.content or None, "tool_calls": calls} if calls else {"content": choice.content}
            said = {"message": {"role": "assistant", "refusal": None, **called}}
        parts.append({"index": choice.index, "finish_reason": finish_reason(turn), "logprobs": shown, **said})
    num_output = sum(len(choice.turn.output_ids) for choice in choices)
    return {**exchange.around(parts, is_chunk=False), "usage": exchange.usage(num_output)}


async def stream(exchange: Exchange, events: AsyncIterator[Delta | Choice]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of the response to a request that streams.

    Args:
        exchange: the shared fields.
        events: the parts of the choices as they arrive.
    """
    waiting: dict[int, list[tuple[int, float]]] = {}
    starts: Counter[int] = Counter()
    """characters of each choice's tokens before those that wait"""
    num_output = 0
    async for event in events:
        is_first = event.index not in waiting
        tokens = waiting.setdefault(event.index, [])
        if isinstance(event, Delta):
            tokens += zip(event.chunk.token_ids, event.chunk.logprobs, strict=True)
            num_output += len(event.chunk.token_ids)
        text = event.text if isinstance(event, Delta) else event.rest
        if is_first and exchange.request.is_chat:
            yield _chunk(exchange, event.index, {"role": "assistant", "content": ""})
        if text:
            delta: dict[str, Any] | str = {"content": text} if exchange.request.is_chat else text
            yield _chunk(exchange, event.index, delta, logprobs(exchange, tokens, starts[event.index]))
            if exchange.request.has_logprobs:
                starts[event.index] += sum(len(exchange.token_text(token)) for token, _ in tokens)
            waiting[event.index] = tokens = []
        if isinstance(event, Choice):
            for number, call in enumerate(calls_of(event.turn)):
                yield _chunk(exchange, event.index, {"tool_calls": [{"index": number, **call}]})
            last: dict[str, Any] | str = {} if exchange.request.is_chat else ""
            left = logprobs(exchange, tokens, starts[event.index]) if tokens else None
            exchange.delivered.append(event.turn)
            yield _chunk(exchange, event.index, last, left, finish_reason(event.turn))
    if exchange.request.has_usage:
        yield {**exchange.around([], is_chunk=True), "usage": exchange.usage(num_output)}


def _encoded(message: dict[str, Any]) -> bytes:
    """Return JSON. Unlike `json.dumps`, this lets other threads run meanwhile."""
    return "".join(json.JSONEncoder().iterencode(message)).encode()


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def _chunk(
    exchange: Exchange, index: int, delta: Json | str, tokens: Json | None = None, reason: str | None = None
) -> Json:
    key = "delta" if exchange.request.is_chat else "text"
    return exchange.around([{"index": index, key: delta, "logprobs": tokens, "finish_reason": reason}], is_chunk=True)


def finish_reason(turn: Turn) -> str:
    """Return the finish reason in OpenAI's words."""
    return "tool_calls" if calls_of(turn) else turn.finish_reason


def calls_of(turn: Turn) -> list[dict[str, Any]]:
    """Return the calls of an answer with their arguments as JSON text, as clients receive them."""
    calls = [] if turn.answer is None else turn.answer.get("tool_calls", [])
    return [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in calls
    ]


def logprobs(exchange: Exchange, tokens: Sequence[tuple[int, float]], start: int = 0) -> dict[str, Any] | None:
    """Return log-probabilities of sampled tokens in the form of the interface; None if the request has not asked.

    Args:
        exchange: the request.
        tokens: the tokens with their log-probabilities.
        start: characters of the choice's tokens before these.
    """
    if not exchange.request.has_logprobs:
        return None
    texts = [exchange.token_text(token) for token, _ in tokens]
    values = [value for _, value in tokens]
    if exchange.request.is_chat:
        # a token that is half a character has no text, and decoding does not tell its bytes
        spelled = [None if "\ufffd" in text else list(text.encode()) for text in texts]
        content = [
            {"token": text, "logprob": value, "bytes": spelling, "top_logprobs": []}
            for text, value, spelling in zip(texts, values, spelled, strict=True)
        ]
        return {"content": content, "refusal": None}
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": _starts(texts, start)}


def scored_logprobs(exchange: Exchange, turn: Turn, scored: PromptLogprobs) -> dict[str, Any]:
    """Return log-probabilities in the form of completions, with the most likely tokens or with those of the prompt.

    Args:
        exchange: the request.
        turn: the answer. Its own log-probabilities are those of generation.
        scored: log-probabilities of the prompt and of the answer, of which the last token may be missing.
    """
    num_prompt, text_of = len(turn.prompt_ids), exchange.token_text
    ids = [*turn.prompt_ids, *turn.output_ids]
    values: list[Any] = [None, *scored.logprobs[: num_prompt - 1], *turn.logprobs]
    top: list[dict[str, float] | None] = [None]
    places = list(zip(scored.top_ids, scored.top_logprobs, strict=True))
    places += [([], [])] * (len(ids) - 1 - len(places))
    for token, value, (likely, likely_logprobs) in zip(ids[1:], values[1:], places, strict=True):
        entries: dict[str, float] = {}
        for other, logprob in zip([*likely, token], [*likely_logprobs, value], strict=True):
            entries.setdefault(text_of(other), logprob)  # of tokens with the same text, the most likely
        top.append(entries)
    first = 0 if exchange.request.is_echo else num_prompt
    texts = [text_of(token) for token in ids[first:]]
    shown = top[first:] if exchange.request.num_top else None
    return {"tokens": texts, "token_logprobs": values[first:], "top_logprobs": shown, "text_offset": _starts(texts)}


def _starts(texts: Sequence[str], start: int = 0) -> list[int]:
    """Return where each token's text begins in the whole text, if the first begins at `start`."""
    return [*itertools.accumulate(map(len, texts), initial=start)][: len(texts)]


MAX_PARTS = 3
"""tokens that may be the beginning of one character"""


class DecodedText:
    """Text of tokens as they arrive, without half a character at its end.

    Args:
        tokenizer: the model's tokenizer.
        skips: leave out special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, skips: bool) -> None:
        self._tokenizer = tokenizer
        self.skips = skips
        self.tokens: list[int] = []
        # Tokens are decoded together with those since `_start`, because decoders look at what stands before.
        self._start = self._read = 0
        self.text = ""

    def feed(self, tokens: Sequence[int], is_last: bool) -> None:
        """Append the text of further tokens."""
        self.tokens += tokens
        known = self._decode(self._start, self._read)
        end = len(self.tokens)
        whole = self._decode(self._start, end)
        if whole.endswith("\ufffd") and not is_last:
            end = max(end - MAX_PARTS, self._read)  # bytes before them are half a character for ever
            whole = self._decode(self._start, end)
        if len(whole) > len(known):
            self.text += whole[len(known) :]
            self._start, self._read = self._read, end

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self.tokens[start:end], skip_special_tokens=self.skips)


@dataclass(eq=False)
class TextStream:
    """Text of one output. It holds back half a character, and a possible beginning of a stop string or a call."""

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    """the text ends before the first of them. They may be special tokens"""
    form: ToolCallFormat | None = None
    """format of calls of tools; None looks for none"""
    tools: Sequence[Mapping[str, Any]] | None = None
    """schemas, by which arguments that are written as text get their types"""
    end_ids: Collection[int] = ()
    """tokens that end an output; the last one is not part of the text"""
    prompt: str = ""
    """text of the prompt, which may have begun a thought"""
    text: str = field(default="", init=False)
    """all of it so far, up to a stop string"""
    stop_text: str = field(default="", init=False)
    """text from the stop string on that has ended the output; "" if something else has"""

    def __post_init__(self) -> None:
        self._tokens: list[int] = []
        self._said = DecodedText(self.tokenizer, skips=self.form is None or not self.form.shows_special_tokens)
        self._whole = DecodedText(self.tokenizer, skips=False)  # stop strings are searched in it
        self._sent = 0
        self._has_stopped = False

    def feed(self, tokens: Sequence[int], reason: StopReason | None = None) -> str:
        """Return the text that is settled by further tokens.

        Args:
            tokens: the next tokens.
            reason: why the output ends with these tokens; None if it does not.
        """
        self._tokens += tokens
        end = end_of(self._tokens, reason or "stop", self.end_ids)  # without a reason, the last token may be the end
        said = self._tokens[len(self._said.tokens) : len(self._tokens) - len(end)]
        self._said.feed(said, reason is not None)
        self.text = self._said.text
        num_settled = len(self.text)
        if self.stops:
            num_settled -= self._held_back(tokens, reason is not None)
        if reason is not None and self.stops:
            text, rest = split_at_stop(self.tokenizer, self._tokens, self.stops, len(end), self._said.skips)
            self.text, num_settled = (text, len(text)) if rest else (self.text, num_settled)
            self.stop_text = rest.removesuffix(self.tokenizer.decode(end, skip_special_tokens=False))
        if self.form is not None:
            num_settled = min(num_settled, self.form.num_settled_after(self.prompt, self.text))
        return self._send(self.text[: max(num_settled, 0)])

    async def finish(self) -> tuple[str, list[ToolCall], str]:
        """Return the content, the calls, and the content that was not returned before, after the last token."""
        content, calls = self.text, list[ToolCall]()
        if self.form is not None:
            content, calls, _ = await self.form.read(self.text, self.prompt)
        return content, typed(calls, self.tools), self._send(content)

    def _held_back(self, tokens: Sequence[int], is_last: bool) -> int:
        """Return the number of characters at the end of the text that may belong to a stop string."""
        start = max(len(self._whole.text) - max(map(len, self.stops)), 0)
        self._whole.feed(tokens, is_last)
        tail = self._whole.text[start:]
        self._has_stopped = self._has_stopped or any(stop in tail for stop in self.stops)
        return len(self.text) if self._has_stopped else len(tail) - num_before(tail, self.stops)

    def _send(self, text: str) -> str:
        settled, self._sent = text[self._sent :], max(self._sent, len(text))
        return settled
