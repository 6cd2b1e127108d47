"""Deterministic inference: work in fixed shapes, so that a request's bits do not depend on the rest of the batch.

Llama, Qwen2 and Qwen3 in float32 on CPU do not need this: `models.batch_invariant` computes them, in any shape and with
the bits of training. Other models are computed here.

A kernel chooses its blocks, and so the order of its sums, by the shapes of its arguments. Here every forward has the
same number of rows. A decode step computes DECODE_ROWS slots at a time; free slots compute a token that is not read. A
prompt is prefilled TILE_ROWS tokens of one sequence at a time, from multiples of TILE_ROWS. Attention reads as many
blocks as a sequence needs, and sampling processes one row at a time. A kernel may still treat the rows of one shape
differently; `check_rows` tests this machine's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlite.backends.embedded.attention import TILE_ROWS, DecodePlan
from rlite.backends.embedded.cache import SlotCache
from rlite.backends.embedded.model import ShardedModel
from rlite.backends.embedded.sampling import Sampled, SamplingBatch, sample
from rlite.backends.embedded.scheduler import Chunk
from rlite.backends.models.batch_invariant import label_logprobs
from rlite.errors import ConfigError
from rlite.types import GenerationHyperparameters

DECODE_ROWS = 16


def tiles_of(chunk: Chunk, tokens: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the tiles that cover a chunk.

    Args:
        chunk: tokens to prefill.
        tokens: all tokens of the sequence.

    Yields:
        The start of each tile, and its tokens.
    """
    for start in range(chunk.start - chunk.start % TILE_ROWS, chunk.stop, TILE_ROWS):
        yield start, tokens[start : min(start + TILE_ROWS, chunk.stop)]


class TiledDecoder:
    """The steps of one burst for `ForwardPasses`, called in order."""

    def __init__(self, model: ShardedModel, cache: SlotCache, lengths: Sequence[int], positions: Tensor) -> None:
        """Plan the first step.

        Args:
            model: the model.
            cache: the KV cache.
            lengths: length of each sequence, in tokens.
            positions: positions of the input tokens, `[steps, rows]`.
        """
        self._model = model
        self._num_rows = len(lengths)
        padding = -len(lengths) % DECODE_ROWS
        lengths = [*lengths, *[1] * padding]
        steps = torch.arange(len(positions), device=positions.device)
        # padding walks along as if it were a sequence that has just begun
        self._positions = torch.cat([positions, steps[:, None].expand(-1, padding)], dim=1)
        self._plans = [
            DecodePlan(
                cache,
                lengths[start : start + DECODE_ROWS],
                self._positions[:, start : start + DECODE_ROWS],
                first_slot=start,
                is_padded=False,
            )
            for start in range(0, len(lengths), DECODE_ROWS)
        ]

    def __call__(self, step: int, tokens: Tensor) -> Tensor:
        """Return the logits `[rows, vocabulary]` of tokens `[rows]`."""
        tokens = F.pad(tokens, (0, self._positions.shape[1] - self._num_rows))
        logits = []
        for index, plan in enumerate(self._plans):
            if step:
                plan.go_to(step)
            rows = slice(index * DECODE_ROWS, (index + 1) * DECODE_ROWS)
            logits.append(self._model.logits(tokens[rows], self._positions[step, rows], plan))
        return torch.cat(logits)[: self._num_rows]


def sample_each(logits: Tensor, batches: Sequence[SamplingBatch], uniform: Tensor) -> Sampled:
    """Return the results of `sample`, computed one row at a time.

    Args:
        logits: `[rows, vocabulary]`.
        batches: sampling parameters of each row.
        uniform: random numbers in [0, 1), `[rows]`.
    """
    parts = [sample(logits[r : r + 1], batch, uniform[r : r + 1]) for r, batch in enumerate(batches)]
    columns = zip(*(part[:3] for part in parts), strict=True)
    tokens, logprobs, sampling_logprobs = (torch.cat(column) for column in columns)
    kept = [part.kept + part.kept.new_tensor([r, 0]) for r, part in enumerate(parts) if part.kept is not None]
    return Sampled(tokens, logprobs, sampling_logprobs, torch.cat(kept) if kept else None)


def with_trained_logprobs(
    sampled: Sampled, logits: Tensor, gconfigs: Sequence[GenerationHyperparameters], num_shards: int
) -> Sampled:
    """Return the results of `sample` with log-probabilities that have the bits of a deterministic train engine.

    Args:
        sampled: tokens, log-probabilities and kept ids. Those over reported kept ids have these bits already.
        logits: `[rows, vocabulary]`.
        gconfigs: sampling parameters of each row.
        num_shards: parts into which training divides the vocabulary.
    """
    tokens, before, sampling_logprobs, kept = sampled
    logprobs = torch.empty_like(before)
    temperatures = [1.0 if g.greedy else g.temperature for g in gconfigs]
    for temperature in set(temperatures):
        rows = torch.tensor([r for r, t in enumerate(temperatures) if t == temperature], device=logits.device)
        logprobs[rows] = label_logprobs(logits[rows], tokens[rows], temperature, num_shards)
    is_whole = sampling_logprobs == before
    if kept is not None:
        is_whole = is_whole.index_fill(0, kept[:, 0], False)
    return Sampled(tokens, logprobs, torch.where(is_whole, logprobs, sampling_logprobs), kept)


@torch.inference_mode()
def check_rows(model: ShardedModel, cache: SlotCache) -> None:
    """Decode the same token in all rows of a tile, for a few steps.

    Raises:
        ConfigError: the logits of two rows differ in any bit.
    """
    steps, device = 3, cache.values.device
    positions = torch.arange(steps, device=device)[:, None].expand(-1, DECODE_ROWS)
    decoder = TiledDecoder(model, cache, [1] * DECODE_ROWS, positions)
    for step in range(steps):
        logits = decoder(step, torch.full((DECODE_ROWS,), step + 1, device=device))
        if not torch.equal(logits, logits[:1].expand_as(logits)):
            raise ConfigError(
                "deterministic=true: on this device equal rows of one matrix product differ in their last bits, so "
                "results would depend on a request's slot; use one thread for each device, or another dtype"
            )
