"""Log-probabilities, entropies and sums of squares from logits that are in memory, by chunks of rows.

Neither direction holds more than one chunk in float32. The formulas are those of `rlite.algorithms.logprobs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlite.algorithms.logprobs import (
    Statistics,
    block_gradient,
    block_statistics,
    check_temperature,
    logprobs_and_entropy,
    moved,
    no_statistics,
    scaled,
)
from rlite.algorithms.shapes import Logits, Tokens
from rlite.errors import ConfigError

# default chunks, in elements: on a CPU what its cache holds, on a GPU what keeps it busy
_CPU_CHUNK = 1 << 20
_GPU_CHUNK = 1 << 26


def gather_logprobs(
    logits: Logits,
    labels: Int[Tensor, "*tokens"],
    temperature: float = 1.0,
    *,
    chunk_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    start: int = 0,
) -> Tokens:
    """Return log p(label) under softmax(logits / temperature), in float32 (float64 for float64 logits).

    Args:
        logits: logits, `[T, V]` or `[B, L, V]`.
        labels: token ids, `[T]` or `[B, L]`, aligned with the logits that predict them (see `next_token`). Give masked
            positions any id in [0, V). An id outside has log-probability -inf.
        temperature: divisor of the logits.
        chunk_size: rows per chunk; default: as many as the device's cache holds.
        group: ranks that share the vocabulary. Each rank gives its own columns of the same rows, and the same labels.
            It receives the whole result, and the gradient of its own columns.
        start: token id of this rank's first column.

    Raises:
        ConfigError: the shapes do not fit, or temperature is not positive.
    """
    return gather_logprobs_entropy(logits, labels, temperature, chunk_size=chunk_size, group=group, start=start)[0]


def gather_logprobs_entropy(
    logits: Logits,
    labels: Int[Tensor, "*tokens"],
    temperature: float = 1.0,
    *,
    chunk_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    start: int = 0,
) -> tuple[Tokens, Tokens]:
    """Return `gather_logprobs` and `entropy` in one pass over the logits.

    Args:
        logits: logits, `[T, V]` or `[B, L, V]`.
        labels: token ids, `[T]` or `[B, L]`; see `gather_logprobs` for this and the following arguments.
        temperature: divisor of the logits.
        chunk_size: rows per chunk.
        group: ranks that share the vocabulary.
        start: token id of this rank's first column.

    Raises:
        ConfigError: the shapes do not fit, or temperature is not positive.
    """
    if logits.shape[:-1] != labels.shape:
        wanted, found = list(logits.shape[:-1]), list(labels.shape)
        raise ConfigError(f"logits {list(logits.shape)} need labels of shape {wanted}, found {found}")
    rows = _rows_at_once(logits, chunk_size)
    return _GatherLogprobs.apply(logits, labels.long() - start, check_temperature(temperature), rows, group)


def entropy(logits: Logits, temperature: float = 1.0, *, chunk_size: int | None = None) -> Tokens:
    """Return H = -sum_v p_v log p_v of softmax(logits / temperature), in nats.

    Args:
        logits: logits, `[T, V]` or `[B, L, V]`.
        temperature: divisor of the logits.
        chunk_size: rows per chunk.
    """
    labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return gather_logprobs_entropy(logits, labels, temperature, chunk_size=chunk_size)[1]


@torch.no_grad()
def sum_pi_squared(logits: Logits, temperature: float = 1.0, *, chunk_size: int | None = None) -> Tokens:
    """Return sum_v p_v^2 of softmax(logits / temperature), for `optimal_token_advantages`; without a gradient.

    Args:
        logits: logits, `[T, V]` or `[B, L, V]`.
        temperature: divisor of the logits.
        chunk_size: rows per chunk.
    """
    temperature, sums = check_temperature(temperature), []
    for chunk in logits.flatten(0, -2).split(_rows_at_once(logits, chunk_size)):
        rows = scaled(chunk, temperature)
        sums.append(((2 * rows).logsumexp(-1) - 2 * rows.logsumexp(-1)).exp())
    return torch.cat(sums).view(logits.shape[:-1])


def _rows_at_once(logits: Tensor, chunk_size: int | None) -> int:
    elements = _CPU_CHUNK if logits.device.type == "cpu" else _GPU_CHUNK
    return chunk_size or max(1, elements // max(1, logits.shape[-1]))


def merge_over(group: dist.ProcessGroup, statistics: Statistics) -> Statistics:
    """Return the statistics of the blocks of all ranks together, on every rank."""
    greatest_and_label = statistics[[0, 3]]
    dist.all_reduce(greatest_and_label, dist.ReduceOp.MAX, group=group)
    totals = moved(statistics, greatest_and_label[0])
    dist.all_reduce(totals, group=group)
    return torch.stack([greatest_and_label[0], *totals, greatest_and_label[1]])


class _GatherLogprobs(torch.autograd.Function):
    """An autograd function for log-probabilities and entropies, by chunks of rows.

    Labels count from the first column of `logits`.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, chunk_size: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """Return the labels' log-probabilities, and the entropies.

        `logits`: logits, `[T, V]` or `[B, L, V]`. `labels`: token ids, counted from the first column of `logits`, `[T]`
        or `[B, L]`.
        """
        flat_labels = labels.reshape(-1)
        statistics = no_statistics(flat_labels, torch.promote_types(logits.dtype, torch.float32))
        for rows, chunk in _row_chunks(logits, chunk_size):
            statistics[:, rows] = block_statistics(chunk, flat_labels[rows], temperature)
        if group is not None:
            statistics = merge_over(group, statistics)
        logprobs, entropies, log_sums = logprobs_and_entropy(statistics)
        ctx.save_for_backward(logits, flat_labels, log_sums, entropies)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        return logprobs.view(labels.shape), entropies.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient with respect to the logits, and None for the other arguments.

        `grad_logprobs`: gradient with respect to the log-probabilities; None if they were not used. `grad_entropies`:
        gradient with respect to the entropies; None if they were not used.
        """
        logits, labels, log_sums, entropies = ctx.saved_tensors
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        flat_grad = grad.view(len(labels), logits.shape[-1])
        by_logprobs = torch.zeros_like(log_sums) if grad_logprobs is None else grad_logprobs.reshape(-1)
        by_entropies = None if grad_entropies is None else grad_entropies.reshape(-1)
        for rows, chunk in _row_chunks(logits, ctx.chunk_size):
            own = (log_sums[rows], entropies[rows], by_logprobs[rows])
            slopes = None if by_entropies is None else by_entropies[rows]
            flat_grad[rows] = block_gradient(chunk, labels[rows], ctx.temperature, *own, slopes)
        return grad, None, None, None, None


def _row_chunks(logits: Tensor, chunk_size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield views of at most `chunk_size` rows `[rows, V]`, with their place among all rows.

    `logits[:, :-1]` cannot be flattened without a full copy, so it is processed one batch row at a time.
    """
    flattens = logits.dim() != 3 or logits.is_contiguous()
    pieces = (logits.reshape(logits.shape[:-1].numel(), logits.shape[-1]),) if flattens else logits.unbind(0)
    start = 0
    for piece in pieces:
        for chunk in piece.split(chunk_size):
            yield slice(start, start + len(chunk)), chunk
            start += len(chunk)
