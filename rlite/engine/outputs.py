"""Outputs of an inference engine: requests that have ended, in the form that callers receive.

Log-probabilities of prompts, computed by all replicas of an inference engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlite.data.chat.answers import split_at_stop
from rlite.engine.inference_executor import InFlightRequest, Replica
from rlite.engine.workers import together
from rlite.errors import ConfigError, DataError
from rlite.types import MAX_TOP_LOGPROBS, CompletionOutput, LLMRequest, LLMResponse, PromptLogprobs


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


def score_prompts(
    replicas: Sequence[Replica], prompts: Sequence[list[int]], num_top: int, max_tokens: int
) -> list[PromptLogprobs]:
    """Return the log-probabilities of each prompt's tokens. Prompts are distributed to the replicas in turn.

    Args:
        replicas: the replicas that serve.
        prompts: token ids.
        num_top: number of most likely tokens at each place.
        max_tokens: most tokens of a prompt.

    Returns:
        One entry per prompt, in the order of the prompts.

    Raises:
        ConfigError: `num_top` is out of range.
        DataError: a prompt is too long.
    """
    if not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise ConfigError(f"num_top={num_top}: expected a number from 0 to {MAX_TOP_LOGPROBS}")
    check_lengths(prompts, max_tokens)
    num = len(replicas)
    shares = {replica: prompts[index::num] for index, replica in enumerate(replicas)}
    results = together(replicas, lambda replica: replica.prompt_logprobs(shares[replica], num_top))
    return [results[index % num][index // num] for index in range(len(prompts))]


def check_lengths(prompts: Sequence[list[int]], max_tokens: int) -> None:
    """Check that no prompt is too long.

    Args:
        prompts: token ids.
        max_tokens: most tokens of a prompt.

    Raises:
        DataError: a prompt is too long.
    """
    for index, ids in enumerate(prompts):
        if len(ids) > max_tokens:
            raise DataError(
                f"prompt {index} has {len(ids)} tokens, max_model_len={max_tokens + 1} leaves room for {max_tokens}"
            )
