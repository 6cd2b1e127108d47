"""Requests of rlite in vLLM's words, and vLLM's outputs in rlite's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlite.types import PromptLogprobs, SequenceRequest

SAMPLING = "rlite"
"""key of `SamplingParams.extra_args` under which a request's own sampling parameters travel to the sampler"""


def sampling_arguments(request: SequenceRequest, end_ids: frozenset[int], max_model_len: int) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for a request.

    vLLM's own temperature, top-p and top-k are set as well, but the sampler of `extension.py` draws the tokens. It
    reads `extra_args`, and so does the scheduler. No argument comes from the model's generation_config.

    Args:
        request: the request. Generation resumes after its `output_ids`.
        end_ids: the model's own end tokens.
        max_model_len: longest sequence in tokens.
    """
    gconfig = request.gconfig
    num_made, num_prompt = len(request.output_ids), len(request.input_ids)
    stop_ids = sorted({*gconfig.stop_token_ids, *(() if gconfig.ignore_eos else end_ids)})
    return {
        "n": 1,
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": max(gconfig.top_k, 0),
        "max_tokens": min(gconfig.max_new_tokens - num_made, max_model_len - num_prompt - num_made),
        "stop_token_ids": stop_ids,
        "ignore_eos": True,  # the end tokens are among the stop tokens
        "detokenize": False,
        "extra_args": {
            SAMPLING: {
                "seed": request.seed,
                "greedy": gconfig.greedy,
                "temperature": gconfig.temperature,
                "top_p": gconfig.top_p,
                "top_k": gconfig.top_k,
                "stop_ids": stop_ids,
                "min_length": num_prompt + gconfig.min_new_tokens,
                "extras": list(request.extras),
                "is_urgent": bool(gconfig.stop),  # the server ends it, so it has to see each token
            }
        },
    }


def objection(request: SequenceRequest, max_model_len: int, vocab_size: int, tokenizer_error: str | None) -> str | None:
    """Return the reason why a request cannot be served, None if it can.

    Args:
        request: the request.
        max_model_len: longest sequence in tokens.
        vocab_size: number of tokens in the model's vocabulary.
        tokenizer_error: the reason why there is no tokenizer, None if there is one.
    """
    ids = [*request.input_ids, *request.output_ids]
    gconfig = request.gconfig
    if not request.input_ids:
        return "the prompt is empty; give at least one token"
    if len(ids) > max_model_len - 1:
        return f"the prompt has {len(ids)} tokens, max_model_len={max_model_len} leaves room for {max_model_len - 1}"
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        return f"token id {wrong} is not in the vocabulary of {vocab_size}"
    if gconfig.stop and tokenizer_error is not None:
        return f"stop strings need a tokenizer, and there is none: {tokenizer_error}. Use stop_token_ids"
    return None


def scored_prompt(ids: Sequence[int], entries: Sequence[Mapping[int, Any] | None], num_top: int) -> PromptLogprobs:
    """Return the log-probabilities of a prompt.

    Args:
        ids: the prompt.
        entries: vLLM's `prompt_logprobs`: for each token but the first, objects with `logprob` and `rank` by token id,
            for the token and the `num_top` most likely tokens.
        num_top: number of most likely tokens at each place.
    """
    places = [entry for entry in entries[1:] if entry is not None]
    top = [sorted(entry, key=lambda token: entry[token].rank)[:num_top] for entry in places]
    return PromptLogprobs(
        logprobs=[entry[token].logprob for token, entry in zip(ids[1:], places, strict=True)],
        top_ids=top,
        top_logprobs=[[entry[token].logprob for token in tokens] for tokens, entry in zip(top, places, strict=True)],
    )
