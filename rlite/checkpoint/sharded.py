"""The state that resume needs, in torch.distributed.checkpoint's format: another number of ranks can load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

Scheduler = torch.optim.lr_scheduler.LRScheduler


def save(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Scheduler | None,
    rank: int,
    group: dist.ProcessGroup,
) -> None:
    """Every rank of `group` writes its part into `folder`."""
    has_stepped = optimizer is not None and bool(optimizer.state)
    dcp.save(_state(module, optimizer if has_stepped else None), checkpoint_id=folder, process_group=group)
    own: dict[str, Any] = {
        "rng": torch.get_rng_state(),
        "scheduler": scheduler.state_dict() if scheduler else None,
        "has_stepped": has_stepped,
    }
    if torch.cuda.is_available():
        own["cuda_rng"] = torch.cuda.get_rng_state()
    torch.save(own, folder / f"rank-{rank}.pt")
    dist.barrier(group=group)


def load(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Scheduler | None,
    rank: int,
    group: dist.ProcessGroup,
) -> None:
    """Read what `save` wrote. A rank that did not exist then takes the scheduler of rank 0 and fresh random numbers."""
    file = folder / f"rank-{rank}.pt"
    own = torch.load(file if file.exists() else folder / "rank-0.pt", weights_only=True)
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
        if not own["has_stepped"]:
            optimizer.state.clear()
    state = _state(module, optimizer if own["has_stepped"] else None)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_model_state_dict(module, state["model"])
    if optimizer is not None and own["has_stepped"]:
        set_optimizer_state_dict(module, optimizer, state["optimizer"])
    if scheduler is not None and own["scheduler"] is not None:
        scheduler.load_state_dict(own["scheduler"])
    if file.exists():
        torch.set_rng_state(own["rng"])
        if "cuda_rng" in own and torch.cuda.is_available():
            torch.cuda.set_rng_state(own["cuda_rng"])


def _state(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """torch fills an optimizer that has not stepped by a step of zero, which counts as one: save must not ask it to."""
    state: dict[str, Any] = {"model": get_model_state_dict(module)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(module, optimizer)
    return state
