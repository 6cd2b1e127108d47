"""Outputs of an inference engine: requests that have ended, in the form that callers receive."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from rlite.data.chat.turns import split_at_stop
from rlite.engine.inference_executor import InFlightRequest
from rlite.types import CompletionOutput, LLMRequest, LLMResponse


def completion(index: int, ended: InFlightRequest, tokenizer: PreTrainedTokenizerBase) -> CompletionOutput:
    """Return a completion of `generate`. Its text ends before a stop string or an end token.

    Args:
        index: number among the completions of the prompt.
        ended: the request.
        tokenizer: decodes the tokens.
    """
    tokens, gconfig = ended.token_ids, ended.request.gconfig
    text, rest = split_at_stop(tokenizer, tokens, gconfig.stop, num_end=int(ended.finish_reason == "stop"))
    return CompletionOutput(
        index=index,
        token_ids=ended.token_ids,
        text=text,
        logprobs=ended.logprobs,
        sampling_logprobs=ended.sampling_logprobs,
        versions=ended.versions,
        finish_reason=ended.finish_reason,
        stop_reason=_stop_reason(ended, rest),
    )


def response(request: LLMRequest, ended: InFlightRequest) -> LLMResponse:
    """Return the completion of `agenerate`.

    Args:
        request: the caller's request.
        ended: the same request, as the replica has answered it.
    """
    return LLMResponse(
        input_tokens=list(request.input_ids),
        output_tokens=ended.token_ids,
        output_logprobs=ended.logprobs,
        output_versions=ended.versions,
        stop_reason=ended.finish_reason,
        latency=ended.ended - ended.started,
        ttft=(ended.first_token or ended.ended) - ended.started,
        sampling_logprobs=ended.sampling_logprobs,
        metadata=dict(request.metadata),
        extras={name: ended.extras.get(name, []) for name in request.extras},
    )


def _stop_reason(ended: InFlightRequest, rest: str) -> str | int | None:
    """Return the stop string or stop token that ended a completion, None if something else did.

    Args:
        ended: the request.
        rest: the text of the completion from a stop string on; "" without one.
    """
    if ended.finish_reason != "stop":
        return None
    gconfig = ended.request.gconfig
    if rest:
        return next(stop for stop in gconfig.stop if rest.startswith(stop))
    last = ended.token_ids[-1]
    return last if last in gconfig.stop_token_ids else None
