"""Layers compiled by torch.compile, which run as they are where they cannot be compiled.

Attention and the routing of experts stay outside of the compiled code: they are kernels of their own, and depend on the
lengths in a pack. Everything between them (norms, rotary embedding, activations, residuals) is fused, for any number of
tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as autograd_config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils._triton import has_triton

logger = logging.getLogger(__name__)

EAGER = "layers run without torch.compile"


def missing_compiler(device_type: str) -> str | None:
    """Return what is missing to compile for a type of device; None if nothing is."""
    if device_type == "cuda":
        return None if has_triton() else "compile=layers needs the package triton and a GPU that it supports"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "compile=layers needs a C++ compiler on CPU (g++, or CXX=PATH)"
    return None


class CompiledLayers:
    """The compiled layers of a module. All of them stop being compiled if one cannot be.

    Args:
        units: the layers, before they are sharded.
        device_type: type of the device on which they run.
    """

    def __init__(self, units: Sequence[nn.Module], device_type: str) -> None:
        self.failure = missing_compiler(device_type)
        """why the layers run as they are; None if they are compiled"""
        if self.failure is not None:
            logger.warning("%s; %s", self.failure, EAGER)
            return
        for unit in units:
            unit.forward = self._compiled(unit.forward)  # type: ignore[method-assign]

    def text(self) -> str:
        """Return for the start report whether layers are compiled."""
        return f"{EAGER}: {self.failure}" if self.failure else "layers, by torch.compile at the first steps"

    def _compiled(self, eager: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(eager, dynamic=True)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.failure is None:
                try:
                    # else the backward pass, which nothing can repeat, would be where its compilation fails
                    with autograd_config.patch(force_non_lazy_backward_lowering=True):
                        return compiled(*args, **kwargs)
                except TorchDynamoException as error:
                    self.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    logger.warning("compile=layers: %s; %s", self.failure, EAGER)
            return eager(*args, **kwargs)

        return forward
