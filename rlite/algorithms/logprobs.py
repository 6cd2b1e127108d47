"""Compute log-probabilities and entropies of tokens, without a second copy of the logits.

A softmax over T x V in float32 is the largest tensor of a training step. Here the forward and the backward pass process
the rows in chunks. The forward pass keeps one or two numbers per row, and the backward pass computes each chunk's
softmax again.

The columns of the vocabulary may also come in blocks, one after the other or one per rank. With x = logits /
temperature, four numbers per row are enough. The numbers of two blocks determine the numbers of both together:

    greatest m = max_v x_v    total s = sum_v exp(x_v - m)    moment t = sum_v exp(x_v - m) (x_v - m)    label x_l
    log p_l = x_l - m - log s         d/dx_v = [v = l] - p_v
    H = log s - t / s                 d/dx_v = -p_v (log p_v + H)

(m and s: "Online normalizer calculation for softmax", arXiv:1805.02867.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlite.algorithms.shapes import CuSeqlens, Logits, Tokens
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
        raise ConfigError(
            f"logits {list(logits.shape)} need labels of shape {list(logits.shape[:-1])}, found {list(labels.shape)}"
        )
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


def next_token(
    x: Shaped[Tensor, "tokens *rest"], cu_seqlens: CuSeqlens | None = None, fill: float = 0
) -> Shaped[Tensor, "tokens *rest"]:
    """Return values shifted by one position to the left inside each sequence.

    The shift aligns a token's values (ids, masks, rewards, the sampler's log-probabilities) with the position whose
    logits predict the token.

    Args:
        x: values, packed `[T, ...]` with `cu_seqlens`, or padded `[B, L]` without.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
        fill: value at each sequence's last position.
    """
    shifted = x.roll(-1, dims=1 if cu_seqlens is None else 0)
    if cu_seqlens is None:
        shifted[:, -1:] = fill
    elif len(x):
        # an empty sequence at the front points at -1, the last position of all, which is filled anyway
        shifted[cu_seqlens[1:].long() - 1] = fill
    return shifted


def previous_token(
    x: Shaped[Tensor, "tokens *rest"], cu_seqlens: CuSeqlens | None = None, fill: float = 0
) -> Shaped[Tensor, "tokens *rest"]:
    """Return values shifted by one position to the right inside each sequence, the inverse of `next_token`.

    The shift moves values computed at the position that predicts a token, such as its log-probability, to the token
    itself.

    Args:
        x: values, packed `[T, ...]` with `cu_seqlens`, or padded `[B, L]` without.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
        fill: value at each sequence's first position.
    """
    shifted = x.roll(1, dims=1 if cu_seqlens is None else 0)
    if cu_seqlens is None:
        shifted[:, :1] = fill
    elif len(x):
        starts = cu_seqlens[:-1].long()
        # an empty sequence at the end points at T, which does not exist; position 0 is filled anyway
        shifted[torch.where(starts < len(x), starts, 0)] = fill
    return shifted


def check_temperature(temperature: float) -> float:
    """Return the temperature.

    Raises:
        ConfigError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature}: expected a positive number (greedy sampling has temperature 1)")
    return float(temperature)


def _rows_at_once(logits: Tensor, chunk_size: int | None) -> int:
    elements = _CPU_CHUNK if logits.device.type == "cpu" else _GPU_CHUNK
    return chunk_size or max(1, elements // max(1, logits.shape[-1]))


class _GatherLogprobs(torch.autograd.Function):
    """An autograd function for log-probabilities and entropies, by chunks of rows.

    Labels count from the first column of `logits`.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, chunk_size: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """Return the labels' log-probabilities, and the entropies.

        Args:
            ctx: context of the backward pass.
            logits: logits, `[T, V]` or `[B, L, V]`.
            labels: token ids, counted from the first column of `logits`, `[T]` or `[B, L]`.
            temperature: divisor of the logits.
            chunk_size: rows per chunk.
            group: ranks that share the vocabulary.
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

        Args:
            ctx: context of the forward pass.
            grad_logprobs: gradient with respect to the log-probabilities; None if they were not used.
            grad_entropies: gradient with respect to the entropies; None if they were not used.
        """
        logits, labels, log_sums, entropies = ctx.saved_tensors
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        flat_grad = grad.view(len(labels), logits.shape[-1])
        by_logprobs = torch.zeros_like(log_sums) if grad_logprobs is None else grad_logprobs.reshape(-1)
        by_entropies = None if grad_entropies is None else grad_entropies.reshape(-1)
        for rows, chunk in _row_chunks(logits, ctx.chunk_size):
            flat_grad[rows] = block_gradient(
                chunk,
                labels[rows],
                ctx.temperature,
                log_sums[rows],
                entropies[rows],
                by_logprobs[rows],
                None if by_entropies is None else by_entropies[rows],
            )
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


# -- softmax over blocks of columns --

Statistics = Float[Tensor, "4 rows"]
"""m, s, t and x_l of each row"""
Rows = Float[Tensor, " rows"]
Block = Float[Tensor, "rows columns"]
_LEAST = -1e4
"""stands for a logarithm of 0: its exponential is 0, and times 0 it is 0"""


def block_statistics(logits: Block, labels: Int[Tensor, " rows"], temperature: float) -> Statistics:
    """Return m, s, t and x_l of a block of columns, in float32 (float64 for float64 logits).

    Args:
        logits: a block of columns, `[rows, columns]`.
        labels: token ids, counted from the block's first column, `[rows]`. x_l is -inf for a label in another block.
        temperature: divisor of the logits.
    """
    x = scaled(logits, temperature)
    if x.shape[-1] == 0:
        return no_statistics(labels, x.dtype)
    greatest = x.amax(-1).clamp(min=torch.finfo(x.dtype).min)
    z = (x - greatest[:, None]).clamp_(min=_LEAST)
    exponentials = z.exp()
    is_here = (labels >= 0) & (labels < x.shape[-1])
    label = x.gather(-1, labels.clamp(0, x.shape[-1] - 1)[:, None])[:, 0].where(is_here, -torch.inf)
    return torch.stack([greatest, exponentials.sum(-1), z.mul_(exponentials).sum(-1), label])


def no_statistics(labels: Int[Tensor, " rows"], dtype: torch.dtype) -> Statistics:
    """Return the statistics of a block without columns."""
    values = labels.new_tensor([torch.finfo(dtype).min, 0, 0, -torch.inf], dtype=dtype)
    return values[:, None].repeat(1, len(labels))


def merge(first: Statistics, second: Statistics) -> Statistics:
    """Return the statistics of two blocks together."""
    greatest, label = torch.maximum(first[0], second[0]), torch.maximum(first[3], second[3])
    totals = [_moved(statistics, greatest) for statistics in (first, second)]
    return torch.stack([greatest, *(totals[0] + totals[1]), label])


def merge_over(group: dist.ProcessGroup, statistics: Statistics) -> Statistics:
    """Return the statistics of the blocks of all ranks together, on every rank."""
    greatest_and_label = statistics[[0, 3]]
    dist.all_reduce(greatest_and_label, dist.ReduceOp.MAX, group=group)
    totals = _moved(statistics, greatest_and_label[0])
    dist.all_reduce(totals, group=group)
    return torch.stack([greatest_and_label[0], *totals, greatest_and_label[1]])


def logprobs_and_entropy(statistics: Statistics) -> tuple[Rows, Rows, Rows]:
    """Return log p_l, H and log sum_v exp(x_v) of rows from the statistics of all their columns."""
    greatest, total, moment, label = statistics
    log_total = total.log()
    return label - greatest - log_total, log_total - moment / total, greatest + log_total


def block_gradient(
    logits: Block,
    labels: Int[Tensor, " rows"],
    temperature: float,
    log_sums: Rows,
    entropies: Rows,
    grad_logprobs: Rows,
    grad_entropies: Rows | None,
) -> Block:
    """Return the gradient with respect to a block of logits, in the dtype of its statistics.

    Args:
        logits: a block of columns, `[rows, columns]`.
        labels: token ids, counted from the block's first column, `[rows]`.
        temperature: divisor of the logits.
        log_sums: log sum_v exp(x_v) over all columns, `[rows]`.
        entropies: H of the rows, `[rows]`.
        grad_logprobs: gradient with respect to log p_l, `[rows]`.
        grad_entropies: gradient with respect to H, `[rows]`; None is 0.
    """
    grad_logprobs = grad_logprobs[:, None] / temperature
    log_p = (scaled(logits, temperature) - log_sums[:, None]).clamp_(min=_LEAST)
    if grad_entropies is None:
        out = log_p.exp_().mul_(-grad_logprobs)
    else:
        p = log_p.exp()
        slope = (grad_entropies / -temperature)[:, None]
        out = log_p.add_(entropies[:, None]).mul_(slope).sub_(grad_logprobs).mul_(p)
    if out.shape[-1] == 0:
        return out
    is_here = (labels >= 0) & (labels < out.shape[-1])
    return out.scatter_add_(-1, labels.clamp(0, out.shape[-1] - 1)[:, None], grad_logprobs * is_here[:, None])


def _moved(statistics: Tensor, greatest: Tensor) -> Tensor:
    """Return s and t `[2, rows]` for another m, which must not be less than the present m."""
    shift = (statistics[0] - greatest).clamp_(min=_LEAST)
    return torch.stack([statistics[1], statistics[2] + statistics[1] * shift]) * shift.exp()


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature in float32 (float64 for float64 logits)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature
