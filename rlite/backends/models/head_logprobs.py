"""Log-probabilities straight from hidden states and the output embedding, without ever holding all logits.

For 4,096 tokens and a vocabulary of 151,936 the logits take 2.5 GB in float32, and their gradient as much. Here both
directions walk over the vocabulary in blocks: of a block's logits the forward keeps four numbers per token, and the
backward computes them again. A block's rows of the weight's gradient are made at once, by one multiplication over all
tokens; nothing is added up in a narrow dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from rlite.algorithms import logprobs as formulas
from rlite.algorithms.kept_ids import KeptIds
from rlite.algorithms.logits import merge_over
from rlite.algorithms.logprobs import TokenLogprobs
from rlite.backends.models import batch_invariant
from rlite.backends.models.linear import linear
from rlite.errors import ConfigError
from rlite.runtime.parallel.context_parallel import ContextShare
from rlite.runtime.parallel.upload import upload

# logits that are worked on at once, and logits that wait for the backward pass instead of being computed again
_CPU_BLOCK, _CPU_KEPT = 1 << 20, 1 << 26
_GPU_BLOCK, _GPU_KEPT = 1 << 26, 1 << 27
# a narrower block would keep neither BLAS nor the memory of the hidden states' gradient busy with much else
_NARROWEST = 256
# kernels hold no block in float32, so that a block may be wide: 512 MiB for 16,384 tokens in bfloat16
_FUSED_BLOCK = 1 << 14
Compare = Callable[[nn.Linear, Tensor, Tensor | None], Tensor]
"""(head, hidden states [rows, width], their places among the tokens or None for all) -> values [rows]"""


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
    replay: KeptIds | None = None,
    is_deterministic: bool = False,
    kernels: ModuleType | None = None,
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
        replay: token ids among which the labels were drawn, by flat position. Their log-probabilities are then over
            these ids; entropies and `full_logprobs` are over the vocabulary. None is the vocabulary.
        is_deterministic: compute results whose bits do not depend on the other tokens (`batch_invariant`). `block_size`
            has no effect.
        kernels: `rlite.backends.models.triton_head`, which computes a block in one pass over its logits; None, and
            float64, compute with torch's operations.

    Returns:
        Log-probabilities and entropies [...].

    Raises:
        ConfigError: shapes do not fit, or the temperature is not positive.
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1]:
        needed = f"labels {list(hidden.shape[:-1])} and a weight [vocabulary, {hidden.shape[-1]}]"
        found = f"{list(labels.shape)} and {list(weight.shape)}"
        raise ConfigError(f"hidden states {list(hidden.shape)} need {needed}, found {found}")
    block, kept = (_CPU_BLOCK, _CPU_KEPT) if hidden.device.type == "cpu" else (_GPU_BLOCK, _GPU_KEPT)
    if hidden.dtype == torch.float64:
        kernels = None
    if is_deterministic:
        block_size = batch_invariant.COLUMNS
    elif kernels is not None:
        block_size = block_size or _FUSED_BLOCK
    elif block_size is None:
        block_size = max(_NARROWEST, block // max(1, labels.numel()))
    has_backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    num_kept = 0 if not has_backward else kept if num_kept is None else num_kept
    product = batch_invariant.linear if is_deterministic else linear
    blocks = _Blocks(formulas.check_temperature(temperature), group, start, block_size, num_kept, product, kernels)
    rows, columns = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long() - start
    results = _LinearLogprobs.apply(rows, weight, bias, columns, blocks, replay)
    return TokenLogprobs(*(values.view(labels.shape) for values in results))


class ColumnGate:
    """Lets the gradients of those columns through that a loss has differentiated.

    Models expect one tensor of their head, so that the gradient of its answer has a column of zeros for values that no
    loss reads. Their terms are most of the work of the backward pass, and to compare a column with 0 would make a GPU
    wait.
    """

    reached: Sequence[bool] = ()
    """for each column, whether the backward pass has reached it; () if none has run"""


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, column: Tensor, gate: ColumnGate, number: int) -> Tensor:
        ctx.gate, ctx.number = gate, number
        return column.view_as(column)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        is_open = not ctx.gate.reached or ctx.gate.reached[ctx.number]
        return grad if is_open else None, None, None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, gate: ColumnGate) -> tuple[Tensor, ...]:
        ctx.gate = gate
        ctx.set_materialize_grads(False)
        return tuple(column.contiguous() for column in values.unbind(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        ctx.gate.reached = [grad is not None for grad in grads]
        some = next(grad for grad in grads if grad is not None)
        return torch.stack([torch.zeros_like(some) if grad is None else grad for grad in grads], dim=-1), None


class HeadAnswer(NamedTuple):
    """Values that an output embedding returned in place of logits."""

    values: Float[Tensor, "batch tokens kinds"]
    version: int
    gate: ColumnGate

    def columns(self, output: Float[Tensor, "tokens kinds"]) -> tuple[Float[Tensor, " tokens"], ...]:
        """Return the columns of `output`, which is these values, or these values of other tokens too."""
        return _Columns.apply(output, self.gate)

    def is_what_became(self, output: Tensor, share: ContextShare) -> bool:
        """Return True if `output` is these values or a view of them, and nothing has written to them since.

        If ranks share a pack, `output` is compared with the gathered values.
        """
        if share.group is not None:
            gathered, found = share.gather_computed(self.values.detach()[0]), output.detach()
            is_alike = gathered.shape == found.shape  # the same on every rank
            return is_alike and torch.allclose(found.to(gathered), gathered, rtol=0, atol=0, equal_nan=True)
        is_same = output.data_ptr() == self.values.data_ptr() and output.numel() == self.values.numel()
        return is_same and output._version == self.version


@contextmanager
def logprobs_of(
    head: nn.Linear,
    labels: Int[Tensor, " tokens"],
    temperature: float,
    positions: Bool[Tensor, " tokens"] | None = None,
    kept_ids: KeptIds | None = None,
    is_deterministic: bool = False,
    kernels: ModuleType | None = None,
    compare: Compare | None = None,
) -> Iterator[list[HeadAnswer]]:
    """Make `head` return log-probabilities and entropies [1, T, 2] instead of logits inside the block.

    With `kept_ids` log-probabilities in the whole vocabulary follow, and with `compare` its values.

    `labels`: [T], next tokens. `positions`: bool [T]; values where it is False are 0. None computes all. A mask on the
    host costs no wait for the device. `kept_ids`: token ids among which the labels were drawn; see `linear_logprobs`.
    Yields a list to which every call of `head` adds its answer.
    """
    answers: list[HeadAnswer] = []
    index = None if positions is None else positions.nonzero()[:, 0]
    if index is not None and index.device.type == "cpu":
        index = upload(index, labels.device)
    if index is not None and kept_ids is not None:
        kept_ids = kept_ids.select(index)

    def forward(hidden: Tensor) -> Tensor:
        rows, wanted = hidden.flatten(0, -2), labels
        if index is not None:
            rows, wanted = rows.index_select(0, index), labels.index_select(0, index)
        options: dict[str, Any] = {"replay": kept_ids, "is_deterministic": is_deterministic, "kernels": kernels}
        found = linear_logprobs(rows, labels=wanted, temperature=temperature, **options, **local_part(head))
        columns = [*found, *([] if kept_ids is None else [found.full_logprobs])]
        if compare is not None:
            columns.append(compare(head, rows, index).to(found.logprobs.dtype))
        gate = ColumnGate()
        values = torch.stack([_Gated.apply(column, gate, number) for number, column in enumerate(columns)], dim=-1)
        if index is not None:
            values = values.new_zeros(len(labels), values.shape[-1]).index_copy(0, index, values)
        # FSDP warns of a plain view
        values = torch.ops.aten._unsafe_view(values, [*hidden.shape[:-1], values.shape[-1]])
        answers.append(HeadAnswer(values, values._version, gate))
        return values

    with answering(head, forward):
        yield answers


@contextmanager
def answering(head: nn.Linear, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let `head` compute another function of the hidden states inside of the block."""
    own = {name: value for name, value in vars(head).items() if name == "forward"}  # a faster one may have been set
    vars(head)["forward"] = forward
    try:
        yield
    finally:
        del vars(head)["forward"]
        vars(head).update(own)


@contextmanager
def passed_through(head: nn.Linear) -> Iterator[list[tuple[HeadAnswer, torch.dtype]]]:
    """Make `head` return its input, the last hidden states, inside of the block, in float32 as models cast logits to.

    Yields a list to which every call of `head` adds its answer, and the dtype of the hidden states.
    """
    answers: list[tuple[HeadAnswer, torch.dtype]] = []

    def forward(hidden: Tensor) -> Tensor:
        values = hidden.to(torch.promote_types(hidden.dtype, torch.float32), copy=True)
        answers.append((HeadAnswer(values, values._version, ColumnGate()), hidden.dtype))
        return values

    with answering(head, forward):
        yield answers


def local_part(head: nn.Linear) -> dict[str, Any]:
    """Return this rank's rows of the weight and bias of `head`, and which rows if ranks hold different ones."""
    if not isinstance(head.weight, DTensor):
        return {"weight": head.weight, "bias": head.bias}
    weight: Tensor = head.weight.to_local()
    part = {"weight": weight, "bias": head.bias.to_local() if isinstance(head.bias, DTensor) else None}
    if head.weight.placements[-1].is_replicate():
        return part
    group = head.weight.device_mesh.get_group()
    return part | {"group": group, "start": group.rank() * len(weight)}


class _Blocks(NamedTuple):
    """Walk of `linear_logprobs` over the vocabulary, block by block."""

    temperature: float
    group: dist.ProcessGroup | None
    start: int
    """token id of the first row of the weight"""
    size: int
    num_kept: int
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """multiplies hidden states by rows of the weight"""
    kernels: ModuleType | None
    """the module of fused kernels, if they compute the blocks"""

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, first: int) -> Tensor:
        """Return the logits of one block.

        `hidden`: [tokens, width]. `weight`: [vocabulary, width]. `bias`: [vocabulary].
        """
        rows = slice(first, first + self.size)
        return self.product(hidden, weight[rows], None if bias is None else bias[rows])

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the statistics of one block; labels count from its first column."""
        return (self.kernels or formulas).block_statistics(logits, labels, self.temperature)

    def gradient(self, logits: Tensor, labels: Tensor, totals: tuple[Tensor | None, ...], is_kept: bool) -> Tensor:
        """Return the gradient of one block.

        `logits`: the block; a kernel overwrites it unless it is kept.
        """
        if self.kernels is None:
            return formulas.block_gradient(logits, labels, self.temperature, *totals)  # type: ignore[arg-type]
        out = None if is_kept else logits
        return self.kernels.block_gradient(logits, labels, self.temperature, *totals, out=out)


class _LinearLogprobs(torch.autograd.Function):
    """The formulas are those of `rlite.algorithms.logprobs`; labels count from the first row of `weight`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        hidden, weight, bias, labels, blocks, kept_ids = inputs
        statistics = formulas.no_statistics(labels, torch.promote_types(hidden.dtype, torch.float32))
        restricted = None if kept_ids is None else _KeptLogits(kept_ids, blocks, len(weight), statistics)
        kept, num_kept = [], blocks.num_kept
        for number, first in enumerate(range(0, len(weight), blocks.size)):
            logits = blocks.logits(hidden, weight, bias, first)
            statistics = formulas.merge(statistics, blocks.statistics(logits, labels - first))
            if restricted is not None:
                restricted.read(number, first, logits)
            num_kept -= logits.numel()
            if num_kept >= 0:
                kept.append(logits)
        if blocks.group is not None:
            statistics = merge_over(blocks.group, statistics)
        logprobs, entropies, log_sums = formulas.logprobs_and_entropy(statistics)
        ctx.save_for_backward(hidden, weight, bias, labels, log_sums, entropies, *kept)
        ctx.blocks, ctx.restricted = blocks, restricted
        ctx.set_materialize_grads(False)
        if restricted is None:
            return logprobs, entropies
        return restricted.logprobs(statistics[3], logprobs), entropies, logprobs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None, grad_full_logprobs: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropies is None and grad_full_logprobs is None:
            return (None,) * 6
        hidden, weight, bias, labels, log_sums, entropies, *kept = ctx.saved_tensors
        blocks, restricted = ctx.blocks, ctx.restricted
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=log_sums.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_sums)
        if restricted is not None:
            grad_logprobs = restricted.take_gradient(grad_logprobs, labels, grad_full_logprobs)
        totals = log_sums, entropies, grad_logprobs, grad_entropies
        for number, first in enumerate(range(0, len(weight), blocks.size)):
            rows = slice(first, first + blocks.size)
            is_kept = number < len(kept)
            logits = kept[number] if is_kept else blocks.logits(hidden, weight, bias, first)
            grad = blocks.gradient(logits, labels - first, totals, is_kept)
            if restricted is not None:
                restricted.add_gradient(number, first, grad)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += linear(grad, weight[rows].t())
            if grad_weight is not None:
                grad_weight[rows] = linear(grad.t(), hidden.t())
            if grad_bias is not None:
                grad_bias[rows] = grad.sum(0)
        if grad_hidden is not None:
            if blocks.group is not None:
                dist.all_reduce(grad_hidden, group=blocks.group)
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class _KeptLogits:
    """The logits of the kept ids, gathered block by block, and their gradient, spread block by block."""

    def __init__(self, kept_ids: KeptIds, blocks: _Blocks, num_columns: int, statistics: Tensor) -> None:
        """Plan the walk."""
        self._kept_ids, self._blocks = kept_ids, blocks
        self._columns = kept_ids.ids - blocks.start
        self._is_restricted = kept_ids.is_restricted()
        edges = [*range(0, num_columns, blocks.size), num_columns]
        self._spans = kept_ids.spans(blocks.start + torch.tensor(edges))
        # of all pairs: other ranks have the others
        self._x = statistics.new_full((len(kept_ids.ids),), -torch.inf)

    def read(self, number: int, first: int, logits: Tensor) -> None:
        """Gather the logits of the kept ids in a block.

        `logits`: `[rows, columns]`.
        """
        pairs = slice(*self._spans[number])
        found = logits[self._kept_ids.rows[pairs], self._columns[pairs] - first]
        self._x[pairs] = formulas.scaled(found, self._blocks.temperature)

    def logprobs(self, x_label: Tensor, full_logprobs: Tensor) -> Tensor:
        """Return the log-probabilities of all rows, after all blocks were read."""
        if self._blocks.group is not None:
            dist.all_reduce(self._x, dist.ReduceOp.MAX, group=self._blocks.group)
        log_sums = self._kept_ids.log_sums(self._x)
        self._probabilities = (self._x - log_sums[self._kept_ids.rows]).exp().to(self._x)
        return torch.where(self._is_restricted, (x_label - log_sums).to(full_logprobs), full_logprobs)

    def take_gradient(self, grad_logprobs: Tensor, labels: Tensor, grad_full_logprobs: Tensor | None) -> Tensor:
        """Take the share of the kept ids in the gradient.

        Returns the rest: the gradient with respect to log-probabilities in the whole vocabulary.
        """
        rows = self._kept_ids.rows
        is_label = self._columns == labels[rows]
        self._grad = grad_logprobs[rows] * (is_label.to(self._x) - self._probabilities) / self._blocks.temperature
        rest = torch.where(self._is_restricted, 0.0, grad_logprobs)
        return rest if grad_full_logprobs is None else rest + grad_full_logprobs

    def add_gradient(self, number: int, first: int, grad: Tensor) -> None:
        """Add the gradient of the kept ids to the gradient of a block of logits, in place.

        `grad`: `[rows, columns]`.
        """
        pairs = slice(*self._spans[number])
        grad.index_put_(
            (self._kept_ids.rows[pairs], self._columns[pairs] - first), self._grad[pairs].to(grad), accumulate=True
        )
