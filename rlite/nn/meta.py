"""Where new parameters go: on the meta device, or on a real one whatever the caller's context says.

`accelerate.init_empty_weights` patches `nn.Module.register_parameter` for the whole process and `torch.device("meta")`
is a mode of the thread. Whoever builds a model inside somebody else's context needs to state what it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn


@contextmanager
def real_tensors(device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside, parameters and buffers are made on `device`, even within `init_empty_weights` or a device mode."""
    patched = nn.Module.register_parameter, nn.Module.register_buffer
    nn.Module.register_parameter = _original(patched[0], "Module.register_parameter")  # type: ignore[method-assign]
    nn.Module.register_buffer = _original(patched[1], "Module.register_buffer")  # type: ignore[method-assign]
    try:
        with torch.device(device):
            yield
    finally:
        nn.Module.register_parameter, nn.Module.register_buffer = patched  # type: ignore[method-assign]


def meta_parameters() -> AbstractContextManager[None]:
    """Inside, new parameters are on meta and cost nothing; buffers (a rotary embedding's `inv_freq`) stay real."""
    return init_empty_weights(include_buffers=False)


def _original(function: Callable[..., Any], qualname: str) -> Callable[..., Any]:
    """torch's own method beneath any number of patches, each of which keeps the one before in its closure."""
    while function.__qualname__ != qualname:
        inner = [c.cell_contents for c in function.__closure__ or () if callable(c.cell_contents)]
        function = next(
            f for f in inner if getattr(f, "__qualname__", "") == qualname or getattr(f, "__closure__", None)
        )
    return function
