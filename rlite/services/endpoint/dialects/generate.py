"""Tokens in, tokens out: the route that vLLM, verifiers, prime-rl and Dynamo share."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rlite.services.endpoint.dialects import bodies
from rlite.services.endpoint.dialects.bodies import ABSENT, Expected
from rlite.services.endpoint.dialects.openai import error_body
from rlite.services.endpoint.exchange import Choice, Delta, Dialect, Exchange, Json
from rlite.services.endpoint.recording import Turn
from rlite.services.endpoint.requests import UNSUPPORTED, ModelRequest
from rlite.types import GenerationHyperparameters

OFF: dict[str, tuple[Any, ...]] = {
    "features": (),
    "content_parts": ([],),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "output_mode": ("tokens",),
    "priority": (0,),
}
NOTES = {"request_id", "cache_salt", "return_token_ids", "token_offsets", "reasoning_ended", "reasoning_parser_kwargs"}
SAMPLING_OFF: dict[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "output_kind": (0, 2),
    "best_of": (1,),
}
SAMPLING_NOTES = {"skip_special_tokens", "spaces_between_special_tokens", "detokenize", "truncate_prompt_tokens"}
TOKENS = "a list of token ids, not empty"


class _SamplingParams(bodies.GenerationBody):
    off, notes = SAMPLING_OFF, frozenset(SAMPLING_NOTES)

    logprobs: Annotated[int, Field(ge=0, le=1), Expected("0 or 1, for the sampled tokens", UNSUPPORTED)] | None = None


class _Body(bodies.StreamBody):
    off, notes = OFF, frozenset(NOTES)
    has_optional_model: ClassVar[bool] = True

    token_ids: Annotated[bodies.Tokens, Expected(TOKENS)] = ABSENT
    sampling_params: _SamplingParams = _SamplingParams()


def read(body: Any, model: str, defaults: GenerationHyperparameters) -> ModelRequest:
    """Read a body of /inference/v1/generate."""
    read = bodies.validated(_Body, body, model)
    return ModelRequest(
        **{**read.sampling_params.common(defaults), **read.common(defaults)},
        prompts=[read.token_ids],
        has_logprobs=read.sampling_params.logprobs is not None,
        returns_token_ids=True,
        repeated={"request_id": body["request_id"]} if body.get("request_id") else {},
    )


def whole(exchange: Exchange, choices: Sequence[Choice], scores: object = None) -> Json:
    """Return the response to a request that does not stream."""
    parts = [_choice(exchange, choice) for choice in choices]
    about = {"model": exchange.model, "created": exchange.created, "prompt_token_ids": exchange.prompts[0].token_ids}
    return {**_around(exchange, parts), **about, "usage": exchange.usage}


async def stream(exchange: Exchange, events: AsyncIterator[Delta | Choice]) -> AsyncGenerator[Json, None]:
    """Yield the messages of the response to a request that streams."""
    is_begun = False
    async for event in events:
        if isinstance(event, Choice):
            exchange.delivered.append(event.turn)
            part = {"index": event.index, "token_ids": [], "logprobs": None, **_end(event.turn)}
        else:
            ids, values = event.chunk.token_ids, event.chunk.logprobs
            logprobs = _logprobs(exchange, ids, values)
            part = {"index": event.index, "token_ids": ids, "logprobs": logprobs, "finish_reason": None}
        begun = {} if is_begun else {"prompt_token_ids": exchange.prompts[0].token_ids}
        is_begun = True
        yield {**_around(exchange, [part]), **begun}
    if exchange.request.has_usage:
        yield {**_around(exchange, []), "usage": exchange.usage}


def _around(exchange: Exchange, choices: list[Json]) -> Json:
    name = exchange.request.repeated.get("request_id", exchange.id)
    return {"request_id": name, "id": exchange.id, "choices": choices}


def _choice(exchange: Exchange, choice: Choice) -> Json:
    turn = choice.turn
    shown = {"token_ids": turn.output_ids, "logprobs": _logprobs(exchange, turn.output_ids, turn.logprobs)}
    return {"index": choice.index, **shown, **_end(turn)}


def _logprobs(exchange: Exchange, ids: Sequence[int], values: Sequence[float]) -> Json | None:
    """Return log-probabilities in the words of vLLM and of its clients: one of them spells the id as a text."""
    if not exchange.request.has_logprobs:
        return None
    pairs = zip(ids, values, strict=True)
    return {"content": [{"token": f"token_id:{id}", "token_id": id, "logprob": value} for id, value in pairs]}


def _end(turn: Turn) -> Json:
    """Return what is known of an answer at its end: the reason, the policy versions, the ids that truncation kept."""
    kept = {"sampling_mask": turn.kept_ids} if any(turn.kept_ids) else {}
    return {
        "finish_reason": turn.finish_reason,
        "stop_reason": turn.stop_text or None,
        "weight_versions": version_spans(turn.versions),
        **kept,
    }


def version_spans(versions: Sequence[int]) -> list[Json]:
    """Return the policy versions of an answer's tokens as spans: tokens [start, end) were made by `version`."""
    spans, start = [], 0
    for version, tokens in itertools.groupby(versions):
        end = start + sum(1 for _ in tokens)
        spans.append({"version": str(version), "start": start, "end": end})
        start = end
    return spans


GENERATE = Dialect(
    path="/inference/v1/generate", prefix="gen-", read=read, whole=whole, stream=stream, error=error_body
)
