"""FSDP2: the mesh of an engine's ranks, sharding of a meta module, and Muon on sharded matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from rlite.errors import ConfigError
from rlite.runtime.parallel.dims import ParallelDims
from rlite.runtime.parallel.processes import all_gather_into, subgroup
from rlite.runtime.parallel.shards import Box, ParameterShard
from rlite.runtime.parallel.shared_memory import SharedArena, aligned_bytes


@dataclass(frozen=True)
class TrainMesh:
    """One rank's place among the ranks of an engine, with its process groups."""

    dims: ParallelDims
    rank: int
    data: DeviceMesh
    """FSDP's: ("shard") or ("replicate", "shard")"""
    tensor: DeviceMesh
    """mesh of this rank's tensor-parallel group"""
    seq: dist.ProcessGroup
    """context-parallel group of this rank"""
    expert_data: DeviceMesh
    """FSDP's for experts: ("shard") or ("replicate", "shard"); every rank of a copy has tokens of its own"""
    expert: DeviceMesh
    """mesh of this rank's expert-parallel group"""

    @property
    def num_averaged(self) -> int:
        """Ranks over which FSDP averages gradients."""
        return self.dims.copies * self.dims.num_shards

    @property
    def is_first_of_copy(self) -> bool:
        """True for the first rank of a copy of the model, which speaks for tensors that all ranks hold."""
        return self.rank % (self.dims.num_shards * self.dims.tensor) == 0

    @property
    def tensor_rank(self) -> int:
        """Rank in the tensor-parallel group."""
        return self.rank % self.dims.tensor


def make_mesh(device_type: str, world_ranks: Sequence[int], rank: int, dims: ParallelDims) -> TrainMesh:
    """Build the mesh and its process groups. Every rank of the engine calls it.

    `world_ranks`: ranks of the engine's workers in the default group, in the order of `ParallelDims`.
    """
    table = torch.tensor(world_ranks, dtype=torch.int)
    dense = table.view(dims.copies, dims.num_shards, dims.tensor)
    data, tensor = _device_mesh(device_type, dense, rank, "tensor")
    expert_data, expert = data, tensor
    if dims.has_expert_mesh:
        experts = table.view(dims.copies, dims.num_expert_shards, dims.expert)
        expert_data, expert = _device_mesh(device_type, experts, rank, "expert")
    copy, shard, place = (int(i) for i in torch.unravel_index(torch.tensor(rank), dense.shape))
    first = shard - shard % dims.seq
    seq = subgroup(dense[copy, first : first + dims.seq, place].tolist())
    return TrainMesh(dims, rank, data, tensor, seq, expert_data, expert)


def _device_mesh(device_type: str, table: torch.Tensor, rank: int, last: str) -> tuple[DeviceMesh, DeviceMesh]:
    """Return FSDP's mesh of a rank, and the mesh of its group along the fastest axis.

    `table`: ranks of the default group, [copies, shards, ranks of the fastest axis].
    """
    copy, shard, place = (int(i) for i in torch.unravel_index(torch.tensor(rank), table.shape))
    axes = {"shard": table[copy, :, place], last: table[copy, shard, :]}
    if len(table) > 1:
        axes = {"replicate": table[:, shard, place], **axes}
    groups = [subgroup(ranks.tolist()) for ranks in axes.values()]
    ranks = table if len(table) > 1 else table[0]
    whole = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(axes))
    return whole["replicate", "shard"] if len(table) > 1 else whole["shard"], whole[last]


def shard(
    module: nn.Module,
    units: Sequence[nn.Module],
    mesh: TrainMesh,
    compute_dtype: torch.dtype,
    param_dtype: torch.dtype,
    experts: Sequence[nn.Module] = (),
    reshard_after_forward: bool = True,
) -> None:
    """Apply FSDP2 to each unit and to the module itself. A single rank without mixed precision needs none.

    The module's own inputs are cast to `compute_dtype`. Inputs of units are not: positions and masks stay exact.

    `reshard_after_forward`: free a unit's gathered weights after its forward pass; else its backward pass frees them.
    """
    if mesh.num_averaged * mesh.dims.tensor == 1 and compute_dtype == param_dtype:
        return
    outer = inner = MixedPrecisionPolicy()
    if compute_dtype != param_dtype:
        outer = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        inner = replace(outer, cast_forward_inputs=False)
    for each in experts if mesh.dims.has_expert_mesh else ():
        fully_shard(each, mesh=mesh.expert_data, mp_policy=inner, reshard_after_forward=reshard_after_forward)
    for unit in units:
        fully_shard(unit, mesh=mesh.data, mp_policy=inner, reshard_after_forward=reshard_after_forward)
    fully_shard(module, mesh=mesh.data, mp_policy=outer)


def shard_group(module: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that gather parameters together, and so run every forward pass together; None for one rank."""
    group = next(_parameter_groups(module), None)
    return None if group is None else group.mesh_info.shard_process_group


def set_gradient_sync(module: nn.Module, is_last: bool) -> None:
    """Reduce gradients over copies of the model only in the batch's last backward pass.

    Over the shards of one copy gradients are reduced in every pass. Otherwise each rank would accumulate whole
    gradients.

    `is_last`: True before the last backward pass.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_all_reduce(is_last)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, mesh: TrainMesh, group: Any) -> float:
    """Scale gradients down to the global norm `max_norm`, as `nn.utils.clip_grad_norm_` does, with one all-reduce.

    `parameters`: the parameters; those without a gradient are ignored. `mesh`: this rank's place in the mesh. A
    gradient that several ranks hold is counted by the first. Returns the norm before clipping.
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
        norms = torch._foreach_norm(held, dtype=torch.promote_types(held[0].dtype, torch.float32))
        squares += torch.stack(norms).double().square().sum()  # three kernels for all parameters
    dist.all_reduce(squares, group=group)
    norm = float((squares / mesh.dims.copies).sqrt())
    if norm > max_norm and gradients:
        torch._foreach_mul_([local for _, local in gradients], max_norm / (norm + 1e-6))
    return norm


@contextmanager
def resharded(module: nn.Module) -> Iterator[None]:
    """Reshard FSDP's gathered parameters at the end of the block.

    A forward pass without a backward pass leaves the outermost parameters gathered. They take memory, and they are not
    the parameters that the optimizer and the checkpoint know.
    """
    try:
        yield
    finally:
        for submodule in module.modules():
            if isinstance(submodule, FSDPModule):
                submodule.reshard()


def forget_gradients(module: nn.Module) -> None:
    """Reset FSDP after a forward or backward pass that raised. Accumulated gradients are lost.

    Gradients that are not reduced yet live inside FSDP, out of reach of `optimizer.zero_grad()`. Without this reset the
    next step would include them.
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
    """Yield FSDP's parameter groups, one per unit. torch 2.11 has no public name for them."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            group = submodule._get_fsdp_state()._fsdp_param_group
            if group is not None:  # all parameters are its units'
                yield group


def _reset_iteration(module: FSDPModule) -> None:
    """Do what `reset_iter_state` does; torch 2.11 does not have it."""
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
    """Return this rank's block of a DTensor, and any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(parameter: Tensor) -> Tensor:
    """Return the whole parameter on every rank; a collective.

    Axes are gathered one by one: FSDP's shards are innermost.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    placements = list(parameter.placements)
    whole: Any = parameter.detach()
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        whole = whole.redistribute(placements=placements)
    return whole.to_local()


@torch.no_grad()
def gather_into(out: Tensor, block: Tensor, parameter: Tensor) -> None:
    """Write a whole tensor on every rank; a collective of the ranks that share `parameter`.

    Some rows of every rank's block travel at a time, in the dtype of `out`. Beside `out` this takes twice
    `GATHERED_BYTES`, or the memory of two rows of every block.

    `out`: receives the tensor, in the parameter's shape and any dtype. On meta nothing is written.
    """
    axes = []
    if isinstance(parameter, DTensor):
        axes = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if not axes:
        out.copy_(block)
        return
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    coordinate = tuple(mesh.get_coordinate() or ())
    places = [out[box] for box in _boxes(parameter.shape, mesh, coordinate, parameter.placements)]  # type: ignore[attr-defined]
    width = max(1, *(prod(place.shape[1:]) for place in places))
    most = max(len(place) for place in places)
    num = min(most, max(1, GATHERED_BYTES // (len(places) * width * out.itemsize)))
    for start in range(0, most, num):
        rows = block[start : start + num]
        sent = torch.empty(num * width, dtype=out.dtype, device=block.device)
        sent[: rows.numel()].view(rows.shape).copy_(rows)
        for axis in reversed(axes):
            sent = _all_gather(sent, mesh.get_group(axis))
        for place, received in zip(places, sent.view(len(places), -1), strict=True):
            into = place[start : start + num]
            into.copy_(received[: into.numel()].view(into.shape))


GATHERED_BYTES = 2**24
"""most bytes of a tensor that `gather_into` receives at a time"""


def _all_gather(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, one after another."""
    received = sent.new_empty(dist.get_world_size(group) * sent.numel())
    all_gather_into(received.view(torch.uint8), sent.view(torch.uint8), group=group)  # gloo lacks dtypes
    return received


@lru_cache(maxsize=4096)
def _boxes(
    shape: torch.Size, mesh: DeviceMesh, coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[Box]:
    """Return the box of each block of a tensor, in the order of the mesh.

    Of ranks that hold the same block, the ones at `coordinate` count.
    """
    axes = zip(coordinate, placements, mesh.shape, strict=True)
    ranks = [[own] if placement.is_replicate() else range(size) for own, placement, size in axes]
    found = [
        _compute_local_shape_and_global_offset(shape, mesh.shape, list(each), placements) for each in product(*ranks)
    ]
    return [tuple(slice(o, o + n) for n, o in zip(*block, strict=True)) for block in found]


def local_shard(parameter: Tensor) -> ParameterShard:
    """Return the part of a parameter that this rank holds; it shares the parameter's memory."""
    if not isinstance(parameter, DTensor):
        return ParameterShard(parameter.data, (0,) * parameter.dim(), tuple(parameter.shape))
    mesh = parameter.device_mesh
    offset = _local_offset(parameter.shape, mesh, tuple(mesh.get_coordinate() or ()), parameter.placements)
    return ParameterShard(local_tensor(parameter.data), offset, tuple(parameter.shape))


@lru_cache(maxsize=4096)  # torch takes 25 microseconds for each parameter of each weight sync
def _local_offset(
    shape: torch.Size, mesh: DeviceMesh, coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[int, ...]:
    """Return where the block of the rank at `coordinate` of the mesh begins."""
    return tuple(_compute_local_shape_and_global_offset(shape, mesh.shape, list(coordinate), placements)[1])


def allocate(module: nn.Module, device: torch.device, dtype: torch.dtype) -> SharedArena | None:
    """Give every meta parameter uninitialized memory on `device` and move buffers there.

    On CPU the memory is an arena. Tied parameters stay tied. FSDP moves a shard of uneven size into padded memory
    outside of the arena.

    `module`: the sharded module, on meta. Returns the arena, on CPU.
    """
    if lost := [name for name, buffer in module.named_buffers() if buffer.is_meta]:
        raise ConfigError(
            f"buffer {lost[0]!r} is on meta, so its values are lost: build the module inside "
            "accelerate.init_empty_weights(), which keeps buffers real, instead of torch.device('meta')"
        )
    needed = sum(aligned_bytes(local_tensor(parameter).shape, dtype) for parameter in module.parameters())
    arena = SharedArena(needed) if device.type == "cpu" else None

    def make(parameter: nn.Parameter) -> nn.Parameter:
        shape = local_tensor(parameter).shape
        local = arena.empty(shape, dtype) if arena else torch.empty(shape, dtype=dtype, device=device)
        return nn.Parameter(dtensor_like(parameter, local), requires_grad=parameter.requires_grad)

    replace_parameters(module, make)
    for submodule in module.modules():
        for name, tensor in submodule._buffers.items():
            if tensor is not None:
                submodule._buffers[name] = tensor.to(device)
    if any(isinstance(submodule, FSDPModule) for submodule in module.modules()):
        module._apply(lambda tensor: tensor)  # FSDP takes notice of its parameters' new memory
    return arena


def replace_parameters(module: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace every parameter by what `make` returns for it; shared parameters stay shared."""
    made = cache(make)
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                submodule._parameters[name] = made(parameter)


def dtensor_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Return a tensor laid out like `tensor`, a DTensor or not, with another local block."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


class ShardedMuon(torch.optim.Muon):
    """`torch.optim.Muon` whose parameters may be DTensors of any sharding.

    Momentum is sharded as the parameters are. The update of one matrix at a time is gathered in bfloat16, the dtype in
    which torch orthogonalises it, so equal gradients give the bits of `torch.optim.Muon` on one device. Each rank then
    orthogonalises the whole matrix and keeps its part: torch's own operations on DTensors would communicate in each of
    the iteration's products, and sum in another order.

    A parameter [E, rows, columns] is a stack of matrices, each of which is updated like a parameter of its own. It is
    sharded over E alone, so nothing is gathered.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        defaults = torch.optim.Muon([torch.empty(1, 1)], **options).defaults  # it takes no stacks
        torch.optim.Optimizer.__init__(self, params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; a collective of the ranks that share the parameters.

        `closure`: computes the loss again; optional. Returns the loss of `closure`.
        """
        loss = _recomputed(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_matrix(parameter, parameter.grad, group)
        return loss

    def _step_matrix(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        gradient, buffer = local_tensor(gradient), local_tensor(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        shard = local_shard(parameter)
        shard.tensor.mul_(1 - group["lr"] * group["weight_decay"])
        lr = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape[-2:])
        if parameter.ndim == 3:
            for matrix, own in zip(shard.tensor, update.bfloat16(), strict=True):
                matrix.add_(_orthogonal(own, group), alpha=-lr)
            return
        whole = full_tensor(dtensor_like(parameter, update.bfloat16()))
        shard.tensor.add_(_orthogonal(whole, group)[shard.box], alpha=-lr)


def _orthogonal(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    return _zeropower_via_newtonschulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one: their parameter groups, in order, and their state.

    Schedulers, checkpoints and offloading see one ordinary optimizer. `load_state_dict` replaces its groups and its
    state, so each step hands the current ones to the optimizers.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._optimizers = [(optimizer, len(optimizer.param_groups)) for optimizer in optimizers]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of each optimizer."""
        loss = _recomputed(closure)
        groups = iter(self.param_groups)
        for optimizer, num_groups in self._optimizers:
            optimizer.param_groups = [next(groups) for _ in range(num_groups)]
            optimizer.state = self.state
            optimizer.step()
        return loss


def _recomputed(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
