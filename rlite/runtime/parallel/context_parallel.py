"""Context parallelism: the ranks of a group share the tokens of one pack (Llama 3, Dubey et al. 2024, section 3.3.2).

Each rank runs the model on two chunks of the pack, an early and a late one, so that causal attention costs all ranks
about the same. Keys and values are gathered from all ranks; a query attends inside its own sequence.

    8 chunks on 4 ranks    0 1 2 3 4 5 6 7
                      rank 0 1 2 3 3 2 1 0

Autograd can differentiate the collectives. After a gather, the ranks either compute the same thing, so that each rank's
gradient is already complete (`grad="slice"`), or each rank uses the tensor for its own part of the work, so that
gradients must be added up (`grad="sum"`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlite.runtime.parallel.prefix_tree import PrefixTree, select_rows
from rlite.runtime.parallel.processes import all_gather_into

# its name since torch 2.13
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(x: Tensor, group: dist.ProcessGroup, dim: int, grad: Literal["slice", "sum"]) -> Tensor:
    """Concatenate the ranks' tensors, which have equal shapes.

    `grad`: "slice" takes this rank's part of the gradient; "sum" adds up the gradients of all ranks. Returns the whole
    tensor, the same on every rank.
    """
    return _run(x, group, dim, _all_gather, _own_part if grad == "slice" else _reduce_scatter)


def split(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Take this rank's part of `x`, which is the same on every rank. The gradient is gathered.

    `dim`: the dimension that is cut into equal parts; the last part is padded with zeros.
    """
    return _run(pad_to_multiple(x, group.size(), dim), group, dim, _own_part, _all_gather)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Add up the ranks' tensors and take this rank's part of the sum. The gradient is gathered.

    `dim`: the dimension that is cut into equal parts; the last part is padded with zeros. Returns this rank's part of
    the sum.
    """
    return _run(pad_to_multiple(x, group.size(), dim), group, dim, _reduce_scatter, _all_gather)


def sum_forward(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks. The gradient, the same on every rank, passes through."""
    return _run(x, group, 0, _all_reduce, _same)


def sum_backward(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x` unchanged. Its gradient is the sum over ranks, each of which uses `x` for its own part of the work."""
    return _run(x, group, 0, _same, _all_reduce)


def pad_to_multiple(x: Tensor, multiple: int, dim: int) -> Tensor:
    """Pad `x` with zeros at the end of a dimension.

    Returns the padded tensor, or `x` itself if nothing is missing.
    """
    missing = -x.shape[dim] % multiple
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, missing]) if missing else x


def _all_gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    rows = x.movedim(dim, 0).contiguous()
    out = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    all_gather_into(out, rows, group=group)
    return _moved(out, dim)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    rows = x.movedim(dim, 0).contiguous()
    out = rows.new_empty(rows.shape[0] // group.size(), *rows.shape[1:])
    _reduce_scatter_into(out, rows, group=group)
    return _moved(out, dim)


def _moved(x: Tensor, dim: int) -> Tensor:
    """Return `x` with its first axis at `dim`, contiguous and not a view: FSDP requires that of module outputs."""
    moved = x.movedim(0, dim)
    return torch.ops.aten._unsafe_view(x, moved.shape) if moved.is_contiguous() else moved.contiguous()


def _own_part(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].clone()  # autograd takes no view


def _all_reduce(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _same(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return x.view_as(x)


Collective = Callable[[Tensor, dist.ProcessGroup, int], Tensor]


def _run(x: Tensor, group: dist.ProcessGroup, dim: int, forward: Collective, backward: Collective) -> Tensor:
    return x if group.size() == 1 else _Differentiable.apply(x, group, dim % x.dim(), forward, backward)


class _Differentiable(torch.autograd.Function):
    """A linear collective, with the collective that is its transpose."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, forward: Collective, transpose: Collective
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.transpose = group, dim, transpose
        return forward(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.transpose(grad, ctx.group, ctx.dim), None, None, None, None


@dataclass(frozen=True)
class Segment:
    """Queries of one chunk that belong to one sequence, and the keys that they may attend to."""

    queries: slice
    """among this rank's tokens"""
    keys: Tensor
    """[K] int64, in the whole pack; the last key is that of the last query"""


class ContextShare:
    """One rank's tokens of a pack. Padding gives all ranks equally many.

    `cu_seqlens`: [N + 1], boundaries of the sequences in the pack. `group`: the ranks that share the pack; None keeps
    the whole pack on this rank. `tree`: the nodes that are computed in place of tokens; see
    `rlite.runtime.parallel.prefix_tree`.
    """

    def __init__(self, cu_seqlens: Tensor, group: dist.ProcessGroup | None, tree: PrefixTree | None = None) -> None:
        self.group, self.tree = group, tree
        if self.is_whole:
            return
        bounds = cu_seqlens.tolist() if tree is None else tree.borders
        paths = [torch.arange(*pair) for pair in pairwise(bounds)] if tree is None else tree.paths
        self.num_tokens = bounds[-1]
        """tokens that all ranks compute"""
        if group is None:
            self.segments = _find_segments(bounds, paths, [0], self.num_tokens)
            return
        size = group.size()
        self.chunk = -(-self.num_tokens // (2 * size))
        order = [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
        starts = torch.tensor(order)[:, None] * self.chunk
        self._order = (starts + torch.arange(self.chunk)).flatten().to(cu_seqlens.device)
        """the place among the computed tokens of each token, rank after rank"""
        self._position = self._order.argsort()
        if (total := self.chunk * 2 * size) > self.num_tokens:  # what fills up is a sequence of its own
            bounds, paths = [*bounds, total], [*paths, torch.arange(self.num_tokens, total)]
        self.segments = _find_segments(bounds, paths, order[2 * group.rank() : 2 * group.rank() + 2], self.chunk)

    @property
    def is_whole(self) -> bool:
        """True if this rank computes every token of the pack by itself."""
        return self.group is None and self.tree is None

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of `x` [T, ...]; padding is zero."""
        return self._own(x if self.tree is None else x[self.tree.tokens])

    def take_any(self, mask: Tensor) -> Tensor:
        """Return `take(mask)` of a mask [T]; a node is in it if one of the node's tokens is."""
        return self._own(mask if self.tree is None else self.tree.any(mask))

    def _own(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x
        return pad_to_multiple(x, 2 * self.group.size() * self.chunk, dim=0)[self._own_order(self.group)]

    def own_positions(self) -> Tensor:
        """Return the position in the pack of each of this rank's tokens; -1 is padding. Not if it is whole."""
        if self.tree is not None:
            return self._own(self.tree.tokens + 1) - 1
        assert self.group is not None
        own = self._own_order(self.group)
        return torch.where(own < self.num_tokens, own, -1)

    def own_counts(self, own: Tensor) -> Tensor:
        """Return how many tokens of the pack each of this rank's tokens stands for, int64; 0 is padding."""
        if self.tree is not None:
            return self._own(self.tree.counts)
        return torch.ones_like(own) if self.group is None else (self.own_positions() >= 0).to(own)

    def _own_order(self, group: dist.ProcessGroup) -> Tensor:
        return self._order.chunk(group.size())[group.rank()]

    def gather_keys(self, x: Tensor) -> Tensor:
        """Return all computed tokens in their order, from this rank's [t, ...]. The ranks' gradients are added up."""
        return x if self.group is None else gather(x, self.group, dim=0, grad="sum")[self._position]

    def gather_computed(self, x: Tensor) -> Tensor:
        """Return all computed tokens [U, ...] in their order, for computations that every rank repeats."""
        if self.group is None:
            return x
        return gather(x, self.group, dim=0, grad="slice")[self._position][: self.num_tokens]

    def expand(self, x: Tensor) -> Tensor:
        """Return all tokens [T, ...] in the order of the pack, from the computed tokens [U, ...]."""
        return x if self.tree is None else select_rows(x, self.tree.index)

    def gather_results(self, x: Tensor) -> Tensor:
        """Return all tokens [T, ...] in the order of the pack, for computations that every rank repeats."""
        return self.expand(self.gather_computed(x))


def _find_segments(bounds: list[int], paths: list[Tensor], chunks: list[int], size: int) -> list[Segment]:
    """Return the segments of a rank's chunks."""
    segments = []
    for index, chunk in enumerate(chunks):
        begin, end = chunk * size, (chunk + 1) * size
        to_local = index * size - begin
        for (start, stop), path in zip(pairwise(bounds), paths, strict=True):
            first, last = max(start, begin), min(stop, end)
            if first < last:
                segments.append(Segment(slice(first + to_local, last + to_local), path[: len(path) - (stop - last)]))
    return segments
