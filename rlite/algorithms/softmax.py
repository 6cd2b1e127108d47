"""Softmax over logits that are seen in blocks of columns, one after the other or each on a rank of its own.

With x = logits / temperature, four numbers per row are enough, and those of two blocks make those of both:

    greatest m = max_v x_v    total s = sum_v exp(x_v - m)    moment t = sum_v exp(x_v - m) (x_v - m)    label x_l
    log p_l = x_l - m - log s         d/dx_v = [v = l] - p_v
    H = log s - t / s                 d/dx_v = -p_v (log p_v + H)

(m and s: "Online normalizer calculation for softmax", arXiv:1805.02867.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

_LEAST = -1e4
"""stands for a logarithm of 0: its exponential is 0, and times 0 it is 0"""


def block_statistics(
    logits: Float[Tensor, "rows columns"], labels: Int[Tensor, " rows"], temperature: float
) -> Float[Tensor, "4 rows"]:
    """What a block says of its rows: m, s, t and x_l, in float32 (float64 for float64 logits).

    `labels` count from the block's first column; x_l is -inf where the label is in another block.
    """
    x = _scaled(logits, temperature)
    if x.shape[-1] == 0:
        return no_statistics(labels, x.dtype)
    greatest = x.amax(-1).clamp(min=torch.finfo(x.dtype).min)
    z = (x - greatest[:, None]).clamp_(min=_LEAST)
    exponentials = z.exp()
    is_here = (labels >= 0) & (labels < x.shape[-1])
    label = x.gather(-1, labels.clamp(0, x.shape[-1] - 1)[:, None])[:, 0].where(is_here, -torch.inf)
    return torch.stack([greatest, exponentials.sum(-1), z.mul_(exponentials).sum(-1), label])


def no_statistics(labels: Int[Tensor, " rows"], dtype: torch.dtype) -> Float[Tensor, "4 rows"]:
    """The statistics of no columns at all."""
    values = labels.new_tensor([torch.finfo(dtype).min, 0, 0, -torch.inf], dtype=dtype)
    return values[:, None].repeat(1, len(labels))


def merge(first: Float[Tensor, "4 rows"], second: Float[Tensor, "4 rows"]) -> Float[Tensor, "4 rows"]:
    """The statistics of two blocks together."""
    greatest, label = torch.maximum(first[0], second[0]), torch.maximum(first[3], second[3])
    totals = [_moved(statistics, greatest) for statistics in (first, second)]
    return torch.stack([greatest, *(totals[0] + totals[1]), label])


def merge_over(group: dist.ProcessGroup, statistics: Float[Tensor, "4 rows"]) -> Float[Tensor, "4 rows"]:
    """The statistics of the blocks of all ranks together, on each of them."""
    greatest_and_label = statistics[[0, 3]]
    dist.all_reduce(greatest_and_label, dist.ReduceOp.MAX, group=group)
    totals = _moved(statistics, greatest_and_label[0])
    dist.all_reduce(totals, group=group)
    return torch.stack([greatest_and_label[0], *totals, greatest_and_label[1]])


def logprobs_and_entropy(
    statistics: Float[Tensor, "4 rows"],
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """log p_l, H and log sum_v exp(x_v) of rows whose blocks are all counted."""
    greatest, total, moment, label = statistics
    log_total = total.log()
    return label - greatest - log_total, log_total - moment / total, greatest + log_total


def block_gradient(
    logits: Float[Tensor, "rows columns"],
    labels: Int[Tensor, " rows"],
    temperature: float,
    log_sums: Float[Tensor, " rows"],
    entropies: Float[Tensor, " rows"],
    grad_logprobs: Float[Tensor, " rows"],
    grad_entropies: Float[Tensor, " rows"] | None,
) -> Float[Tensor, "rows columns"]:
    """The gradient with respect to a block of logits, in the dtype of its statistics; `labels` count as there."""
    grad_logprobs = grad_logprobs[:, None] / temperature
    log_p = (_scaled(logits, temperature) - log_sums[:, None]).clamp_(min=_LEAST)
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
    """s and t [2, rows] as they are for another m, which is not less than their own."""
    shift = (statistics[0] - greatest).clamp_(min=_LEAST)
    return torch.stack([statistics[1], statistics[2] + statistics[1] * shift]) * shift.exp()


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature
