"""Bounds on the second pass of the model, which computes log-probabilities of prompts and the most likely tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlite.rollout.openai.requests import ApiError, ModelRequest

MAX_SCORED_TOKENS = 1 << 17
"""largest number of scored tokens in a request: prompts and longest answers of all choices"""
SLICE_TOKENS = 1 << 14
"""scored at a time: between two slices, a request whose client has left ends"""


def check_num_scored(request: ModelRequest, prompt_lengths: Sequence[int], limit: int | None) -> None:
    """Check that a request does not want more scores than one request may.

    Args:
        request: the request.
        prompt_lengths: tokens of each prompt.
        limit: tokens of the model's context, None if unknown.

    Raises:
        ApiError: the request wants more scores; or a prompt that is scored alone fills the context.
    """
    if not request.needs_scores:
        return
    if not request.is_generating and limit is not None and (longest := max(prompt_lengths)) >= limit:
        message = f"the prompt has {longest} tokens; at most {limit - 1} are scored"
        raise ApiError(message, param="prompt", code="context_length_exceeded")
    num_new = request.gconfig.max_new_tokens if request.is_generating else 0
    lengths = [min(num + num_new, limit or num + num_new) for num in prompt_lengths]
    num_choices = request.num_choices * len(lengths)
    num_scored = request.num_choices * sum(lengths)
    if num_scored > MAX_SCORED_TOKENS:
        message = (
            f"logprobs with echo, or above 0: {num_choices} choices may have {num_scored} tokens "
            f"of prompt and answer; at most {MAX_SCORED_TOKENS} are scored per request: "
            "send fewer prompts, or set n or max_tokens lower"
        )
        raise ApiError(message, param="logprobs", code="invalid_value")


def slices(prompts: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Yield the prompts in their order, in lists of at most `SLICE_TOKENS` tokens; a longer prompt is alone."""
    part: list[list[int]] = []
    for ids in prompts:
        if part and sum(map(len, part)) + len(ids) > SLICE_TOKENS:
            yield part
            part = []
        part.append(ids)
    yield part
