"""Outputs of an inference engine: requests that have ended, in the form that callers receive."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from rlite.engine.inference_executor import InFlightRequest
from rlite.types import CompletionOutput, LLMRequest, LLMResponse


def completion(index: int, ended: InFlightRequest, tokenizer: PreTrainedTokenizerBase) -> CompletionOutput:
    """Return a completion of `generate`. Its text ends before a stop string.

    Args:
        index: number among the completions of the prompt.
        ended: the request.
        tokenizer: decodes the tokens.
    """
    text = tokenizer.decode(ended.token_ids, skip_special_tokens=True)
    stop_reason = _stop_reason(ended, text)
    for stop in ended.request.gconfig.stop:
        text = text.partition(stop)[0]
    return CompletionOutput(
        index=index,
        token_ids=ended.token_ids,
        text=text,
        logprobs=ended.logprobs,
        sampling_logprobs=ended.sampling_logprobs,
        versions=ended.versions,
        finish_reason=ended.finish_reason,
        stop_reason=stop_reason,
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


def _stop_reason(ended: InFlightRequest, text: str) -> str | int | None:
    """Return the stop string or stop token that ended a completion with this text, None if something else did."""
    if ended.finish_reason != "stop":
        return None
    gconfig = ended.request.gconfig
    if found := [stop for stop in gconfig.stop if stop in text]:
        return min(found, key=text.index)
    last = ended.token_ids[-1]
    return last if last in gconfig.stop_token_ids else None
