"""Tokens in, tokens out: the route /inference/v1/generate that vLLM, verifiers, prime-rl and Dynamo share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlite.errors import ConfigError, DataError
from rlite.services.endpoint.requests import RENAMED, ApiError, ModelRequest, unknown_model
from rlite.services.endpoint.responses import Choice, Exchange
from rlite.types import GenerationHyperparameters, token_ids

PATH = "/inference/v1/generate"
HONOURED = ("temperature", "top_p", "top_k", "seed", "ignore_eos", "stop", "stop_token_ids")


def read(body: Any, model: str, defaults: GenerationHyperparameters) -> ModelRequest:
    """Read a body of /inference/v1/generate.

    Args:
        body: a JSON value.
        model: the name of the session's model, which the body need not give.
        defaults: sampling parameters that the body does not set.

    Returns:
        The request.

    Raises:
        ApiError: the body cannot be honoured. The error names the parameter.
    """
    if not isinstance(body, dict) or not isinstance(params := body.get("sampling_params") or {}, dict):
        raise ApiError("expected an object with token_ids and sampling_params", code="invalid_value")
    if body.get("model", model) != model:
        raise unknown_model(body["model"], model)
    given = {RENAMED.get(name, name): value for name, value in params.items() if value is not None}
    own = {name: given[name] for name in (*HONOURED, *RENAMED.values()) if name in given}
    try:
        prompt = token_ids(body.get("token_ids") or [], "token_ids")
        gconfig = defaults.new(**own)
    except (ConfigError, DataError) as error:
        raise ApiError(str(error), code="invalid_value") from error
    return ModelRequest(
        gconfig=gconfig,
        num_choices=int(given.get("n", 1)),
        is_stream=False,
        has_usage=False,
        has_logprobs=given.get("logprobs") is not None,
        prompts=[prompt],
    )


def whole(exchange: Exchange, choices: Sequence[Choice], scores: object = None) -> dict[str, Any]:
    """Return the response.

    Args:
        exchange: the shared fields.
        choices: all choices, by index.
        scores: unused, since no request wants log-probabilities of its prompt.
    """
    num_output = sum(len(choice.turn.output_ids) for choice in choices)
    return {
        "request_id": exchange.id,
        "choices": [_choice(exchange, choice) for choice in choices],
        "prompt_token_ids": exchange.prompts[0].token_ids,
        "usage": exchange.usage(num_output),
    }


def _choice(exchange: Exchange, choice: Choice) -> dict[str, Any]:
    turn = choice.turn
    pairs = zip(turn.output_ids, turn.logprobs, strict=True)
    content = [{"token": f"token_id:{id}", "logprob": value} for id, value in pairs]
    return {
        "index": choice.index,
        "token_ids": turn.output_ids,
        "logprobs": {"content": content} if exchange.request.has_logprobs else None,
        "finish_reason": turn.finish_reason,
    }
