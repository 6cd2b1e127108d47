"""Faster float32 linear layers on CPU.

PyTorch multiplies float32 matrices with MKL, which leaves AVX-512 unused on processors that are not Intel's. oneDNN,
which PyTorch ships too, uses it: two to three times as fast there, forward and backward, and as fast elsewhere.
The numbers differ in the last bits only.

Liger kernels (Hsu et al. 2024, arXiv 2410.10989): RMSNorm, rotary embedding and SwiGLU as Triton kernels.

Liger's own fused cross entropy is left out: log-probabilities are computed in chunks anyway (`head_logprobs`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlite.errors import ConfigError
from rlite.nn.options import check_liger_installed

HAS_AVX512 = "AVX512" in torch.backends.cpu.get_cpu_capability()
MIN_ROWS = 12 if HAS_AVX512 else 128
"""for fewer rows oneDNN's set-up costs more than it gains; without AVX-512 it only gains as much as MKL"""


def speed_up_linear_layers(module: nn.Module) -> None:
    """Make every plain `nn.Linear` in `module` compute with oneDNN if possible; otherwise nothing changes."""
    if not torch.backends.mkldnn.is_available():
        return
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.forward = partial(forward, linear, layer)  # type: ignore[method-assign]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)`, computed by oneDNN if that is faster.

    `x`: [..., in]. `weight`: [out, in]. `bias`: [out].
    """
    is_suitable = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    if not is_suitable or x.numel() < max(1, MIN_ROWS * x.shape[-1]) or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    return differentiable(multiply, x, weight, bias)


def differentiable(
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return `product(x, weight, bias)`, a way to compute `x @ weight.T + bias`, with its gradient by oneDNN.

    `product`: the function; it has no gradient of its own. `x`: [..., in]. `weight`: [out, in]. `bias`: [out].
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight, bias, product)
    return product(x, weight, bias)


def forward(product: Callable[..., Tensor], layer: nn.Linear, x: Tensor) -> Tensor:
    """Return the layer's output, computed by `product(x, weight, bias)`.

    `x`: [..., in].
    """
    return product(x, layer.weight, layer.bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, computed by oneDNN and without a gradient.

    `x`: [..., in]. `weight`: [out, in]. `bias`: [out].
    """
    if x.dim() == 2:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    product = torch.ops.mkldnn._linear_pointwise(x.reshape(-1, x.shape[-1]), weight, bias, "none", [], "")
    # a plain view would make FSDP warn that a module's output must not be changed in place
    return torch.ops.aten._unsafe_view(product, (*x.shape[:-1], len(weight)))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        # without AVX-512, MKL takes two thirds of oneDNN's time to sum over rows
        by_rows = multiply if HAS_AVX512 else F.linear
        return (
            multiply(grad_rows, weight.t()).view_as(x) if needs_x else None,
            by_rows(grad_rows.t(), rows.t()) if needs_weight else None,
            grad_rows.sum(0) if needs_bias and ctx.has_bias else None,
            None,
        )


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""whose kernels are known to go into one instance"""
_ROPE = "apply_rotary_pos_emb"


def check_liger(module: nn.Module, device: str) -> None:
    """Check that `use_liger_kernels` can work on workers of this kind of device."""
    if device != "cuda":
        raise ConfigError(f"use_liger_kernel=true needs GPUs, and these devices are of kind {device!r}; leave it out")
    check_liger_installed()
    kind = module.config.model_type if isinstance(module, PreTrainedModel) else type(module).__name__
    if kind not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ConfigError(f"use_liger_kernel=true: for models of type {known}, not {kind}; leave it out")


def use_liger_kernels(model: Any) -> None:
    """Make one transformers model, on meta or not, compute with Liger kernels; call it before sharding.

    Liger also replaces classes and functions in transformers' module, for models that are made later. They would change
    other engines in this process, so the module is restored, and the rotary embedding is bound to this model only.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # optional; this is what transformers calls

    own = next(cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models."))
    modeling = vars(sys.modules[own.__module__])
    before = dict(modeling)
    is_swiglu, others = model.config.hidden_act in ("silu", "swish"), ("cross_entropy", "fused_linear_cross_entropy")
    try:
        _apply_liger_kernel_to_instance(model, swiglu=is_swiglu, **dict.fromkeys(others, False))
        rope = modeling[_ROPE]
    finally:
        modeling.update(before)
    for module in model.modules():
        forward: Any = type(module).forward
        if isinstance(forward, FunctionType) and _ROPE in forward.__code__.co_names:
            module.forward = MethodType(with_globals(forward, **{_ROPE: rope}), module)


def with_globals(function: FunctionType, **changes: Any) -> FunctionType:
    """Return a copy of a function that sees other values for some names of its module."""
    names = {**function.__globals__, **changes}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
