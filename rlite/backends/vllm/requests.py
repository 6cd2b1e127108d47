"""Requests of rlite in vLLM's words, and vLLM's outputs in rlite's words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlite.backends.serving.requests import num_left
from rlite.types import PromptLogprobs, SequenceRequest

SAMPLING = "rlite"
"""key of `SamplingParams.extra_args` under which a request's own sampling parameters travel to the sampler"""


def sampling_arguments(request: SequenceRequest, stop_ids: Collection[int], max_model_len: int) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for a request.

    vLLM's own temperature, top-p and top-k are set as well, but the sampler of `extension.py` draws the tokens. It
    reads `extra_args`, and so does the scheduler. No argument comes from the model's generation_config.

    Args:
        request: the request. Generation resumes after its `output_ids`.
        stop_ids: tokens that end the request.
        max_model_len: longest sequence in tokens.
    """
    gconfig, ends = request.gconfig, sorted(stop_ids)
    return {
        "n": 1,
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": max(gconfig.top_k, 0),
        "max_tokens": num_left(request, max_model_len),
        "stop_token_ids": ends,
        "ignore_eos": True,  # the end tokens are among the stop tokens
        "detokenize": False,
        "extra_args": {
            SAMPLING: {
                "gconfig": {name: getattr(gconfig, name) for name in ("greedy", "temperature", "top_p", "top_k")},
                "seed": request.seed,
                "stop_ids": ends,
                "min_length": len(request.input_ids) + gconfig.min_new_tokens,
                "has_kept_ids": "kept_ids" in request.extras,
                "is_urgent": bool(gconfig.stop),  # the server ends it, so it has to see each token
            }
        },
    }


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
