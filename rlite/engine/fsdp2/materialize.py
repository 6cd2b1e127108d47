"""Materialization of a user's meta module: shard it, allocate this rank's part, and read its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from rlite.engine.fsdp2.options import Fsdp2Options
from rlite.errors import CheckpointError
from rlite.nn.base import BaseTrainModule, CheckpointSource
from rlite.nn.checkpoint_fit import check_fit
from rlite.nn.huggingface import HuggingFaceFsdp2TrainModule
from rlite.nn.liger import use_liger_kernels
from rlite.nn.linear import speed_up_linear_layers
from rlite.nn.pretrained import local_checkpoint
from rlite.parallel.fsdp import allocate, local_shard, shard
from rlite.parallel.mesh import TrainMesh
from rlite.parallel.shards import CheckpointReader, nonfinite_names
from rlite.parallel.shared_memory import SharedArena


def make_module(
    source: bytes, options: Fsdp2Options, mesh: TrainMesh, device: torch.device
) -> tuple[BaseTrainModule, SharedArena | None]:
    """Return the sharded module with unwritten weights, and on CPU the shared memory that holds them.

    Args:
        source: the pickled module, on the meta device.
        options: options of the executor.
        mesh: this rank's place in the mesh.
        device: device of this rank's part of the weights.
    """
    param_dtype = getattr(torch, options.param_dtype)
    default = "bfloat16" if device.type == "cuda" else options.param_dtype
    module: BaseTrainModule = cloudpickle.loads(source)
    if isinstance(module, HuggingFaceFsdp2TrainModule):
        module.tie_weights()  # type: ignore[operator]
    if options.use_liger_kernel:
        use_liger_kernels(module)
    if options.gradient_checkpointing:
        module.recompute_activations()
    if options.deterministic:
        module.make_deterministic()
    elif device.type == "cpu":
        speed_up_linear_layers(module)
    if mesh.dims.tensor > 1:
        module.parallelize(mesh.tensor)
    if mesh.dims.seq > 1:
        module.context_group = mesh.seq
    shard(module, module.fsdp_units(), mesh, getattr(torch, options.compute_dtype or default), param_dtype)
    return module, allocate(module, device, param_dtype)


@torch.no_grad()
def read_weights(module: BaseTrainModule, path: str | None = None) -> None:
    """Fill this rank's boxes from a Hugging Face folder or the module's own source. Only these boxes are read.

    Args:
        module: the sharded module.
        path: a Hugging Face folder; None is the module's own source.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is not finite.
    """
    source = module.materialization_source() if path is None else path
    reader = reader_of(source)
    check_module_fits(module, reader, source)
    boxes = {name: local_shard(parameter) for name, parameter in module.named_parameters()}
    for name, box in boxes.items():
        stored = module.checkpoint_name(name)
        if stored not in reader.names():
            missing = module.missing_parameter(name, box.global_shape)
            if missing is not None:
                box.tensor.copy_(missing[box.box])
                continue
        shape = reader.shape(stored)
        if shape != box.global_shape:
            raise CheckpointError(f"{stored}: the model needs shape {box.global_shape}, {source} has {shape}")
        box.tensor.copy_(module.preprocess_named_parameter(name, reader.read(stored, box.box)))
    if names := nonfinite_names(boxes):
        where = "materialization_source()" if isinstance(source, Mapping) else source
        raise CheckpointError(f"{where}: the weights are not finite: {names[0]} holds NaN or infinity")


def reader_of(source: CheckpointSource) -> Any:
    """Return a reader of the tensors of a source."""
    return _Tensors(source) if isinstance(source, Mapping) else CheckpointReader(local_checkpoint(source))


def check_module_fits(module: BaseTrainModule, reader: Any, source: CheckpointSource) -> None:
    """Refuse tensors that the module would leave out or read as other numbers; see `rlite.nn.checkpoint_fit`.

    Args:
        module: the module, on any device.
        reader: reader of the source.
        source: the source, for messages.

    Raises:
        CheckpointError: the message names a tensor and the remedy.
    """
    names = {module.checkpoint_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    where = "materialization_source()" if isinstance(source, Mapping) else source
    check_fit(reader, names, where, module, module.leaves_out)


class _Tensors(dict[str, Tensor]):
    """A dict of tensors with the interface of `CheckpointReader`."""

    names = dict.keys

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self:
            raise CheckpointError(f"materialization_source() has no tensor named {name!r}")
        return tuple(self[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self[name].dtype

    def read(self, name: str, box: tuple[slice, ...] = ()) -> Tensor:
        return self[name][box]
