"""Copies of host values to a device that nothing waits for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return values of the host on a device.

    A copy from ordinary host memory to a GPU returns only after all earlier work of the GPU. This copy leaves from
    pinned memory, which torch keeps and reuses, and returns at once.

    `dtype`: dtype of the result; None keeps the dtype of the values.
    """
    host = torch.as_tensor(values, dtype=dtype, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
