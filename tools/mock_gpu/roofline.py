"""FLOPs, bytes and predicted seconds of every operation of real code, by the constants of roofline.json.

An operation takes as long as its FLOPs or its bytes, whichever is longer, and no less than a kernel of no work. What
one operation leaves in the L2 cache for the next is not modelled.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

MACHINE: dict[str, float] = {
    key: float(value)
    for key, value in json.loads((Path(__file__).parent / "roofline.json").read_text()).items()
    if key != "comment"
}
VIEWS = frozenset(
    [
        "view",
        "transpose",
        "t",
        "slice",
        "unsqueeze",
        "squeeze",
        "expand",
        "permute",
        "select",
        "split",
        "split_with_sizes",
        "detach",
        "alias",
        "_unsafe_view",
        "unbind",
        "as_strided",
        "_reshape_alias",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "unsafe_split",
        "narrow",
        "chunk",
        "set_",
        "resize_",
        "record_stream",
        "is_pinned",
    ]
)
"""operations without a kernel"""
FILLS = frozenset("zero_ fill_ zeros zeros_like new_zeros ones ones_like full new_full".split())  # noqa: SIM905
"""operations that only write"""
PERHAPS_VIEWS = frozenset(("reshape", "flatten", "to", "contiguous"))
"""operations without a kernel if their result is their argument's memory"""
WRITES_PART = frozenset(("index_copy_", "index_put_", "index_add_", "scatter_", "_index_put_impl_"))
"""operations that touch as much of their first argument as the others hold"""
COPIES = frozenset(("copy_", "_foreach_copy_"))
"""operations that write their first argument and do not read it"""
READS_PART = frozenset(("index_select", "gather", "embedding", "index"))
"""operations that read as much as they write"""
CAUSAL = 0.5
"""share of the scores that a causal mask leaves"""
BACKWARD = 2.5
"""products of attention backward for each forward: five for two"""


def _bytes(values: Any) -> int:
    """Return the bytes of the device's tensors, each element once even if it is repeated by a stride of 0."""
    tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_cuda]
    return sum(x.element_size() * _distinct(x) for x in tensors)


def _distinct(x: Tensor) -> int:
    num = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        num *= size if stride else 1
    return num


def _moved(name: str, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    if name in FILLS:
        return _bytes(out)
    if name in WRITES_PART:
        return 2 * _bytes(args[1:])
    if name in READS_PART:
        return 2 * _bytes(out)
    if name in COPIES:
        return _bytes(args)
    return _bytes((args, kwargs)) + _bytes(out)


def _packed_attention_flops(args: Any, is_backward: bool) -> float:
    """Return the FLOPs of causal attention over a pack of one sequence; the lengths of others are on the device."""
    tokens, heads, width = next(x.shape for x in args if isinstance(x, Tensor) and x.dim() == 3)
    return 4.0 * heads * tokens**2 * width * CAUSAL * (BACKWARD if is_backward else 1)


def _has_kernel(name: str, args: Any, kwargs: Any, out: Any) -> bool:
    if name in VIEWS or (name in PERHAPS_VIEWS and out.data_ptr() == args[0].data_ptr()):
        return False
    return any(isinstance(x, Tensor) and x.is_cuda for x in tree_leaves((args, kwargs, out)))


class Roofline(TorchDispatchMode):
    """Adds up operations while it is active. `attention` and `gemm` are the kinds that are bound by FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.by_operation: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled while the mode is active."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        if _has_kernel(name, args, kwargs, out):
            self._add(name, func, args, kwargs or {}, out)
        return out

    def _add(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        count, kind = flop_registry.get(func._overloadpacket), "elementwise"
        flops = 0.0
        if "varlen_attn" in name:
            kind, flops = "attention", _packed_attention_flops(args, is_backward="backward" in name)
        elif name == "linear":
            kind, flops = "gemm", 2.0 * out.numel() * args[0].shape[-1]
        elif count is not None:
            kind, flops = "attention" if "attention" in name else "gemm", float(count(*args, **kwargs, out_val=out))
        self.add(kind, name, flops, _moved(name, args, kwargs, out))

    def add(self, kind: str, name: str, flops: float, moved: float) -> None:
        """Add one operation."""
        rate = MACHINE["attention_flops_per_second" if kind == "attention" else "gemm_flops_per_second"]
        seconds = max(flops / rate, moved / MACHINE["bytes_per_second"], MACHINE["seconds_per_kernel"])
        self.by_operation[name] += seconds
        for counter, value in ((self.seconds, seconds), (self.flops, flops), (self.bytes, moved)):
            counter[kind] += value

    @property
    def total_seconds(self) -> float:
        """Predicted seconds of all operations, one after the other."""
        return sum(self.seconds.values())


@contextmanager
def own_kernels(roofline: Roofline, known: Mapping[str, float] = MappingProxyType({})) -> Iterator[None]:
    """Add the Triton kernels of the block, which torch does not dispatch: each reads and writes its tensors once.

    Args:
        roofline: where they are added.
        known: bytes of kernels that read a part of their tensors, by name.

    Yields:
        None.
    """
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    run, run_compiled = JITFunction.run, CachingAutotuner.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = self.fn.__name__
        roofline.add("elementwise", name, 0, known.get(name) or _bytes((args, kwargs)))
        return run(self, *args, **kwargs)

    def counted_compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        roofline.add("elementwise", self.fn.__name__, 0, _bytes(args))
        return run_compiled(self, *args, **kwargs)

    JITFunction.run, CachingAutotuner.run = counted, counted_compiled
    try:
        yield
    finally:
        JITFunction.run, CachingAutotuner.run = run, run_compiled


@contextmanager
def accounted() -> Iterator[Roofline]:
    """Account for the operations of the block.

    Yields:
        The sums, complete when the block has ended.
    """
    roofline = Roofline()
    with own_kernels(roofline), roofline:
        yield roofline
    torch.cuda.synchronize()
