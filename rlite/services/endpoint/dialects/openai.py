"""OpenAI's chat completions and completions."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from rlite.data.chat.forms import THOUGHTS, Message
from rlite.services.endpoint.dialects import bodies
from rlite.services.endpoint.dialects.bodies import ABSENT, Expected, Flag, Function, JsonObject, Name, Parts, Text
from rlite.services.endpoint.exchange import Choice, Delta, Dialect, Exchange, Json, calls_of
from rlite.services.endpoint.recording import Turn
from rlite.services.endpoint.requests import UNSUPPORTED, ApiError, ModelRequest, invalid, unsupported
from rlite.types import GenerationHyperparameters, PromptLogprobs

OFF: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "modalities": (["text"],),
    "functions": ([],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
"""parameters that can be honoured only at these values"""
NOTES = frozenset({"user", "safety_identifier", "prompt_cache_key", "metadata"})
"""parameters that do not change the answer"""
MAX_CHOICES = 1024
"""choices of a request, of all its prompts together"""
MAX_SHOWN_LOGPROBS = 5
"""most likely tokens that a completion shows at each place: OpenAI's limit"""
PROMPT = f"a text, a list of token ids, or a list of at most {MAX_CHOICES} of them, none empty"
MAX_TOKENS = "at least 1; or 0 with echo=true and logprobs, which scores the prompt alone"
LOGPROBS = f"an integer from 0 to {MAX_SHOWN_LOGPROBS}"


class _CalledFunction(JsonObject):
    name: Text = ABSENT
    arguments: Text = ABSENT


class _Call(JsonObject):
    id: Text = ABSENT
    type: Function = "function"
    function: _CalledFunction = ABSENT

    def plain(self) -> dict[str, Any]:
        """Return the call as templates take it."""
        return bodies.called(self.id, self.function.name, self.function.arguments)


Role = Literal["system", "developer", "user", "assistant", "tool"]


class _Message(JsonObject):
    role: Annotated[Role, Expected(f"one of {', '.join(get_args(Role))}")] = ABSENT
    content: Parts | None = None
    tool_calls: Annotated[list[_Call], Field(fail_fast=True), BeforeValidator(lambda calls: calls or [])] = ABSENT
    name: Text | None = None
    tool_call_id: Text | None = None

    def plain(self, at: str) -> Message:
        """Return the message as templates take it: text, and the arguments of calls as values."""
        is_answer = self.role == "assistant"
        if self.content is None and not is_answer:
            raise invalid(f"{at}.content", None, "a text")
        if self.role == "tool" and self.tool_call_id is None:
            raise invalid(f"{at}.tool_call_id", None, "the id of the call that this answers")
        thoughts = {
            key: value for key in THOUGHTS if is_answer and isinstance(value := (self.model_extra or {}).get(key), str)
        }
        for key, value in {**(self.model_extra or {}), "tool_calls": () if is_answer else self.tool_calls}.items():
            if value and key not in thoughts:  # such as audio; empty ones come from the client's own types
                raise unsupported(f"{at}.{key}", value, "nothing")
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": bodies.text_of(self.content), **thoughts}
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        return message | {key: name for key in ("name", "tool_call_id") if (name := getattr(self, key)) is not None}


class _Function(JsonObject):
    name: Name = ABSENT
    description: Text | None = None
    parameters: bodies.Schema | None = None


class _Tool(JsonObject):
    type: Function = ABSENT
    function: _Function = ABSENT


class _Body(bodies.GenerationBody):
    off, notes = OFF, NOTES

    return_token_ids: Flag = False

    def common(self, defaults: GenerationHyperparameters) -> dict[str, Any]:
        """Return the fields of a ModelRequest that both kinds of requests have."""
        return {**super().common(defaults), "returns_token_ids": self.return_token_ids}


class _ChatBody(_Body):
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)] = ABSENT
    tools: Annotated[list[_Tool], Field(fail_fast=True), BeforeValidator(lambda tools: tools or [])] = ABSENT
    tool_choice: Annotated[Literal["auto", "none"], Expected(bodies.TOOL_CHOICE, UNSUPPORTED)] = "auto"
    logprobs: Flag = False


def _as_prompts(prompt: Any) -> list[Any]:
    is_several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return prompt if is_several else [prompt]


Prompts = Annotated[list[Name | bodies.Tokens], Field(max_length=MAX_CHOICES, fail_fast=True)]


class _CompletionBody(_Body):
    prompt: Annotated[Prompts, BeforeValidator(_as_prompts), Expected(PROMPT)] = ABSENT
    logprobs: Annotated[int, Field(ge=0, le=MAX_SHOWN_LOGPROBS), Expected(LOGPROBS, UNSUPPORTED)] | None = None
    echo: Flag = False


def read_chat(body: Any, model: str, defaults: GenerationHyperparameters) -> ModelRequest:
    """Read a body of /chat/completions."""
    read = bodies.validated(_ChatBody, body, model)
    return ModelRequest(
        messages=[message.plain(f"messages[{number}]") for number, message in enumerate(read.messages)],
        tools=body["tools"] if read.tools else None,
        may_call=bool(read.tools) and read.tool_choice == "auto",
        has_logprobs=read.logprobs,
        **read.common(defaults),
    )


def read_completion(body: Any, model: str, defaults: GenerationHyperparameters) -> ModelRequest:
    """Read a body of /completions. Arguments and errors are those of `read_chat`."""
    read = bodies.validated(_CompletionBody, body, model)
    if read.n * len(read.prompt) > MAX_CHOICES:
        raise invalid("n", read.n, f"at most {MAX_CHOICES} choices, and there are {len(read.prompt)} prompts")
    if read.stream and (read.echo or read.logprobs):
        raise unsupported("stream", True, "false, for a request with echo or logprobs")
    if is_scoring := {read.max_tokens, read.max_completion_tokens} - {None} == {0}:
        if not read.echo or read.logprobs is None:
            name = "max_tokens" if read.max_tokens == 0 else "max_completion_tokens"
            raise invalid(name, 0, MAX_TOKENS)
        read = read.model_copy(update={"max_tokens": 1, "max_completion_tokens": None})
    return ModelRequest(
        prompts=read.prompt,
        is_generating=not is_scoring,
        has_logprobs=read.logprobs is not None,
        num_top=read.logprobs or 0,
        is_echo=read.echo,
        **read.common(defaults),
    )


def whole(exchange: Exchange, choices: Sequence[Choice], scores: Sequence[PromptLogprobs] | None = None) -> Json:
    """Return the response to a request that does not stream."""
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
        if exchange.request.returns_token_ids:
            said |= {"token_ids": turn.output_ids}
            said |= {} if exchange.request.is_chat else _prompt_ids(exchange, choice.index)
        parts.append({"index": choice.index, "finish_reason": finish_reason(turn), "logprobs": shown, **said})
    ids = _prompt_ids(exchange, 0) if exchange.request.is_chat else {}
    return {**_around(exchange, parts, is_chunk=False), "usage": exchange.usage, **ids}


async def stream(exchange: Exchange, events: AsyncIterator[Delta | Choice]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of the response to a request that streams."""
    waiting: dict[int, list[tuple[int, float]]] = {}
    starts: Counter[int] = Counter()
    """characters of each choice's tokens before those that wait"""
    is_chat = exchange.request.is_chat
    async for event in events:
        is_first = event.index not in waiting
        tokens = waiting.setdefault(event.index, [])
        if isinstance(event, Delta):
            tokens += zip(event.chunk.token_ids, event.chunk.logprobs, strict=True)
        text = event.text if isinstance(event, Delta) else event.rest
        if is_first and (is_chat or exchange.request.returns_token_ids):
            begun: Json | str = {"role": "assistant", "content": ""} if is_chat else ""
            yield _chunk(exchange, event.index, begun) | _prompt_ids(exchange, event.index)
        if text:
            delta: Json | str = {"content": text} if is_chat else text
            yield _chunk(exchange, event.index, delta, tokens, starts[event.index])
            if exchange.request.has_logprobs:
                starts[event.index] += sum(len(exchange.token_text(token)) for token, _ in tokens)
            waiting[event.index] = tokens = []
        if isinstance(event, Choice):
            for number, call in enumerate(calls_of(event.turn)):
                yield _chunk(exchange, event.index, {"tool_calls": [{"index": number, **call}]})
            last: Json | str = {} if is_chat else ""
            exchange.delivered.append(event.turn)
            yield _chunk(exchange, event.index, last, tokens, starts[event.index], finish_reason(event.turn))
    if exchange.request.has_usage:
        yield {**_around(exchange, [], is_chunk=True), "usage": exchange.usage}


def _around(exchange: Exchange, choices: list[Json], is_chunk: bool) -> Json:
    """Return a response, or one chunk of it."""
    kind = "text_completion"
    if exchange.request.is_chat:
        kind = "chat.completion.chunk" if is_chunk else "chat.completion"
    shared = {"id": exchange.id, "object": kind, "created": exchange.created, "model": exchange.model}
    return {**shared, "choices": choices}


def _chunk(
    exchange: Exchange,
    index: int,
    delta: Json | str,
    tokens: Sequence[tuple[int, float]] = (),
    start: int = 0,
    reason: str | None = None,
) -> Json:
    key = "delta" if exchange.request.is_chat else "text"
    shown = logprobs(exchange, tokens, start) if tokens else None
    choice: Json = {"index": index, key: delta, "logprobs": shown, "finish_reason": reason}
    if exchange.request.returns_token_ids:
        choice["token_ids"] = [token for token, _ in tokens]
    return _around(exchange, [choice], is_chunk=True)


def _prompt_ids(exchange: Exchange, index: int) -> Json:
    """Return the token ids of a choice's prompt in vLLM's form; nothing if the request has not asked."""
    return {"prompt_token_ids": exchange.prompt(index).token_ids} if exchange.request.returns_token_ids else {}


def finish_reason(turn: Turn) -> str:
    """Return the finish reason in OpenAI's words."""
    return "tool_calls" if calls_of(turn) else turn.finish_reason


def logprobs(exchange: Exchange, tokens: Sequence[tuple[int, float]], start: int = 0) -> dict[str, Any] | None:
    """Return log-probabilities of sampled tokens in the form of the interface; None if the request has not asked."""
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

    `turn`: the answer. Its own log-probabilities are those of generation.
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


def error_body(error: ApiError) -> Json:
    """Return an error in OpenAI's form."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": error.told, "type": kind, "param": error.param, "code": error.code}}


CHAT = Dialect(
    path="/v1/chat/completions", prefix="chatcmpl-", read=read_chat, whole=whole, stream=stream, error=error_body
)
COMPLETION = replace(CHAT, path="/v1/completions", prefix="cmpl-", read=read_completion)
