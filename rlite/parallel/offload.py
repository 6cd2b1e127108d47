"""Where an optimizer's state lies: moved with the model, or kept on the host between steps."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlite.parallel.arena import HostMemory

_memory: WeakKeyDictionary[torch.optim.Optimizer, HostMemory] = WeakKeyDictionary()
"""where an optimizer's state lies on the host"""


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move what the optimizer remembers of its parameters; step counters stay where torch wants them.

    When it returns, what has left a GPU can be read on the host.
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
    """From now on the optimizer's state is on `device` only while a step is made, whoever makes it; else on the host.

    What else puts it on the device (loading it, say) is to be followed by `move_state` to the host.
    """
    host = torch.device("cpu")
    optimizer.register_step_pre_hook(lambda optimizer, *_: move_state(optimizer, device))
    optimizer.register_step_post_hook(lambda optimizer, *_: move_state(optimizer, host))


def _block(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _with_block(value: Tensor, block: Tensor) -> Tensor:
    """A DTensor is made by its constructor: the device of its mesh is not that of its block here."""
    return DTensor(block, value._spec, requires_grad=False) if isinstance(value, DTensor) else block
