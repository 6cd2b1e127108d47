"""Log-probabilities straight from hidden states and the output embedding, without ever holding all logits.

For 4,096 tokens and a vocabulary of 151,936 the logits take 2.5 GB in float32, and their gradient as much. Here both
directions walk over the vocabulary in blocks: of a block's logits the forward keeps four numbers per token, and the
backward computes them again. A block's rows of the weight's gradient are made at once, by one multiplication over all
tokens; nothing is added up in a narrow dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from rlite.algorithms.logprobs import (
    block_gradient,
    block_statistics,
    check_temperature,
    logprobs_and_entropy,
    merge,
    merge_over,
    no_statistics,
)
from rlite.algorithms.on_logprobs import TokenLogprobs
from rlite.errors import ConfigError
from rlite.nn.linear import linear
from rlite.parallel.context import ContextShare

# logits that are worked on at once
_CPU_BLOCK = 1 << 20
_GPU_BLOCK = 1 << 26
# a narrower block would keep neither BLAS nor the memory of the hidden states' gradient busy with much else
_NARROWEST = 256
# logits that wait for the backward pass instead of being computed again
_CPU_KEPT = 1 << 26
_GPU_KEPT = 1 << 27


def linear_logprobs(
    hidden: Float[Tensor, "*tokens width"],
    weight: Float[Tensor, "vocab width"],
    labels: Int[Tensor, "*tokens"],
    temperature: float = 1.0,
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    group: dist.ProcessGroup | None = None,
    start: int = 0,
    block_size: int | None = None,
    num_kept: int | None = None,
) -> TokenLogprobs:
    """Compute log-probabilities and entropies from hidden states in the memory of a few blocks of logits.

    The result is `gather_logprobs_entropy(hidden @ weight.T + bias, labels, temperature)`. Logits have the dtype of
    `hidden`; their statistics, and the results, are in float32 (float64 for float64).

    Args:
        hidden: [..., width].
        weight: [vocabulary, width].
        labels: [...], token ids aligned with the hidden states that predict them; an id outside the vocabulary gives
            -inf.
        temperature: divides the logits.
        bias: [vocabulary].
        group: ranks that hold a part of the vocabulary each: rows of `weight` and `bias` (any number) from token id
            `start` on. All ranks pass the same hidden states and labels, and get the same results. The gradient of
            `hidden` is summed over the group here, and is complete on each rank if all give the results the same
            gradients; gradients of `weight` and `bias` are each rank's own.
        start: token id of this rank's first row.
        block_size: rows of `weight` that are computed at once.
        num_kept: logits that may wait for the backward pass instead of being recomputed.

    Returns:
        Log-probabilities and entropies [...].

    Raises:
        ConfigError: shapes do not fit, or the temperature is not positive.
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ConfigError(
            f"hidden states {list(hidden.shape)} need labels {list(hidden.shape[:-1])} and a weight "
            f"[vocabulary, {hidden.shape[-1]}], found {list(labels.shape)} and {list(weight.shape)}"
        )
    on_cpu = hidden.device.type == "cpu"
    if block_size is None:
        elements = _CPU_BLOCK if on_cpu else _GPU_BLOCK
        block_size = max(_NARROWEST, elements // max(1, labels.numel()))
    if num_kept is None:
        num_kept = _CPU_KEPT if on_cpu else _GPU_KEPT
    has_backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    logprobs, entropies = _LinearLogprobs.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        labels.reshape(-1).long() - start,
        check_temperature(temperature),
        group,
        block_size,
        num_kept if has_backward else 0,
    )
    return TokenLogprobs(logprobs.view(labels.shape), entropies.view(labels.shape))


@dataclass(frozen=True)
class HeadAnswer:
    """Values that an output embedding returned in place of logits."""

    values: Float[Tensor, "batch tokens 2"]
    version: int

    def is_what_became(self, output: Tensor, share: ContextShare) -> bool:
        """Return True if `output` is these values or a view of them, and nothing has written to them since.

        If ranks share a pack, `output` is compared with the gathered values.
        """
        if share.group is not None:
            gathered, found = share.gather_results(self.values.detach()[0]), output.detach()
            if gathered.shape != found.shape:
                return False
            return bool(((gathered == found) | (gathered.isnan() & found.isnan())).all())  # the same on every rank
        is_same = output.data_ptr() == self.values.data_ptr() and output.numel() == self.values.numel()
        return is_same and output._version == self.version


@contextmanager
def logprobs_of(
    head: nn.Linear,
    labels: Int[Tensor, " tokens"],
    temperature: float,
    positions: Bool[Tensor, " tokens"] | None = None,
    **options: Any,
) -> Iterator[list[HeadAnswer]]:
    """Make `head` return log-probabilities and entropies [1, T, 2] instead of logits inside the block.

    Args:
        head: the output embedding.
        labels: [T], next tokens.
        temperature: divides the logits.
        positions: bool [T]; values where it is False are 0. None computes all.
        **options: those of `linear_logprobs`.

    Yields:
        A list to which every call of `head` adds its answer.
    """
    answers: list[HeadAnswer] = []

    def forward(hidden: Tensor) -> Tensor:
        rows, wanted = hidden.flatten(0, -2), labels
        if positions is not None:
            rows, wanted = rows[positions], labels[positions]
        weight, bias, part = _local_part(head)
        found = linear_logprobs(rows, weight, wanted, temperature, bias=bias, **part, **options)
        values = torch.stack(found, dim=-1)
        if positions is not None:
            values = values.new_zeros(len(labels), 2).masked_scatter(positions[:, None], values)
        # FSDP warns of a plain view
        values = torch.ops.aten._unsafe_view(values, [*hidden.shape[:-1], 2])
        answers.append(HeadAnswer(values, values._version))
        return values

    own = vars(head).get("forward")  # a faster one may have been set on this instance
    vars(head)["forward"] = forward
    try:
        yield answers
    finally:
        if own is None:
            del vars(head)["forward"]
        else:
            vars(head)["forward"] = own


def _local_part(head: nn.Linear) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Return this rank's rows of the weight and bias of `head`, and which rows if ranks hold different ones."""
    if not isinstance(head.weight, DTensor):
        return head.weight, head.bias, {}
    weight: Tensor = head.weight.to_local()
    bias = head.bias.to_local() if isinstance(head.bias, DTensor) else None
    if head.weight.placements[-1].is_replicate():
        return weight, bias, {}
    group = head.weight.device_mesh.get_group()
    return weight, bias, {"group": group, "start": group.rank() * len(weight)}


class _LinearLogprobs(torch.autograd.Function):
    """The formulas are those of `rlite.algorithms.logprobs`; labels count from the first row of `weight`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        block_size: int,
        num_kept: int,
    ) -> tuple[Tensor, Tensor]:
        statistics = no_statistics(labels, torch.promote_types(hidden.dtype, torch.float32))
        kept = []
        for first in range(0, len(weight), block_size):
            logits = _logits(hidden, weight, bias, first, block_size)
            statistics = merge(statistics, block_statistics(logits, labels - first, temperature))
            num_kept -= logits.numel()
            if num_kept >= 0:
                kept.append(logits)
        if group is not None:
            statistics = merge_over(group, statistics)
        logprobs, entropies, log_sums = logprobs_and_entropy(statistics)
        ctx.save_for_backward(hidden, weight, bias, labels, log_sums, entropies, *kept)
        ctx.temperature, ctx.group, ctx.block_size = temperature, group, block_size
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_sums, entropies, *kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=log_sums.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_sums)
        if grad_entropies is not None and grad_entropies.device.type == "cpu" and not grad_entropies.any():
            grad_entropies = None  # nobody asked for them; on a GPU asking would take longer than it saves
        for number, first in enumerate(range(0, len(weight), ctx.block_size)):
            rows = slice(first, first + ctx.block_size)
            logits = kept[number] if number < len(kept) else _logits(hidden, weight, bias, first, ctx.block_size)
            grad = block_gradient(
                logits, labels - first, ctx.temperature, log_sums, entropies, grad_logprobs, grad_entropies
            ).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += linear(grad, weight[rows].t())
            if grad_weight is not None:
                grad_weight[rows] = linear(grad.t(), hidden.t())
            if grad_bias is not None:
                grad_bias[rows] = grad.sum(0)
        if grad_hidden is not None:
            if ctx.group is not None:
                dist.all_reduce(grad_hidden, group=ctx.group)
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, first: int, block_size: int) -> Tensor:
    rows = slice(first, first + block_size)
    return linear(hidden, weight[rows], None if bias is None else bias[rows])
