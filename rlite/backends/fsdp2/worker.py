"""The worker of the train executor "fsdp2": it holds a shard of a user's module and runs its methods."""

from __future__ import annotations

import gc
import importlib
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from rlite.backends.fsdp2.batch_runner import BatchRunner
from rlite.backends.fsdp2.compiled import CompiledLayers, check_compile
from rlite.backends.fsdp2.learners import ADDED_APART, OPTIMIZER, Adapter, WholeModule, check_adapter, read_adapter
from rlite.backends.fsdp2.memory import Choice, Savings, choose, footprint_of, free_bytes
from rlite.backends.fsdp2.options import Fsdp2Options
from rlite.backends.models import huggingface, linear
from rlite.backends.models.architecture import check_container, check_fit
from rlite.backends.models.attention import use_flash_attention_3
from rlite.backends.models.experts import implementation_for, use_implementation
from rlite.backends.models.expressions import Held
from rlite.backends.models.huggingface import HuggingFaceFsdp2TrainModule
from rlite.backends.models.lora import LoraTrainModule, own_adapter
from rlite.backends.models.stored import StoredCheckpoint, StoredForm, buffer_shards, stored_buffers, stored_form
from rlite.backends.models.teachers import TaughtModule
from rlite.engine.registry import TrainBackend
from rlite.engine.user_module import take_class
from rlite.errors import CheckpointError, ConfigError, why_not_written
from rlite.imports import lacking
from rlite.nn.base import BaseTrainModule
from rlite.nn.options import LoraOptions
from rlite.nn.pretrained import add_end_ids, local_checkpoint, real_tensors
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.cluster.session import current_session, has_gpus
from rlite.runtime.parallel import fsdp, host_memory
from rlite.runtime.parallel.dims import ParallelDims
from rlite.runtime.parallel.processes import subgroup
from rlite.runtime.parallel.shards import ParameterShard, nonfinite_names
from rlite.runtime.parallel.shared_memory import SharedArena
from rlite.runtime.replicas.adapters import AdapterWeights
from rlite.runtime.replicas.workers import Part
from rlite.runtime.storage import sharded
from rlite.runtime.storage.huggingface import Writer

logger = logging.getLogger(__name__)


def whole_module(source: bytes) -> BaseTrainModule:
    """Return a pickled module, on the meta device."""
    module: BaseTrainModule = cloudpickle.loads(source)
    if isinstance(module, HuggingFaceFsdp2TrainModule):
        module.tie_weights()  # type: ignore[operator]
    return module


def dtype_of(options: Fsdp2Options, device_type: str) -> torch.dtype:
    """Return the dtype of forward and backward passes."""
    default = "bfloat16" if device_type == "cuda" else options.param_dtype
    return getattr(torch, options.compute_dtype or default)


def divide(
    module: BaseTrainModule, options: Fsdp2Options, savings: Savings, mesh: fsdp.TrainMesh, device: torch.device
) -> tuple[SharedArena | None, CompiledLayers | None]:
    """Shard a module and allocate its weights, unwritten.

    `module`: the whole module, on the meta device. Returns the shared memory that holds the weights, on CPU; and the
    compiled layers, if layers are compiled.
    """
    param_dtype, compute_dtype = getattr(torch, options.param_dtype), dtype_of(options, device.type)
    if options.use_liger_kernel:
        linear.use_liger_kernels(module)
    if savings.gradient_checkpointing:
        module.recompute_activations()
    experts = module.prepare_experts(mesh, options)
    if experts:
        use_implementation(module, implementation_for(options.experts_implementation, device.type, compute_dtype))
    if options.deterministic:
        module.make_deterministic()
    elif device.type == "cpu" and options.compile is None:  # torch's compiler cannot fuse around these operations
        linear.speed_up_linear_layers(module)
    if mesh.dims.tensor > 1:
        module.parallelize(mesh.tensor)
    if mesh.dims.seq > 1:
        module.context_group = mesh.seq
    units = module.fsdp_units()
    compiled = CompiledLayers(units, device.type) if options.compile else None
    fsdp.shard(module, units, mesh, compute_dtype, param_dtype, experts, savings.reshard_after_forward)
    return fsdp.allocate(module, device, param_dtype), compiled


def head_kernels(device_type: str) -> ModuleType | None:
    """Return the Triton kernels of the output embedding; None, with a line in the log, if they cannot run."""
    reason = lacking("fused_head=true needs", "triton", "triton")
    if device_type != "cuda":
        reason = "fused_head=true needs GPUs"
    if reason:
        logger.warning("%s; torch's operations compute log-probabilities", reason)
        return None
    return importlib.import_module("rlite.backends.models.triton_head")


@torch.no_grad()
@real_tensors()  # files are read on the host: a tensor made on the GPU would be uploaded whole by every rank
def read_weights(module: BaseTrainModule, path: str | None = None) -> StoredCheckpoint | None:
    """Fill this rank's boxes from a Hugging Face folder or the module's own source. Only these boxes are read.

    `path`: a Hugging Face folder; None is the module's own source. Returns the folder that was read; None if the source
    is no folder.
    """
    source = module.materialization_source() if path is None else path
    reader: Any
    if isinstance(source, Mapping):
        where, reader = "materialization_source()", _Tensors(source)
    else:
        where, reader = str(source), StoredCheckpoint(module, local_checkpoint(source))
    check_fit(reader, where, module)
    boxes = {name: fsdp.local_shard(parameter) for name, parameter in module.named_parameters()}
    names = set(reader.names())
    for name, box in boxes.items():
        stored = module.checkpoint_name(name)
        if stored in names:
            box.tensor.copy_(module.preprocess_named_parameter(name, reader.read(stored, box.box)))
        elif (missing := module.missing_parameter(name, box.global_shape)) is not None:
            box.tensor.copy_(missing[box.box])
    for name, buffer in stored_buffers(module).items():
        if (stored := module.checkpoint_name(name)) in names:
            buffer.copy_(reader.read(stored))
    if wrong := nonfinite_names(boxes):
        raise CheckpointError(f"{where}: the weights are not finite: {wrong[0]} holds NaN or infinity")
    return reader if isinstance(reader, StoredCheckpoint) else None


class _Tensors(Held):
    """Tensors with the interface of `StoredCheckpoint`."""

    def names(self) -> list[str]:
        return list(self)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self:
            raise CheckpointError(f"materialization_source() has no tensor named {name!r}")
        return tuple(self[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self[name].dtype

    def rule(self, name: str) -> str:
        return ""


def export(module: BaseTrainModule, path: Path, form: StoredForm, is_writer: bool, group: dist.ProcessGroup) -> None:
    """Write a Hugging Face checkpoint; a collective of all ranks."""
    trained: dict[str, Tensor] = {}
    if isinstance(module, LoraTrainModule) and module.lora is not None:
        trained = {name: fsdp.full_tensor(p) for name, p in module.named_parameters() if p.requires_grad}
    tensors = ((name, fsdp.full_tensor(module.served_parameter(name, p))) for name, p in module.named_parameters())
    served = (out for name, full in tensors if (out := module.postprocess_named_parameter(name, full)))
    try:
        if is_writer:
            buffers = ((module.checkpoint_name(name), buffer) for name, buffer in stored_buffers(module).items())
            _write(module, path, form, chain(served, buffers), trained)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: could not be written: {why_not_written(error)}") from error
    finally:  # gathering is a collective: a full disk on rank 0 must not leave its peers in one
        for _ in served:
            pass
        dist.barrier(group=group)


def _write(
    module: Any, path: Path, form: StoredForm, tensors: Iterable[tuple[str, Tensor]], adapter: Mapping[str, Tensor]
) -> None:
    is_transformer = isinstance(module, HuggingFaceFsdp2TrainModule)
    writer = Writer(path, module.config.dtype if is_transformer else None)
    for name, tensor, dtype in form.tensors(tensors):
        writer.add(name, tensor, dtype)
    if is_transformer:
        source = module.config._name_or_path
        folder = local_checkpoint(source, weights=False) if source else None
        writer.add_config(*form.config(module.exported_config(), huggingface.exported_class(module)), folder)
        add_end_ids(writer.folder, module.further_end_ids)
    if isinstance(module, huggingface.HuggingFaceFsdp2ScoreModule):
        huggingface.pad_apart(writer.folder, module.row_ends)
    if isinstance(module, LoraTrainModule) and adapter:
        module.save_adapter(writer.folder / "adapter", adapter)
    writer.finish()


class Fsdp2Worker(BatchRunner):
    """One rank of a train engine; `TrainWorker` documents the meaning of each method.

    `context`: the place of this worker. `source`: the pickled module, on the meta device.
    """

    def __init__(self, context: WorkerContext, source: bytes, options: Fsdp2Options, executor_size: int) -> None:
        self._context, self._options, self._source = context, options, source
        self._device = torch.device(context.torch_device)
        self._form: StoredForm | None = None
        """form of exports, that of the first checkpoint"""
        self._is_here = False
        """`module` exists; `to_meta` frees it"""
        self._rested: torch.optim.Optimizer | None = None
        self._choice: Choice | None = None
        """made once, for the memory that is free later depends on what is away"""
        self._head_kernels = head_kernels(self._device.type) if options.fused_head else None
        self._flash = use_flash_attention_3(self._device) if options.flash_attention_3 else None
        dims = layout(context.world_size, executor_size, options)
        self._mesh = fsdp.make_mesh(self._device.type, context.world_ranks, context.rank, dims)
        self._everyone = subgroup(context.world_ranks)
        self.staged: Any = None
        self._own_names: dict[str, str] = {}
        """parameter name of each served name"""
        self._writing: Future[None] | None = None
        self._snapshot_memory = host_memory.HostMemory()
        # who shares the work must draw alike
        torch.manual_seed(options.seed + context.rank // dims.num_peers)
        self._materialize()

    def _materialize(self, path: str | None = None, is_read: bool = True) -> None:
        """Make the module, and read its weights or leave them unwritten for a sync to fill."""
        with real_tensors(self._device):
            self.module = whole_module(self._source)
            self.module.head_kernels = self._head_kernels
            self._choice = self._choice or self._choose()
            divided = divide(self.module, self._options, self._choice.savings, self._mesh, self._device)
            self.arena, self._compiled = divided
            self._is_here, self._whole, self._adapters = True, WholeModule(self.module), {}
            if is_read:
                source = read_weights(self.module, path)
                drops = self._options.drop_untrained or isinstance(self.module, huggingface.HuggingFaceFsdp2ScoreModule)
                self._form = self._form or stored_form(
                    self.module, source, self._context.rank == 0, drops, self._options.router_bias_update_rate > 0
                )
            self.module.on_weights_materialized()
            self._rest_optimizer()

    def _choose(self) -> Choice:
        options, dims, device = self._options, self._mesh.dims, self._device
        footprint = footprint_of(self.module, options, dims, dtype_of(options, device.type), device.type)
        return choose(options, footprint, free_bytes(device, self._everyone), dims.num_shards, device.type)

    @property
    def _is_state_on_host(self) -> bool:
        return self._choice is not None and self._choice.savings.offload_optimizer and self._device.type != "cpu"

    def choices(self) -> dict[str, str]:
        """Return what was chosen when the engine was built, and why, by topic of the start report."""
        assert self._choice is not None
        told = {"memory": self._choice.text()}
        if self._options.fused_head:
            told["head"] = "torch's operations" if self._head_kernels is None else "Triton kernels"
        if self._flash is not None:
            told["attention"] = self._flash
        if self._compiled is not None:
            told["compile"] = self._compiled.text()
        return told

    # -- methods of the module -----------------------------------------------------------------------------------

    def invoke(self, args: tuple, kwargs: dict, method: str) -> Any:
        """Return the result of a method of the user's module."""
        with fsdp.resharded(self.module):
            return getattr(self.module, method)(*args, **kwargs)

    def reload_methods(self, source: bytes) -> None:
        """Give the module another class; see `TrainWorker.reload_methods`."""
        self._source = source
        if self._is_here:
            take_class(self.module, type(cloudpickle.loads(source)))

    def set_mode(self, is_training: bool) -> None:
        """Put the module into training or evaluation mode."""
        self.module.train(is_training)

    def step_lr_scheduler(self) -> float:
        """Advance the module's `lr_scheduler`.

        Returns the new learning rate.
        """
        if self.module.lr_scheduler is None:
            raise ConfigError("step_lr_scheduler needs self.lr_scheduler: set it in on_weights_materialized")
        self.module.lr_scheduler.step()
        return float(self.module.lr_scheduler.get_last_lr()[0])

    # -- weights -------------------------------------------------------------------------------------------------

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """Return this rank's boxes of the parameters, and stored buffers, by name."""
        shards = {name: fsdp.local_shard(parameter) for name, parameter in self.module.named_parameters()}
        return shards | buffer_shards(self.module)

    def served_shards(self, has_values: bool = True) -> dict[str, ParameterShard]:
        """Return this rank's served boxes, after the module's hooks; see `SourceWorker.served_shards`.

        Tensors that all tensor-parallel ranks hold are served by the first of them.
        """
        served, self._own_names = {}, {}
        for name, parameter in self.module.named_parameters():
            box = fsdp.local_shard(self.module.served_parameter(name, parameter) if has_values else parameter)
            out = self.module.postprocess_named_parameter(name, box.tensor)
            if out is None:
                continue
            self._own_names[out[0]] = name
            if self._mesh.tensor_rank == 0 or not parameter.placements[-1].is_replicate():  # type: ignore[attr-defined]
                served[out[0]] = ParameterShard(out[1], box.offset, box.global_shape)
        for name, buffer in buffer_shards(self.module).items():
            self._own_names[self.module.checkpoint_name(name)] = name
            if self._mesh.is_first_of_copy:
                served[self.module.checkpoint_name(name)] = buffer
        return served

    def aliases(self) -> dict[str, str]:
        """Return the other served names of tied tensors; see `SourceWorker.aliases`."""
        first: dict[int, str] = {}
        further: dict[str, str] = {}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            if name != first.setdefault(id(p), name):
                names, tensor = (name, first[id(p)]), fsdp.local_tensor(p.detach())
                other, own = (self.module.postprocess_named_parameter(n, tensor) for n in names)
                if other is not None and own is not None:
                    further[other[0]] = own[0]
        return further

    def full_tensor(self, name: str) -> Tensor:
        """Return a served tensor, gathered whole; see `SourceWorker.full_tensor`. Call `served_shards` first."""
        whole, block = self._served(name)
        out = block.new_empty(whole.shape)
        fsdp.gather_into(out, block, whole)
        return out

    def gather_into(self, name: str, out: Tensor) -> None:
        """Write a served tensor whole; see `GatheringWorker.gather_into`. Call `served_shards` first."""
        whole, block = self._served(name)
        fsdp.gather_into(out, block, whole)

    def _served(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a parameter with the value that leaves, and this rank's box of it after the module's hook."""
        own = self._own_names[name]
        owner, _, attribute = own.rpartition(".")
        if (buffer := self.module.get_submodule(owner)._buffers.get(attribute)) is not None:
            return buffer, buffer
        whole = self.module.served_parameter(own, self.module.get_parameter(own))
        out = self.module.postprocess_named_parameter(own, fsdp.local_tensor(whole.detach()))
        assert out is not None  # else it were not served
        return whole, out[1]

    def export_values(self) -> dict[str, tuple[tuple[slice, ...], tuple[int, ...], Tensor]]:
        """Return copies of this rank's served boxes on CPU: name -> (box, global shape, values)."""
        served = self.served_shards().items()
        return {name: (s.box, s.global_shape, s.tensor.detach().cpu().clone()) for name, s in served}

    def weights_changed(self, version: int) -> None:
        """Do nothing: no state is derived from the weights."""

    def nonfinite_parameters(self) -> list[str]:
        """Return the names of parameters of which this rank's part holds NaN or infinity."""
        return nonfinite_names(self.parameter_shards())

    def load(self, path: str | None) -> None:
        """Read the weights from a Hugging Face folder; None is the module's own source."""
        if self._is_here:
            read_weights(self.module, path)
        else:
            self._materialize(path)

    def save(self, path: str) -> None:
        """Write a Hugging Face checkpoint; see `TrainWorker.save`."""
        assert self._form is not None  # the weights were read
        export(self.module, Path(path), self._form, self._context.rank == 0, self._everyone)

    # -- adapters ------------------------------------------------------------------------------------------------

    def add_adapter(self, name: str, options: LoraOptions, seed: int) -> None:
        """Add an adapter; see `AdapterTrainWorker.add_adapter`."""
        self._adapters[name] = Adapter(self.module, options, seed, self._options, self._mesh)

    def remove_adapter(self, name: str) -> None:
        """Drop an adapter with its gradients and its optimizer."""
        del self._adapters[name]

    def forget_gradients(self, name: str) -> None:
        """Drop the accumulated gradients of an adapter."""
        self._adapters[name].forget()

    def adapter_weights(self, name: str | None) -> AdapterWeights | None:
        """Return the values of an adapter on the first rank; see `AdapterTrainWorker.adapter_weights`."""
        if name is None:
            values = own_adapter(self.module)  # type: ignore[arg-type]
            return values if self._context.rank == 0 else None
        return self._adapters[name].weights() if self._context.rank == 0 else None

    def save_adapter(self, name: str, path: str, facts: dict[str, Any], has_state: bool = True) -> None:
        """Write an adapter and its optimizer's state; see `AdapterTrainWorker.save_adapter`."""
        if self._context.rank == 0:
            self._adapters[name].write(Path(path), facts, has_state)

    def load_adapter(self, name: str, path: str, has_state: bool) -> None:
        """Read an adapter; see `AdapterTrainWorker.load_adapter`."""
        state = sharded.load_values(Path(path) / OPTIMIZER) if has_state else None
        self._adapters[name].take(AdapterWeights.read(Path(path)), state)

    # -- state ---------------------------------------------------------------------------------------------------

    def save_state(self, folder: str, path: str, facts: dict[str, Any], is_asynchronous: bool) -> None:
        """Write the state to resume from; see `TrainWorker.save_state`."""
        memory = self._snapshot_memory if self._device.type == "cuda" else None  # elsewhere it need not be pinned
        state = self._snapshot(is_asynchronous, memory)
        group = subgroup(self._context.world_ranks, "checkpoint", "gloo")
        self._writing = sharded.start_writing(state, Path(folder), Path(path), facts, self._context.rank, group)
        if not is_asynchronous:
            self.finish_saving()

    def has_saved(self) -> bool:
        """Return whether `finish_saving` would return at once."""
        return self._writing is None or self._writing.done()

    def finish_saving(self) -> None:
        """Wait until the last `save_state` is written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load_state(self, path: str) -> None:
        """Resume from the state that `save_state` wrote; see `TrainWorker.load_state`."""
        folder = Path(path)
        whole = sharded.load_values(folder / "rank-0.pt").get("accumulated", {})
        self._check_layout(folder, whole)
        self._resume(sharded.load(folder, self._trained, self._context.rank, self._everyone), whole)

    def pack_state(self) -> bytes:
        """Return this rank's state to resume from; see `TrainWorker.pack_state`."""
        return sharded.pack(self._snapshot(is_copied=False, is_packed=True))

    def unpack_state(self, packed: bytes) -> None:
        """Resume from the state that `pack_state` returned; see `TrainWorker.unpack_state`."""
        own = sharded.unpack(packed, self._trained)
        self._resume(own, own)

    def _snapshot(
        self, is_copied: bool, memory: host_memory.HostMemory | None = None, is_packed: bool = False
    ) -> sharded.Snapshot:
        is_whole = is_packed or self._context.rank == 0  # a checkpoint holds once what all ranks have alike
        accumulated = self._whole.accumulated()
        if self._adapters:
            accumulated["adapters"] = {name: each.state(is_whole) for name, each in self._adapters.items()}
            accumulated["layout"] = self._layout
        if self.module.routing is not None:
            accumulated["routing"] = self.module.routing.state_dict()
        return sharded.snapshot(self._trained, is_copied, memory, accumulated)

    @property
    def _trained(self) -> sharded.Trained:
        averages = self.module.teacher_averages if isinstance(self.module, TaughtModule) else None
        return sharded.Trained(self.module, self.module.optimizer, self.module.lr_scheduler, averages)

    @property
    def _layout(self) -> list[int]:
        """Numbers on which the accumulated gradients of adapters depend."""
        return [self._context.world_size, self._mesh.num_averaged]

    def _check_layout(self, folder: Path, whole: Mapping[str, Any]) -> None:
        for name, own in whole.get("adapters", {}).items():
            if whole["layout"] != self._layout and any(gradient is not None for gradient in own["gradients"]):
                told = f"ranks in another layout have accumulated gradients of the adapter {name!r}"
                raise CheckpointError(f"{folder}: {told}; resume in that layout, or save after optimizer_step")

    def _resume(self, accumulated: dict[str, Any], whole: Mapping[str, Any]) -> None:
        """Take over what belongs to the gradients, and adapters."""
        self._whole.resume(accumulated)
        self._adapters = {}
        for name, own in accumulated.get("adapters", {}).items():
            self.add_adapter(name, LoraOptions(**whole["adapters"][name]["options"]), 0)
            self._adapters[name].take_state(whole["adapters"][name], own)
        if self.module.routing is not None:
            self.module.routing.load_state_dict(accumulated.get("routing", {}))
        self.module.on_state_loaded()
        self._rest_optimizer()

    # -- residency -----------------------------------------------------------------------------------------------

    def to_device(self, what: Part) -> None:
        """Move the module and optimizer state to the device, or make the module with unwritten weights.

        There is no KV cache.
        """
        if what == "kv_cache":
            return
        if not self._is_here:
            self._materialize(is_read=False)
        self._move(self._device)

    def to_cpu(self) -> None:
        """Move the module and optimizer state to host memory."""
        if self._is_here:
            self._move(torch.device("cpu"))

    def to_meta(self) -> None:
        """Free the module, the optimizer and shared memory."""
        if self._is_here:
            del self.module, self._whole, self._adapters
            self._is_here = False
            for arena in (self.arena, self.staged):
                if isinstance(arena, SharedArena):
                    arena.discard()
            self.arena = self.staged = self._rested = None
            gc.collect()  # a module and its FSDP state refer to each other
        host_memory.give_back_cached_memory()

    def _move(self, device: torch.device) -> None:
        """Move parameters, gradients and optimizer state. On a CPU slot they are already in place."""
        if self._device.type == "cpu":
            return
        self.module.to(device)
        for adapter in self._adapters.values():
            adapter.move(device)
        self.staged = None  # what was shared for the last sync would hold the memory that is to be left
        if self._is_state_on_host:
            self._rest_optimizer()
        elif self.module.optimizer is not None:
            host_memory.move_state(self.module.optimizer, device)
        torch.cuda.synchronize()
        if device.type == "cpu":
            host_memory.give_back_cached_memory()

    def _rest_optimizer(self) -> None:
        """Move the optimizer state to the host if `offload_optimizer` is set. Every later step leaves it there."""
        optimizer = self.module.optimizer
        if optimizer is None or not self._is_state_on_host:
            return
        if optimizer is not self._rested:
            host_memory.keep_on_host_between_steps(optimizer, self._device)
            self._rested = optimizer
        host_memory.move_state(optimizer, torch.device("cpu"))

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank holds, by part: weights, optimizer."""
        if not self._is_here:
            return {"weights": 0, "optimizer": 0}
        weights = sum(fsdp.local_tensor(parameter).nbytes for parameter in self.module.parameters())
        states = self.module.optimizer.state.values() if self.module.optimizer else ()
        values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return {"weights": weights, "optimizer": sum(fsdp.local_tensor(value).nbytes for value in values)}

    def device_usage(self) -> host_memory.DeviceUsage:
        """Return this rank's device and the peak memory of its process there since the last call."""
        return host_memory.device_usage(self._device)


def layout(num_workers: int, executor_size: int, options: Fsdp2Options) -> ParallelDims:
    """Return the division of the work over the workers.

    `num_workers`: number of workers in all copies of the model.
    """
    return ParallelDims.of(num_workers, executor_size, options.sp_size, options.tp_size, options.ep_size)


def check_module(module: BaseTrainModule, options: Fsdp2Options) -> None:
    """Refuse a module that cannot be computed with these options."""
    module.check_architecture()
    if has_gpus() and options.compute_dtype != "float32":
        module.check_gpu_kernels()
    if type(module).materialization_source is HuggingFaceFsdp2TrainModule.materialization_source:
        source = str(module.materialization_source())
        if Path(source).expanduser().is_dir():  # workers download a name of the hub
            reader = StoredCheckpoint(module, local_checkpoint(source))
            if reader.is_container:
                check_container(reader.config)
            check_fit(reader, source, module)
    module.check_experts(options, "cuda" if has_gpus() else "cpu")
    if options.tp_size > 1:
        module.check_parallel(options.tp_size)
    if options.sp_size > 1 and isinstance(module, HuggingFaceFsdp2TrainModule):
        module.check_context_parallel(options.sp_size)
    if options.deterministic:
        module.check_deterministic(current_session().device)
        if options.tp_size > 1 and module.lora is not None:
            raise ConfigError(f"adapters with deterministic=true: {ADDED_APART.format(options.tp_size)}")
    if options.compile:
        check_compile(module, options.tp_size, options.use_liger_kernel)
    if options.use_liger_kernel:
        linear.check_liger(module, current_session().device)


def prefix_obstacle(module: BaseTrainModule, options: Fsdp2Options) -> str | None:
    """Return why every row of a pack is computed whole; None if tokens that rows begin with are computed once."""
    if not options.share_prefixes:
        return "share_prefixes=false"
    if options.deterministic:
        return "with deterministic=true gradients would have other bits"
    return module.prefix_obstacle()


BACKEND = TrainBackend(
    options=Fsdp2Options,
    worker=Fsdp2Worker,
    layout=layout,
    check_module=check_module,
    prefix_obstacle=prefix_obstacle,
    choices=Fsdp2Worker.choices,
    check_adapter=check_adapter,
    read_adapter=read_adapter,
)
