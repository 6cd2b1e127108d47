"""Where an optimizer's state lies: moved with the model, or kept on the host between steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move what the optimizer remembers of its parameters; step counters stay where torch wants them.

    When it returns, what has left a GPU can be read on the host.
    """
    leaves_gpu = False
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                leaves_gpu |= value.is_cuda and device.type == "cpu"
                state[key] = _moved(value, device)
    if leaves_gpu:
        torch.cuda.synchronize()


def keep_on_host_between_steps(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """From now on the optimizer's state is on `device` only while a step is made, whoever makes it; else on the host.

    What else puts it on the device (loading it, say) is to be followed by `move_state` to the host.
    """
    host = torch.device("cpu")
    optimizer.register_step_pre_hook(lambda optimizer, *_: move_state(optimizer, device))
    optimizer.register_step_post_hook(lambda optimizer, *_: move_state(optimizer, host))


def _moved(value: Any, device: torch.device) -> Tensor:
    """From a GPU torch copies into pinned memory, so that the way back is asynchronous too.

    A DTensor is made by its constructor: the device of its mesh is not that of its block here.
    """
    if isinstance(value, DTensor):
        block = value.to_local().to(device, non_blocking=True)
        return DTensor(block, value._spec, requires_grad=False)
    return value.to(device, non_blocking=True)
