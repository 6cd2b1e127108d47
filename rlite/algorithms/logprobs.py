"""Log-probabilities and entropies of tokens, without a second copy of the logits.

A softmax over T x V in float32 is the largest tensor of a training step. Here both directions walk over the rows in
chunks: the forward keeps a number or two per row, the backward makes each chunk's softmax again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlite.algorithms.softmax import (
    block_gradient,
    block_statistics,
    logprobs_and_entropy,
    merge_over,
    no_statistics,
)
from rlite.errors import ConfigError

# default chunks, in elements: on a CPU what its cache holds, on a GPU what keeps it busy
_CPU_CHUNK = 1 << 20
_GPU_CHUNK = 1 << 26


def gather_logprobs(
    logits: Float[Tensor, "*tokens vocab"],
    labels: Int[Tensor, "*tokens"],
    temperature: float = 1.0,
    *,
    chunk_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    start: int = 0,
) -> Float[Tensor, "*tokens"]:
    """log p(label) under softmax(logits / temperature), in float32 (float64 for float64 logits).

    Labels are already aligned with the logits that predict them (see `next_token`) and lie in [0, V): give masked
    positions any valid id; one outside gives -inf. `chunk_size` is the number of rows that are worked on at once.

    With a `group`, each of its ranks gives its own columns of the same rows, the first of which is the token id
    `start`, and the same labels; each gets the whole result, and the gradient of its own columns.

    Raises: ConfigError when the shapes do not fit or temperature is not positive.
    """
    return _logprobs(logits, labels, temperature, chunk_size, group, start, with_entropy=False)[0]


def gather_logprobs_entropy(
    logits: Float[Tensor, "*tokens vocab"],
    labels: Int[Tensor, "*tokens"],
    temperature: float = 1.0,
    *,
    chunk_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    start: int = 0,
) -> tuple[Float[Tensor, "*tokens"], Float[Tensor, "*tokens"]]:
    """`gather_logprobs` and `entropy` in one pass over the logits."""
    return _logprobs(logits, labels, temperature, chunk_size, group, start, with_entropy=True)


def entropy(
    logits: Float[Tensor, "*tokens vocab"], temperature: float = 1.0, *, chunk_size: int | None = None
) -> Float[Tensor, "*tokens"]:
    """H = -sum_v p_v log p_v of softmax(logits / temperature), in nats."""
    labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _logprobs(logits, labels, temperature, chunk_size, None, 0, with_entropy=True)[1]


@torch.no_grad()
def sum_pi_squared(
    logits: Float[Tensor, "*tokens vocab"], temperature: float = 1.0, *, chunk_size: int | None = None
) -> Float[Tensor, "*tokens"]:
    """sum_v p_v^2 of softmax(logits / temperature), which `optimal_token_advantages` asks for; without a gradient."""
    scale, flat = 1 / check_temperature(temperature), logits.flatten(0, -2)
    sums = [
        ((2 * rows).logsumexp(-1) - 2 * rows.logsumexp(-1)).exp()
        for rows in (
            chunk.to(torch.promote_types(chunk.dtype, torch.float32)) * scale
            for chunk in flat.split(_rows_at_once(logits, chunk_size))
        )
    ]
    return torch.cat(sums).view(logits.shape[:-1])


def next_token(
    x: Shaped[Tensor, "tokens *rest"], cu_seqlens: Int[Tensor, " sequences+1"] | None = None, fill: float = 0
) -> Shaped[Tensor, "tokens *rest"]:
    """The value of the next position inside each sequence, `fill` at each sequence's last one.

    Aligns what belongs to a token (ids, masks, rewards, log-probabilities of the sampler) with the position whose
    logits predict it. `x` is packed `[T, ...]` with `cu_seqlens`, or padded `[B, L]` without.
    """
    if cu_seqlens is None:
        shifted = x.roll(-1, dims=1)
        shifted[:, -1:] = fill
        return shifted
    shifted = x.roll(-1, dims=0)
    if len(x):
        # an empty sequence at the front points at -1, the last position of all, which is filled anyway
        shifted[cu_seqlens[1:].long() - 1] = fill
    return shifted


def previous_token(
    x: Shaped[Tensor, "tokens *rest"], cu_seqlens: Int[Tensor, " sequences+1"] | None = None, fill: float = 0
) -> Shaped[Tensor, "tokens *rest"]:
    """The inverse of `next_token`: the value of the position before, `fill` at each sequence's first one.

    Puts what was computed where a token is predicted (its log-probability) on the token itself.
    """
    if cu_seqlens is None:
        shifted = x.roll(1, dims=1)
        shifted[:, :1] = fill
        return shifted
    shifted = x.roll(1, dims=0)
    if len(x):
        starts = cu_seqlens[:-1].long()
        # an empty sequence at the end points at T, which does not exist; position 0 is filled anyway
        shifted[torch.where(starts < len(x), starts, 0)] = fill
    return shifted


def check_temperature(temperature: float) -> float:
    """Raises: ConfigError unless it is positive."""
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature}: expected a positive number (greedy sampling has temperature 1)")
    return float(temperature)


def _logprobs(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    chunk_size: int | None,
    group: dist.ProcessGroup | None,
    start: int,
    *,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    if logits.shape[:-1] != labels.shape:
        raise ConfigError(
            f"logits {list(logits.shape)} need labels of shape {list(logits.shape[:-1])}, found {list(labels.shape)}"
        )
    rows = _rows_at_once(logits, chunk_size)
    logprobs, entropies = _GatherLogprobs.apply(
        logits, labels.long() - start, check_temperature(temperature), rows, group, with_entropy
    )
    return logprobs, entropies


def _rows_at_once(logits: Tensor, chunk_size: int | None) -> int:
    elements = _CPU_CHUNK if logits.device.type == "cpu" else _GPU_CHUNK
    return chunk_size or max(1, elements // max(1, logits.shape[-1]))


class _GatherLogprobs(torch.autograd.Function):
    """The formulas are those of `rlite.algorithms.softmax`; labels count from the first column of `logits`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        chunk_size: int,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        flat_labels = labels.reshape(-1)
        statistics = no_statistics(flat_labels, torch.promote_types(logits.dtype, torch.float32))
        for rows, chunk in _row_chunks(logits, chunk_size):
            statistics[:, rows] = block_statistics(chunk, flat_labels[rows], temperature)
        if group is not None:
            statistics = merge_over(group, statistics)
        logprobs, entropies, log_sums = logprobs_and_entropy(statistics)
        ctx.save_for_backward(logits, flat_labels, log_sums, entropies)
        ctx.temperature, ctx.chunk_size, ctx.with_entropy = temperature, chunk_size, with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs.view(labels.shape), entropies.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, log_sums, entropies = ctx.saved_tensors
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        flat_grad = grad.view(len(labels), logits.shape[-1])
        by_logprobs, by_entropies = grad_logprobs.reshape(-1), grad_entropies.reshape(-1)
        for rows, chunk in _row_chunks(logits, ctx.chunk_size):
            flat_grad[rows] = block_gradient(
                chunk,
                labels[rows],
                ctx.temperature,
                log_sums[rows],
                entropies[rows],
                by_logprobs[rows],
                by_entropies[rows] if ctx.with_entropy else None,
            )
        return grad, None, None, None, None, None


def _row_chunks(logits: Tensor, chunk_size: int) -> Iterator[tuple[slice, Tensor]]:
    """Views of at most `chunk_size` rows `[rows, V]`, with their place among all rows.

    `logits[:, :-1]` cannot be flattened without a copy of everything, so it is taken one batch row at a time.
    """
    flattens = logits.dim() != 3 or logits.is_contiguous()
    pieces = (logits.reshape(logits.shape[:-1].numel(), logits.shape[-1]),) if flattens else logits.unbind(0)
    start = 0
    for piece in pieces:
        for chunk in piece.split(chunk_size):
            yield slice(start, start + len(chunk)), chunk
            start += len(chunk)
