"""Device of new parameters: meta, or a real one regardless of the caller's context.

`accelerate.init_empty_weights` patches `nn.Module.register_parameter` for the whole process, and `torch.device("meta")`
is a mode of the thread. Code that builds a model inside a caller's context has to state what it wants.
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
    """Make parameters and buffers on `device` inside the block, even within `init_empty_weights` or a device mode.

    Yields:
        None.
    """
    patched = nn.Module.register_parameter, nn.Module.register_buffer
    nn.Module.register_parameter = _original(patched[0], "Module.register_parameter")  # type: ignore[method-assign]
    nn.Module.register_buffer = _original(patched[1], "Module.register_buffer")  # type: ignore[method-assign]
    try:
        with torch.device(device):
            yield
    finally:
        nn.Module.register_parameter, nn.Module.register_buffer = patched  # type: ignore[method-assign]


def meta_parameters() -> AbstractContextManager[None]:
    """Return a context in which new parameters are on meta and cost nothing; buffers (rotary `inv_freq`) stay real."""
    return init_empty_weights(include_buffers=False)


def _original(function: Callable[..., Any], qualname: str) -> Callable[..., Any]:
    """Return torch's own method below any number of patches, each of which keeps its predecessor in its closure."""
    while function.__qualname__ != qualname:
        inner = [c.cell_contents for c in function.__closure__ or () if callable(c.cell_contents)]
        function = next(
            f for f in inner if getattr(f, "__qualname__", "") == qualname or getattr(f, "__closure__", None)
        )
    return function
