"""What makes a request's bits its own: work in fixed shapes, so that nothing depends on who else is in the batch.

A kernel chooses its blocks, and with them the order of its sums, by the shapes that it is given. So here every forward
has the same number of rows: a decode step takes DECODE_ROWS slots at a time, the free ones among them on a token that
nobody reads; a prompt is prefilled TILE_ROWS tokens of one sequence at a time, from multiples of that. Attention reads
as many blocks as a sequence needs, and sampling takes one row at a time. What is left is that a kernel may treat the
rows of one shape differently; `check_rows` looks whether this machine's do.
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
    """(start, tokens) of the tiles that a chunk is in; `tokens` are the whole sequence's."""
    for start in range(chunk.start - chunk.start % TILE_ROWS, chunk.stop, TILE_ROWS):
        yield start, tokens[start : min(start + TILE_ROWS, chunk.stop)]


class TiledDecoder:
    """The steps of one burst, to be taken in turn, as `ForwardPasses` makes them."""

    def __init__(self, model: ShardedModel, cache: SlotCache, lengths: Sequence[int], positions: torch.Tensor) -> None:
        """`positions` of the tokens that go in, `[steps, rows]`."""
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
        """Tokens `[rows]` to logits `[rows, vocabulary]`."""
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
    """`sample`, a row at a time; `batches` has one of each row."""
    parts = [sample(logits[r : r + 1], batch, uniform[r : r + 1]) for r, batch in enumerate(batches)]
    tokens, taken, taken_of_cut = (torch.cat(part) for part in zip(*parts, strict=True))
    return tokens, taken, taken_of_cut


def check_rows(model: ShardedModel, cache: SlotCache) -> None:
    """Decode one token in all rows of a tile, for a few steps. Raises: ConfigError if the logits differ in any bit."""
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
