"""Sharding a meta module with FSDP2, and making this rank's shard of its weights real."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlite.errors import ConfigError
from rlite.parallel.arena import SharedArena, aligned_bytes
from rlite.parallel.mesh import TrainMesh
from rlite.parallel.shards import ParameterShard


def shard(
    module: nn.Module, units: Sequence[nn.Module], mesh: TrainMesh, compute_dtype: torch.dtype, param_dtype: torch.dtype
) -> None:
    """Apply FSDP2 to each unit and to the module itself. One rank without mixed precision needs none.

    The module's own inputs are cast to `compute_dtype`; those of units are not: positions and masks stay exact.
    """
    if mesh.is_plain and compute_dtype == param_dtype:
        return
    outer = inner = MixedPrecisionPolicy()
    if compute_dtype != param_dtype:
        outer = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        inner = replace(outer, cast_forward_inputs=False)
    for unit in units:
        fully_shard(unit, mesh=mesh.data, mp_policy=inner)
    fully_shard(module, mesh=mesh.data, mp_policy=outer)


def shard_group(module: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that gather parameters together, which run every forward pass together; None if this one is alone."""
    for group in _parameter_groups(module):
        return group.mesh_info.shard_process_group
    return None


def set_gradient_sync(module: nn.Module, is_last: bool) -> None:
    """Reduce gradients over copies of the model only in the batch's last backward pass.

    Over the shards of a copy they are reduced in every pass: otherwise each rank would add up gradients of the whole.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_all_reduce(is_last)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, mesh: TrainMesh, group: Any) -> float:
    """Scale gradients down to the global norm `max_norm`, as `nn.utils.clip_grad_norm_` does; returns the norm before.

    One all-reduce over the engine's workers (`group`): each adds up what it holds, and what several hold is counted
    by the first of them.
    """
    gradients = [(p.grad, local_tensor(p.grad)) for p in parameters if p.grad is not None]
    counted = [
        local
        for whole, local in gradients
        if mesh.tensor_rank == 0 or not (isinstance(whole, DTensor) and whole.placements[-1].is_replicate())
    ]
    device = gradients[0][1].device if gradients else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if held := [local for local in counted if local.numel()]:
        for one in torch._foreach_norm(held, dtype=torch.promote_types(held[0].dtype, torch.float32)):
            squares += one.double() ** 2
    dist.all_reduce(squares, group=group)
    norm = float((squares / mesh.dims.copies).sqrt())
    if norm > max_norm and gradients:
        torch._foreach_mul_([local for _, local in gradients], max_norm / (norm + 1e-6))
    return norm


@contextmanager
def resharded(module: nn.Module) -> Iterator[None]:
    """After it FSDP has given its gathered parameters back.

    Else a forward pass without a backward pass leaves the outermost ones gathered: they take memory, and the module's
    parameters are then others than those that the optimizer and the checkpoint know.
    """
    try:
        yield
    finally:
        for submodule in module.modules():
            if isinstance(submodule, FSDPModule):
                submodule.reshard()


def forget_gradients(module: nn.Module) -> None:
    """Bring FSDP back to its start after a forward or backward pass that raised; what was accumulated is lost.

    Gradients that were not reduced yet lie in FSDP, where `optimizer.zero_grad()` does not find them: the next step
    would count them, too.
    """
    set_gradient_sync(module, is_last=True)
    for group in _parameter_groups(module):
        for parameter in group.fsdp_params:
            with suppress(AttributeError):  # in torch 2.15 it is no more than the unsharded parameter's
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # made by the first forward
                parameter.unsharded_param.grad = None
    if isinstance(module, FSDPModule):
        if hasattr(module, "reset_iter_state"):
            module.reset_iter_state()
        else:
            _reset_iteration(module)
    module.zero_grad(set_to_none=True)


def _parameter_groups(module: nn.Module) -> Iterator[Any]:
    """FSDP's own, one for each unit: `shard` asks for no more. torch 2.11 has no name for several."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            group = submodule._get_fsdp_state()._fsdp_param_group
            if group is not None:  # all parameters are its units'
                yield group


def _reset_iteration(module: FSDPModule) -> None:
    """What `reset_iter_state` does, for torch 2.11, which does not have it."""
    root = module._get_fsdp_state()
    root._device_handle.synchronize()  # what is in flight may end, before its memory goes
    root._comm_ctx.all_gather_state = root._comm_ctx.reduce_scatter_state = None  # type: ignore[attr-defined]
    root._comm_ctx.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        if (group := state._fsdp_param_group) is not None:
            group.finalize_backward()
            group._partial_reduce_output = None
            group._training_state = TrainingState.IDLE
            group.reshard()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's block of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(parameter: Tensor) -> Tensor:
    """The whole of a parameter, on every rank; a collective. Axis by axis: FSDP's shards lie inside the others."""
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    placements = list(parameter.placements)
    whole: Any = parameter.detach()
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        whole = whole.redistribute(placements=placements)
    return whole.to_local()


def local_shard(parameter: Tensor) -> ParameterShard:
    """The box that this rank holds of a parameter, sharing its memory."""
    if not isinstance(parameter, DTensor):
        return ParameterShard(parameter.data, (0,) * parameter.dim(), tuple(parameter.shape))
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return ParameterShard(local_tensor(parameter.data), tuple(offset), tuple(parameter.shape))


def allocate(module: nn.Module, device: torch.device, dtype: torch.dtype) -> SharedArena | None:
    """Give every meta parameter unwritten memory on `device` (on CPU in an arena); move real buffers there.

    Parameters that were shared stay shared. FSDP moves a shard of uneven size out of the arena, into padded memory.
    Raises: ConfigError for a buffer on meta: nothing says what it should hold.
    """
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ConfigError(
                f"buffer {name!r} is on meta, so its values are lost: build the module inside "
                "accelerate.init_empty_weights(), which keeps buffers real, instead of torch.device('meta')"
            )
    parameters = dict(module.named_parameters())
    shapes = {name: tuple(local_tensor(parameter).shape) for name, parameter in parameters.items()}
    on_cpu = device.type == "cpu"
    arena = SharedArena(sum(aligned_bytes(shape, dtype) for shape in shapes.values())) if on_cpu else None

    def empty(shape: tuple[int, ...]) -> Tensor:
        return arena.empty(shape, dtype) if arena else torch.empty(shape, dtype=dtype, device=device)

    replaced = {id(parameter): _like(parameter, empty(shapes[name])) for name, parameter in parameters.items()}
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                submodule._parameters[name] = replaced[id(parameter)]
        for name, tensor in submodule._buffers.items():
            if tensor is not None:
                submodule._buffers[name] = tensor.to(device)
    if any(isinstance(submodule, FSDPModule) for submodule in module.modules()):
        module._apply(lambda tensor: tensor)  # FSDP takes notice of its parameters' new memory
    return arena


def _like(parameter: nn.Parameter, local: Any) -> nn.Parameter:
    """A parameter like `parameter`, whose local block is `local`."""
    if isinstance(parameter, DTensor):
        local = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return nn.Parameter(local, requires_grad=parameter.requires_grad)
