"""Log-probabilities of prompts: forward passes beside the KV cache, over packs of prompts.

A pack is cut into pieces of a bounded number of tokens, because the logits of a whole pack may not fit. A prompt that
is cut continues from the keys and values of its earlier pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlite.backends.embedded.attention import Past, ScoringPlan
from rlite.backends.embedded.model import ShardedModel
from rlite.backends.embedded.scheduler import Chunk
from rlite.errors import NonFiniteError
from rlite.types import PromptLogprobs

LOGITS_BYTES = 256 << 20
"""most memory of the float32 logits of one forward pass"""


def prompt_logprobs(
    weights: ShardedModel, prompts: Sequence[list[int]], num_top: int, max_tokens: int, is_alone: bool
) -> list[PromptLogprobs]:
    """Return the log-probabilities of each prompt's tokens but the first.

    Args:
        weights: the model.
        prompts: token ids.
        num_top: number of most likely tokens at each place.
        max_tokens: most tokens of one forward pass.
        is_alone: give each prompt forward passes of its own, so that its bits do not depend on other prompts.

    Returns:
        One entry per prompt.

    Raises:
        NonFiniteError: the model computes NaN or infinity for a prompt.
    """
    vocab_size = weights.config.get_text_config().vocab_size
    max_tokens = max(1, min(max_tokens, LOGITS_BYTES // (4 * vocab_size)))
    results = [PromptLogprobs(logprobs=[], top_ids=[], top_logprobs=[]) for _ in prompts]
    past: Past = {}
    for piece in pieces(prompts, max_tokens, is_alone):
        plan = ScoringPlan(piece, past, weights.device)
        labels = torch.tensor([token for c in piece for token in prompts[c.slot][c.start + 1 : c.stop + 1]])
        columns = _columns(weights.prompt_logits(plan), labels.to(weights.device), num_top)
        begin = 0
        for chunk in piece:
            end = begin + chunk.stop - chunk.start
            result = results[chunk.slot]
            result.logprobs.extend(columns[0][begin:end])
            result.top_ids.extend(columns[1][begin:end])
            result.top_logprobs.extend(columns[2][begin:end])
            begin = end
        past = plan.seen
    for index, result in enumerate(results):
        if not all(map(math.isfinite, result.logprobs)):
            raise NonFiniteError(f"prompt {index}: its logits are not finite in {weights.dtype}")
    return results


def pieces(prompts: Sequence[list[int]], max_tokens: int, is_alone: bool) -> Iterator[list[Chunk]]:
    """Yield the chunks of each forward pass: all tokens but the last of each prompt, in order.

    Args:
        prompts: token ids. `Chunk.slot` is the index of a prompt.
        max_tokens: most tokens of a piece.
        is_alone: put no two prompts into one piece.

    Yields:
        Chunks. A chunk that starts within a prompt is the first of its piece.
    """
    piece: list[Chunk] = []
    room = max_tokens
    for index, prompt in enumerate(prompts):
        start, end = 0, len(prompt) - 1
        while start < end:
            stop = min(end, start + room)
            piece.append(Chunk(index, start, stop, prompt[start:stop]))
            room -= stop - start
            start = stop
            if not room or (is_alone and start == end):
                yield piece
                piece, room = [], max_tokens
    if piece:
        yield piece


def _columns(logits: Tensor, labels: Tensor, num_top: int) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Return the columns of `PromptLogprobs` for labels `[rows]` and logits `[rows, vocabulary]`."""
    logprobs = logits.float().log_softmax(-1)
    top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    found = logprobs.gather(1, labels[:, None])[:, 0]
    return found.tolist(), top.indices.tolist(), top.values.tolist()
