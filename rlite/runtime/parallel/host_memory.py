"""Tensors that leave the device for host memory: copies, and an optimizer's state that is away between steps."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlite.runtime.parallel.fsdp import local_tensor
from rlite.runtime.parallel.shared_memory import ALIGNMENT, Arena, aligned_bytes

logger = logging.getLogger(__name__)

PORTABLE = 1
"""cudaHostRegisterPortable"""


class HostMemory:
    """One reusable block of host memory for copies of tensors, pinned if a tensor is on a GPU.

    The block is exactly as large as the copies; torch's own pinned memory is rounded up to a power of two.
    """

    def __init__(self) -> None:
        self._arena: Arena | None = None

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors, overwriting earlier copies. A copy from a GPU is asynchronous.

        Returns the copies, in the order of `tensors`.
        """
        needed = sum(aligned_bytes(tensor.shape, tensor.dtype) for tensor in tensors)
        if self._arena is None or self._arena.nbytes < needed:
            self._arena = None  # before its successor is allocated
            self._arena = Arena(_host_bytes(needed, is_pinned=any(tensor.is_cuda for tensor in tensors)))
        self._arena.reset()
        return [self._arena.empty(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True) for tensor in tensors]


def _host_bytes(num: int, is_pinned: bool) -> Tensor:
    """Return unwritten bytes in host memory; they stay pinned as long as a tensor lies in them."""
    memory = np.empty(num + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    if is_pinned:
        pin(memory, memory.ctypes.data, memory.size)
    return torch.from_numpy(memory[start : start + num])


def pin(owner: object, address: int, num: int) -> None:
    """Pin host memory for as long as its owner lives. If CUDA refuses, copies are slower, and the log says so."""
    error = int(torch.cuda.cudart().cudaHostRegister(address, num, PORTABLE))
    if error:
        logger.warning("%d bytes of host memory could not be pinned (CUDA error %d): copies are slower", num, error)
        with suppress(RuntimeError):  # CUDA reports it a second time, at the next launch
            torch.zeros(1, device="cuda")
    else:
        unpin = weakref.finalize(owner, torch.cuda.cudart().cudaHostUnregister, address)
        unpin.atexit = False  # CUDA may be gone by then


_memory: WeakKeyDictionary[torch.optim.Optimizer, HostMemory] = WeakKeyDictionary()
"""memory on the host for each optimizer's state"""


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's state; step counters stay where torch wants them.

    State that leaves a GPU is readable on the host when the call returns.
    """
    places = [
        (state, key, value)
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0
    ]
    leaving = [place for place in places if device.type == "cpu" and place[2].is_cuda]
    if not leaving:
        for state, key, value in places:
            state[key] = with_block(value, local_tensor(value).to(device, non_blocking=True))
        return
    if len(leaving) < len(places):
        _memory.pop(optimizer, None)  # what is on the host already may lie there
    memory = _memory.setdefault(optimizer, HostMemory())
    copies = memory.copies([local_tensor(value) for _, _, value in leaving])
    for (state, key, value), copy in zip(leaving, copies, strict=True):
        state[key] = with_block(value, copy)
    torch.cuda.synchronize()


def keep_on_host_between_steps(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Register hooks that keep the optimizer's state on `device` only during a step, and on the host otherwise.

    After any other code puts the state on the device (loading a checkpoint, say), call `move_state` to the host.
    """
    host = torch.device("cpu")
    optimizer.register_step_pre_hook(lambda optimizer, *_: move_state(optimizer, device))
    optimizer.register_step_post_hook(lambda optimizer, *_: move_state(optimizer, host))


def with_block(value: Tensor, block: Tensor) -> Tensor:
    """Return `block` as the local part of a tensor like `value`.

    DTensors are built by their constructor: `from_local` would move the block to the mesh's device.
    """
    return DTensor(block, value._spec, requires_grad=False) if isinstance(value, DTensor) else block


def host_like(value: Tensor) -> Tensor:
    """Return a copy of a tensor, a DTensor or not, whose local part lies in host memory."""
    return with_block(value, local_tensor(value.detach()).to("cpu", copy=True))


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
