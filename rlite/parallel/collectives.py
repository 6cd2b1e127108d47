"""Collectives that autograd goes through. What each does to gradients is in its name's second half.

The ranks of a group either compute the same thing from a gathered tensor, and then every rank's gradient is already
whole (`grad="slice"`), or each uses it for its own part of the work, and then gradients add up (`grad="sum"`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# their names since torch 2.13
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(x: Tensor, group: dist.ProcessGroup, dim: int, grad: Literal["slice", "sum"]) -> Tensor:
    """The ranks' tensors, of equal shape, one after the other along `dim`."""
    if group.size() == 1:
        return x
    return _Gather.apply(x, group, dim % x.dim(), grad)


def split(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's of equal parts along `dim`, the last filled up with zeros; gradients are gathered.

    `x` is the same on every rank.
    """
    if group.size() == 1:
        return x
    return _Split.apply(pad_to_multiple(x, group.size(), dim), group, dim % x.dim())


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's part of the sum over ranks along `dim`, the last filled up with zeros; gradients are gathered."""
    if group.size() == 1:
        return x
    return _ReduceScatter.apply(pad_to_multiple(x, group.size(), dim), group, dim % x.dim())


def sum_forward(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks; the gradient, the same on every rank, passes through."""
    return x if group.size() == 1 else _SumForward.apply(x, group)


def sum_backward(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor itself, which every rank uses for its own part of the work; gradients add up."""
    return x if group.size() == 1 else _SumBackward.apply(x, group)


def pad_to_multiple(x: Tensor, multiple: int, dim: int) -> Tensor:
    """`x` with zeros after its end along `dim`, so that `multiple` divides its size there."""
    missing = -x.shape[dim] % multiple
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, missing]) if missing else x


def _all_gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    rows = x.movedim(dim, 0).contiguous()
    out = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    _gather_into(out, rows, group=group)
    return _moved(out, dim)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    rows = x.movedim(dim, 0).contiguous()
    out = rows.new_empty(rows.shape[0] // group.size(), *rows.shape[1:])
    _reduce_scatter_into(out, rows, group=group)
    return _moved(out, dim)


def _moved(x: Tensor, dim: int) -> Tensor:
    """`x` with its first axis at `dim`, laid out anew, and no view: FSDP asks that of what a module returns."""
    moved = x.movedim(0, dim)
    return torch.ops.aten._unsafe_view(x, moved.shape) if moved.is_contiguous() else moved.contiguous()


def _own_part(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, grad: str) -> Tensor:
        ctx.group, ctx.dim, ctx.grad = group, dim, grad
        return _all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back = _own_part if ctx.grad == "slice" else _reduce_scatter
        return back(grad, ctx.group, ctx.dim), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _own_part(x, group, dim).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grad, ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grad, ctx.group, ctx.dim), None, None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.contiguous().clone()
        dist.all_reduce(out, group=ctx.group)
        return out, None
