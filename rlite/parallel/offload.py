"""Residency of optimizer state: moved with the model, or kept on the host between steps."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlite.parallel.arena import HostMemory

_memory: WeakKeyDictionary[torch.optim.Optimizer, HostMemory] = WeakKeyDictionary()
"""where an optimizer's state lies on the host"""


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's state; step counters stay where torch wants them.

    State that leaves a GPU is readable on the host when the call returns.

    Args:
        optimizer: the optimizer.
        device: the CPU or this worker's GPU.
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
            state[key] = _with_block(value, _block(value).to(device, non_blocking=True))
        return
    if len(leaving) < len(places):
        _memory.pop(optimizer, None)  # what is on the host already may lie there
    memory = _memory.setdefault(optimizer, HostMemory())
    copies = memory.copies([_block(value) for _, _, value in leaving])
    for (state, key, value), copy in zip(leaving, copies, strict=True):
        state[key] = _with_block(value, copy)
    torch.cuda.synchronize()


def keep_on_host_between_steps(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Register hooks that keep the optimizer's state on `device` only during a step, and on the host otherwise.

    After any other code puts the state on the device (loading a checkpoint, say), call `move_state` to the host.

    Args:
        optimizer: the optimizer.
        device: where steps are made.
    """
    host = torch.device("cpu")
    optimizer.register_step_pre_hook(lambda optimizer, *_: move_state(optimizer, device))
    optimizer.register_step_post_hook(lambda optimizer, *_: move_state(optimizer, host))


def _block(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _with_block(value: Tensor, block: Tensor) -> Tensor:
    """Return `block` as the local part of a tensor like `value`.

    DTensors are built by their constructor, because the mesh's device is not the block's device here.
    """
    return DTensor(block, value._spec, requires_grad=False) if isinstance(value, DTensor) else block
