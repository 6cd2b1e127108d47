"""The state that resume needs, in torch.distributed.checkpoint's format: another number of ranks can load it.

Saving is `snapshot`, which reads the module, then `write`, which does not: it may run beside the next training steps,
over a process group of its own. Beside the shared part each rank has `rank-N.pt`: what is its own, or not a tensor.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from rlite.checkpoint.atomic import hash_files, publish, seal
from rlite.checkpoint.randomness import random_state, set_random_state
from rlite.checkpoint.safe import JsonReader, JsonWriter, PlainLoadPlanner, load_values
from rlite.errors import CheckpointError, why_not_written
from rlite.parallel.arena import HostMemory

Scheduler = torch.optim.lr_scheduler.LRScheduler

_writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
"""One thread for each process: writes come in the order in which they were asked for, which is the same everywhere, so
that those of two engines cannot wait for each other."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's state at a step boundary."""

    shared: dict[str, Any]
    """tensors of all ranks: "model", "optimizer", "gradients" """
    own: dict[str, Any]


def snapshot(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Scheduler | None,
    is_copied: bool,
    memory: HostMemory | None = None,
) -> Snapshot:
    """Collect the state; copied to host memory, it stays as it is now while training goes on.

    Args:
        memory: where tensors are copied to; a snapshot that was copied there before is overwritten.
    """
    stepped = _with_state(module, optimizer)
    gradients = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
    own: dict[str, Any] = {
        "random": random_state(),
        "scheduler": scheduler.state_dict() if scheduler else None,
        "settings": _settings(optimizer),
        "stepped": stepped,
        "gradients": gradients,
    }
    shared = _shared(module, optimizer if stepped else None, gradients)
    if is_copied:
        shared, own = _on_host(shared, memory or HostMemory()), deepcopy(own)
    return Snapshot(shared, own)


def start_writing(
    state: Snapshot, folder: Path, path: Path, facts: Mapping[str, Any], rank: int, group: dist.ProcessGroup
) -> Future[None]:
    """`write` in this process's writing thread, on the caller's GPU. Nothing else may use `group` but writes.

    A thread begins on the first GPU. There torch would wait for the wrong stream, and write what is not copied yet.
    """
    where = torch.cuda.device(torch.cuda.current_device()) if torch.cuda.is_initialized() else nullcontext()

    def write_there(*args: Any) -> None:
        with where:
            write(*args)

    return _writer.submit(write_there, state, folder, path, facts, rank, group)


def write(
    state: Snapshot, folder: Path, path: Path, facts: Mapping[str, Any], rank: int, group: dist.ProcessGroup
) -> None:
    """Every rank of `group` writes its part into `folder`; when all have, rank 0 seals it and renames it to `path`.

    Raises: CheckpointError on every rank if one of them could not write; then `path` is as it was.
    """
    try:
        dcp.save(state.shared, storage_writer=JsonWriter(folder), process_group=group)
        outcomes: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, _write_own(state.own, folder, rank), group=group)
        if errors := [f"rank {index}: {outcome}" for index, outcome in enumerate(outcomes) if isinstance(outcome, str)]:
            raise OSError("; ".join(errors))
        if rank == 0:
            seal(folder, facts, known={name: record for outcome in outcomes for name, record in outcome.items()})
            publish(folder, path)
    except (CheckpointException, OSError) as error:  # the first is a BaseException, which would end the worker
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # on a full disk it takes room
        raise CheckpointError(f"{path}: could not be written: {_reason(error)}") from None


def _write_own(own: dict[str, Any], folder: Path, rank: int) -> dict[str, Any] | str:
    """Hashes of the files that this rank wrote, or what went wrong: the peers must hear of it, and do not wait."""
    try:
        file = folder / f"rank-{rank}.pt"
        with file.open("wb") as stream:
            torch.save(own, stream)
            stream.flush()
            os.fsync(stream.fileno())
        return hash_files(folder, [file.name, *(part.name for part in folder.glob(f"__{rank}_*"))])
    except (OSError, RuntimeError) as error:  # torch.save makes either of a full disk
        return why_not_written(error)


def load(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Scheduler | None,
    rank: int,
    group: dist.ProcessGroup,
) -> None:
    """Read what `write` wrote, in this layout. A rank that did not exist then goes on with its own random numbers.

    Raises: CheckpointError if it was saved from another model; then nothing was changed.
    """
    file = folder / f"rank-{rank}.pt"
    own = load_values(file if file.exists() else folder / "rank-0.pt")
    _check_model(folder, module)
    if own["stepped"] and optimizer is None:
        raise CheckpointError(f"{folder}: it holds an optimizer's state, and this module has none to take it")
    module.zero_grad(set_to_none=True)
    for name in own["gradients"]:
        parameter = module.get_parameter(name)
        parameter.grad = torch.zeros_like(parameter.detach())
    if optimizer is not None:
        optimizer.state.clear()  # torch fills an empty one, which is then whole
    state = _shared(module, optimizer if own["stepped"] else None, own["gradients"])
    filled = state["optimizer"]["state"] if own["stepped"] else {}
    if own["stepped"]:
        state["optimizer"]["state"] = {name: filled[name] for name in own["stepped"]}
    try:
        dcp.load(state, storage_reader=JsonReader(folder), planner=PlainLoadPlanner(), process_group=group)
    except CheckpointException as error:  # a BaseException, which would end the worker
        raise CheckpointError(f"{folder}: could not be read: {_reason(error)}") from None
    set_model_state_dict(module, state["model"])
    if optimizer is not None:
        if own["stepped"]:
            state["optimizer"]["state"] = {**filled, **state["optimizer"]["state"]}  # torch wants all
            set_optimizer_state_dict(module, optimizer, state["optimizer"])
        stepped = {id(module.get_parameter(name)) for name in own["stepped"]}
        for forgotten in [parameter for parameter in optimizer.state if id(parameter) not in stepped]:
            del optimizer.state[forgotten]
        for group_now, settings in zip(optimizer.param_groups, own["settings"], strict=True):
            group_now.update(settings)
    if scheduler is not None and own["scheduler"] is not None:
        scheduler.load_state_dict(own["scheduler"])
    if file.exists():
        set_random_state(own["random"])


def _reason(error: BaseException) -> str:
    """What went wrong on which ranks, without their tracebacks."""
    if not isinstance(error, CheckpointException):
        return why_not_written(error)
    return "; ".join(f"rank {rank}: {why_not_written(failure[0])}" for rank, failure in sorted(error.failures.items()))


def _shared(module: nn.Module, optimizer: torch.optim.Optimizer | None, gradients: list[str]) -> dict[str, Any]:
    """torch fills an optimizer that has not stepped by a step of zero, which counts as one: save must not ask it to."""
    state: dict[str, Any] = {"model": get_model_state_dict(module)}
    if optimizer is not None:
        had = {name: parameter.grad for name, parameter in module.named_parameters()}
        for parameter in module.parameters():
            parameter.grad = None  # torch refuses to fill an optimizer whose parameters have gradients
        state["optimizer"] = get_optimizer_state_dict(module, optimizer)
        for name, gradient in had.items():
            module.get_parameter(name).grad = gradient
    if gradients:
        state["gradients"] = {name: module.get_parameter(name).grad for name in gradients}
    return state


def _with_state(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Names of the parameters for which the optimizer remembers something."""
    if optimizer is None:
        return []
    remembered = {id(parameter) for parameter, state in optimizer.state.items() if state}
    return [name for name, parameter in module.named_parameters() if id(parameter) in remembered]


def _settings(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Learning rate and the like of each parameter group."""
    groups = optimizer.param_groups if optimizer else []
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _check_model(folder: Path, module: nn.Module) -> None:
    """Names and shapes of the checkpoint's tensors must be the module's."""
    entries = JsonReader(folder).read_metadata().state_dict_metadata
    saved = {key.removeprefix("model."): entry for key, entry in entries.items() if key.startswith("model.")}
    for name, value in get_model_state_dict(module).items():
        if name not in saved:
            raise CheckpointError(f"{folder}: saved from another model: it has no {name}")
        size = getattr(saved.pop(name), "size", None)
        if isinstance(value, Tensor) and size != value.shape:
            found = None if size is None else tuple(size)
            raise CheckpointError(f"{folder}: saved from another model: {name} is {found}, not {tuple(value.shape)}")
    if saved:
        raise CheckpointError(f"{folder}: saved from another model: this one has no {next(iter(saved))}")


def _on_host(state: dict[str, Any], memory: HostMemory) -> dict[str, Any]:
    """The same in host memory of its own; what occurs twice (tied parameters) is copied once.

    A DTensor is made by its constructor: `from_local` would move the block to the mesh's device.
    """
    tensors = {id(value): value for value in tree_leaves(state) if isinstance(value, Tensor)}
    blocks = [value.to_local() if isinstance(value, DTensor) else value for value in tensors.values()]
    copies = {
        key: DTensor(copy, value._spec, requires_grad=False) if isinstance(value, DTensor) else copy
        for (key, value), copy in zip(tensors.items(), memory.copies([b.detach() for b in blocks]), strict=True)
    }
    if any(block.is_cuda for block in blocks):
        torch.cuda.synchronize()
    return tree_map_only(Tensor, lambda value: copies[id(value)], state)
