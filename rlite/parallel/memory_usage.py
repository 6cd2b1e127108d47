"""Memory that a worker's process uses on its device."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True)
class DeviceUsage:
    """A worker's device and its peak memory since the previous query."""

    name: str
    """name of the device in torch; "cpu" for a CPU slot"""
    peak_bytes: int
    """most memory that torch held there in the worker's process; on a CPU slot, what the process holds resident now"""


def device_usage(device: torch.device) -> DeviceUsage:
    """Return this process's usage and, on a GPU, start counting the peak again."""
    if device.type != "cuda":
        return DeviceUsage(device.type, psutil.Process().memory_info().rss)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return DeviceUsage(torch.cuda.get_device_name(device), peak)


def give_back_cached_memory() -> None:
    """Return GPU memory that torch only caches in this process to the driver, for other processes."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
