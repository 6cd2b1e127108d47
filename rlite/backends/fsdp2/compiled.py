"""Layers compiled by torch.compile, which run as they are where they cannot be compiled.

Attention stays outside of the compiled code: it is a kernel of its own, and depends on the lengths in a pack. All other
operations (norms, rotary embedding, activations, residuals) are fused, for any number of tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._triton import has_triton

from rlite.backends.models.attention import keep_out_of_compiled_code
from rlite.backends.models.experts import experts_of
from rlite.backends.models.mixers import find_mixers
from rlite.errors import ConfigError

logger = logging.getLogger(__name__)

EAGER = "layers run without torch.compile"


def check_compile(module: Any, tp_size: int, use_liger_kernel: bool) -> None:
    """Check that layers may be compiled. Called before any process starts.

    `module`: the module, on the meta device.
    """
    reason = None
    if use_liger_kernel:
        reason = "use_liger_kernel=true fuses the same operations"
    elif tp_size > 1:
        reason = f"layers that tp_size={tp_size} splits exchange their tokens inside"
    elif mixers := find_mixers(module):
        reason = f"{mixers[0].name} computes each sequence of a pack by itself"
    elif experts_of(module):
        reason = "the work of experts depends on the chosen experts"
    if reason is not None:
        raise ConfigError(f"compile=layers: {reason}; leave compile out")


def missing_compiler(device_type: str) -> str | None:
    """Return what is missing to compile for a type of device; None if nothing is."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # torch loads its compiler at first use: seconds
    from torch._inductor.exc import InvalidCxxCompiler

    if device_type == "cuda":
        return None if has_triton() else "compile=layers needs the package triton and a GPU that it supports"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "compile=layers needs a C++ compiler on CPU (g++, or CXX=PATH)"
    return None


class CompiledLayers:
    """The layers of a module, made to run compiled code."""

    def __init__(self, units: Sequence[nn.Module], device_type: str) -> None:
        self._missing = missing_compiler(device_type)
        self._states: list[Compilation] = []
        if self._missing is not None:
            logger.warning("%s; %s", self._missing, EAGER)
            return
        keep_out_of_compiled_code()
        for unit in units:
            unit.__class__, state = compiled_class(type(unit))  # type: ignore[arg-type]
            self._states.append(state)

    @property
    def failure(self) -> str | None:
        """Why layers run as they are; None if none is known to."""
        return self._missing or next((state.failure for state in self._states if state.failure), None)

    def text(self) -> str:
        """Return for the start report whether layers are compiled."""
        return f"{EAGER}: {self.failure}" if self.failure else "layers, by torch.compile at the first steps"


@dataclass
class Compilation:
    """State of a class of layers: compiled, or not any more."""

    failure: str | None = None
    """the error of the attempt; the class is not compiled any more"""


@cache  # torch compiles again for a new class: an engine that comes back from meta() must have the same one
def compiled_class(cls: type[nn.Module]) -> tuple[type[nn.Module], Compilation]:
    """Return a subclass with a compiled forward. transformers adds its gradient checkpointing around it."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._functorch import config

    state, eager = Compilation(), cls.forward
    compiled = torch.compile(eager, dynamic=True)

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if state.failure is None:
            try:
                # else the compilation of the backward pass would fail where nothing can be repeated
                with config.patch(force_non_lazy_backward_lowering=True):
                    return compiled(layer, *args, **kwargs)
            except TorchDynamoException as error:
                state.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                logger.warning("compile=layers: %s: %s; %s", cls.__name__, state.failure, EAGER)
        return eager(layer, *args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__}), state
