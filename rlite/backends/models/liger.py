"""Liger kernels (Hsu et al. 2024, arXiv 2410.10989): RMSNorm, rotary embedding and SwiGLU as Triton kernels.

Liger's own fused cross entropy is left out: log-probabilities are computed in chunks anyway (`head_logprobs`).
"""

from __future__ import annotations

import sys
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rlite.errors import ConfigError
from rlite.nn.options import check_liger_installed

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""whose kernels are known to go into one instance"""
_ROPE = "apply_rotary_pos_emb"


def check_liger(module: nn.Module, device: str) -> None:
    """Check that `use_liger_kernels` can work on workers of this kind of device.

    Args:
        module: the module.
        device: "cuda" or "cpu".

    Raises:
        ConfigError: the device, a package or the type of model does not fit.
    """
    if device != "cuda":
        raise ConfigError(f"use_liger_kernel=true needs GPUs, and these devices are of kind {device!r}; leave it out")
    check_liger_installed()
    kind = module.config.model_type if isinstance(module, PreTrainedModel) else type(module).__name__
    if kind not in MODEL_TYPES:
        raise ConfigError(
            f"use_liger_kernel=true: for models of type {', '.join(MODEL_TYPES)}, not {kind}; leave it out"
        )


def use_liger_kernels(model: Any) -> None:
    """Make one transformers model, on meta or not, compute with Liger kernels; call it before sharding.

    Liger also replaces classes and functions in transformers' module, for models that are made later. They would change
    other engines in this process, so the module is restored, and the rotary embedding is bound to this model only.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # optional; this is what transformers calls

    own = next(cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models."))
    modeling = vars(sys.modules[own.__module__])
    before = dict(modeling)
    try:
        _apply_liger_kernel_to_instance(
            model,
            swiglu=model.config.hidden_act in ("silu", "swish"),
            cross_entropy=False,
            fused_linear_cross_entropy=False,
        )
        rope = modeling[_ROPE]
    finally:
        modeling.update(before)
    for module in model.modules():
        forward: Any = type(module).forward
        if isinstance(forward, FunctionType) and _ROPE in forward.__code__.co_names:
            module.forward = MethodType(_with_globals(forward, **{_ROPE: rope}), module)


def _with_globals(function: FunctionType, **changes: Any) -> FunctionType:
    """Return a copy of the function that sees other values for some names of its module."""
    names = {**function.__globals__, **changes}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
