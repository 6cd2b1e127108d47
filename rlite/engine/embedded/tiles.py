"""Deterministic inference: work in fixed shapes, so that a request's bits do not depend on the rest of the batch.

A kernel chooses its blocks, and so the order of its sums, by the shapes of its arguments. Here every forward has the
same number of rows. A decode step computes DECODE_ROWS slots at a time; free slots compute a token that nobody reads. A
prompt is prefilled TILE_ROWS tokens of one sequence at a time, from multiples of TILE_ROWS. Attention reads as many
blocks as a sequence needs, and sampling processes one row at a time. A kernel may still treat the rows of one shape
differently; `check_rows` tests this machine's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from rlite.engine.embedded.attention import TILE_ROWS, DecodePlan
from rlite.engine.embedded.cache import SlotCache
from rlite.engine.embedded.model import ShardedModel
from rlite.engine.embedded.sampling import SamplingBatch, sample
from rlite.engine.embedded.scheduler import Chunk
from rlite.errors import ConfigError

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

    def __init__(self, model: ShardedModel, cache: SlotCache, lengths: Sequence[int], positions: torch.Tensor) -> None:
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

    def __call__(self, step: int, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits `[rows, vocabulary]` of tokens `[rows]`."""
        tokens = F.pad(tokens, (0, self._positions.shape[1] - self._num_rows))
        logits = []
        for index, plan in enumerate(self._plans):
            if step:
                plan.go_to(step)
            rows = slice(index * DECODE_ROWS, (index + 1) * DECODE_ROWS)
            logits.append(self._model.logits(tokens[rows], self._positions[step, rows], plan))
        return torch.cat(logits)[: self._num_rows]


def sample_each(
    logits: torch.Tensor, batches: Sequence[SamplingBatch], uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the results of `sample`, computed one row at a time.

    Args:
        logits: `[rows, vocabulary]`.
        batches: sampling parameters of each row.
        uniform: random numbers in [0, 1), `[rows]`.
    """
    parts = [sample(logits[r : r + 1], batch, uniform[r : r + 1]) for r, batch in enumerate(batches)]
    tokens, taken, taken_of_cut = (torch.cat(part) for part in zip(*parts, strict=True))
    return tokens, taken, taken_of_cut


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
                "that a request's place would show; use one thread for each device, or another dtype"
            )
