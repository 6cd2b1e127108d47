"""The worker of the train executor "fsdp2": holds a shard of a user's module and runs its methods."""

from __future__ import annotations

import gc
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from rlite.algorithms.on_logprobs import OnLogprobs, TokenLogprobs
from rlite.algorithms.reduce import Mean
from rlite.checkpoint import huggingface, sharded
from rlite.cluster.host import WorkerContext
from rlite.data.packs import companions, pack, unpack
from rlite.engine.fsdp2.options import Fsdp2Options
from rlite.engine.registry import Backend
from rlite.engine.workers import Part
from rlite.errors import CheckpointError, ConfigError, why_not_written
from rlite.nn.base import BaseTrainModule
from rlite.nn.huggingface import HuggingFaceFsdp2TrainModule, exported_class, local_checkpoint
from rlite.nn.liger import use_liger_kernels
from rlite.nn.linear import speed_up_linear_layers
from rlite.nn.lora import LoraTrainModule
from rlite.nn.meta import real_tensors
from rlite.observability import stats_tracker
from rlite.parallel.arena import HostMemory, SharedArena
from rlite.parallel.fsdp import (
    allocate,
    clip_gradients,
    forget_gradients,
    full_tensor,
    local_shard,
    local_tensor,
    resharded,
    set_gradient_sync,
    shard,
)
from rlite.parallel.mesh import ParallelDims, make_mesh
from rlite.parallel.offload import keep_on_host_between_steps, move_state
from rlite.parallel.processes import subgroup
from rlite.parallel.shards import CheckpointReader, ParameterShard, nonfinite_names
from rlite.parallel.usage import DeviceUsage, device_usage, give_back_cached_memory

Loss = Callable[[Any, dict[str, Any]], Any]
"""loss_fn(logits [T, V], data) -> mean loss, or (mean loss, dict of means to report, numbers or `Mean`); OnLogprobs
gets those instead"""
Weight = Callable[[dict[str, Any]], Any]
Sums = dict[str, tuple[Any, Any]]
"""total and count of each reported mean, so far"""


class Fsdp2Worker:
    """One rank of a train engine. All ranks get the same calls in the same order."""

    def __init__(self, context: WorkerContext, source: bytes, options: Fsdp2Options, executor_size: int) -> None:
        self._context = context
        self._options = options
        self._source = source
        self._device = torch.device(context.torch_device)
        self._param_dtype = getattr(torch, options.param_dtype)
        default = "bfloat16" if self._device.type == "cuda" else options.param_dtype
        self._compute_dtype = getattr(torch, options.compute_dtype or default)
        self._is_state_on_host = options.offload_optimizer and self._device.type != "cpu"
        self._rested: torch.optim.Optimizer | None = None
        dims = ParallelDims.of(context.world_size, executor_size, options.sp_size, options.tp_size)
        self._mesh = make_mesh(self._device.type, context.world_ranks, context.rank, dims)
        self._everyone = subgroup(context.world_ranks)
        self.module: BaseTrainModule
        self.arena: SharedArena | None = None
        self.staged: Any = None
        self._writing: Future[None] | None = None
        self._snapshot_memory = HostMemory()
        self._own_names: dict[str, str] = {}
        """served name -> parameter name"""
        # who shares the work must draw alike
        torch.manual_seed(options.seed + context.rank // dims.num_peers)
        self._materialize()

    # -- making the module real ----------------------------------------------------------------------------------

    def _materialize(self, path: str | None = None, is_read: bool = True) -> None:
        """Shard the module, allocate this rank's part, and read it (or leave it unwritten, for a sync to fill)."""
        with real_tensors(self._device):
            module: BaseTrainModule = cloudpickle.loads(self._source)
            if isinstance(module, HuggingFaceFsdp2TrainModule):
                module.tie_weights()  # type: ignore[operator]
            if self._options.use_liger_kernel:
                use_liger_kernels(module)
            if self._options.gradient_checkpointing:
                module.recompute_activations()
            if self._device.type == "cpu":
                speed_up_linear_layers(module)
            if self._mesh.dims.tensor > 1:
                module.parallelize(self._mesh.tensor)
            if self._mesh.dims.seq > 1:
                module.context_group = self._mesh.seq
            shard(module, module.fsdp_units(), self._mesh, self._compute_dtype, self._param_dtype)
            self.arena = allocate(module, self._device, self._param_dtype)
            self.module = module
            if is_read:
                self._read_weights(path)
            module.on_weights_materialized()
            self._rest_optimizer()

    @torch.no_grad()
    def _read_weights(self, path: str | None = None) -> None:
        """Fill this rank's boxes; nothing else of the checkpoint is read."""
        source = self.module.materialization_source() if path is None else path
        reader: Any = _Tensors(source) if isinstance(source, Mapping) else CheckpointReader(local_checkpoint(source))
        for name, parameter in self.module.named_parameters():
            box = local_shard(parameter)
            stored = self.module.checkpoint_name(name)
            if stored not in reader.names():
                missing = self.module.missing_parameter(name, box.global_shape)
                if missing is not None:
                    box.tensor.copy_(missing[box.box])
                    continue
            shape = reader.shape(stored)
            if shape != box.global_shape:
                raise CheckpointError(f"{stored}: the model needs shape {box.global_shape}, {source} has {shape}")
            box.tensor.copy_(self.module.preprocess_named_parameter(name, reader.read(stored, box.box)))
        if names := self.nonfinite_parameters():
            where = "materialization_source()" if isinstance(source, Mapping) else source
            raise CheckpointError(f"{where}: the weights are not finite: {names[0]} holds NaN or infinity")

    def nonfinite_parameters(self) -> list[str]:
        """Names of the parameters of which this rank's part holds NaN or infinity."""
        return nonfinite_names(self.parameter_shards())

    # -- the user's methods --------------------------------------------------------------------------------------

    def invoke(self, method: str, args: tuple, kwargs: dict) -> Any:
        """Call a method of the user's module."""
        with resharded(self.module):
            return getattr(self.module, method)(*args, **kwargs)

    # -- atomic operations ---------------------------------------------------------------------------------------

    def set_mode(self, is_training: bool) -> None:
        self.module.train(is_training)

    def train_batch(
        self, batch: Mapping[str, Tensor], microbatches: list[list[int]], loss_fn: Loss, loss_weight_fn: Weight
    ) -> dict[str, float]:
        """Forward and backward over this rank's microbatches, then one optimizer step.

        An empty microbatch is filled with the first row (or pair) at weight zero: every rank takes part in every
        collective. Returns the batch's means: loss, what loss_fn reports; grad_norm and lr.
        """
        optimizer = self._need_optimizer()
        optimizer.zero_grad(set_to_none=True)
        weights = [float(loss_weight_fn(pack(batch, rows, self._device))) if rows else 0.0 for rows in microbatches]
        total = self._sum([sum(weights)])[0]
        lr = float(optimizer.param_groups[0]["lr"])
        if total == 0:
            return {"loss": 0.0, "grad_norm": 0.0, "lr": lr, "weight": 0.0, "is_skipped": 1.0}
        try:
            sums = self._accumulate(batch, microbatches, [weight / total for weight in weights], loss_fn)
        except Exception:  # a loss that raises must not leave its first microbatches to the next step
            forget_gradients(self.module)
            raise
        reported, grad_norm = self._means(sums), self._clip()
        is_skipped = not (math.isfinite(grad_norm) and math.isfinite(reported["loss"]))
        if not is_skipped:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # else gradients take memory, and are offloaded and saved
        step = {"grad_norm": grad_norm, "lr": lr, "weight": total, "is_skipped": float(is_skipped)}
        return {**reported, **step}

    def _accumulate(
        self, batch: Mapping[str, Tensor], microbatches: list[list[int]], shares: list[float], loss_fn: Loss
    ) -> Sums:
        """Add up the gradients of this rank's microbatches, each counting its share of the whole batch."""
        sums: Sums = {}
        for index, (rows, share) in enumerate(zip(microbatches, shares, strict=True)):
            data = pack(batch, rows or companions(batch), self._device)
            set_gradient_sync(self.module, is_last=index == len(microbatches) - 1)
            outputs = self._outputs(loss_fn, data)
            with _counting(rows):
                loss, report = _loss(loss_fn, outputs, data)
            if share == 0:
                values = outputs.logprobs if isinstance(outputs, TokenLogprobs) else outputs
                loss = values.sum() * 0.0  # the mean of nothing may be NaN, and NaN times 0 spoils every gradient
            # FSDP averages gradients over ranks; the shares already divide by the whole batch
            (loss * (share * self._mesh.num_averaged)).backward()
            _add(sums, {"loss": loss, **report}, share)
        return sums

    @torch.no_grad()
    def eval_batch(
        self, batch: Mapping[str, Tensor], microbatches: list[list[int]], loss_fn: Loss, loss_weight_fn: Weight
    ) -> dict[str, float]:
        """As train_batch, in evaluation mode, without gradients and without a step."""
        weights = [float(loss_weight_fn(pack(batch, rows, self._device))) if rows else 0.0 for rows in microbatches]
        total = self._sum([sum(weights)])[0]
        sums: Sums = {}
        with resharded(self.module), _evaluating(self.module):
            for rows, weight in zip(microbatches, weights, strict=True):
                data = pack(batch, rows or companions(batch), self._device)
                outputs = self._outputs(loss_fn, data)
                with _counting(rows):
                    loss, report = _loss(loss_fn, outputs, data)
                _add(sums, {"loss": loss, **report}, weight / total if total else 0.0)
        return {**self._means(sums), "weight": total}

    @torch.no_grad()
    def forward(
        self,
        batch: Mapping[str, Tensor],
        microbatches: list[list[int]],
        post_hook: Callable[..., Tensor],
        without_adapters: bool = False,
    ) -> dict[int, Tensor]:
        """post_hook(logits [T, V], data) -> [T, ...] for every row of this rank: local row -> its values, padded.

        In evaluation mode: what is compared with it (old and reference log-probabilities, values) has no dropout.
        """
        width = batch["attention_mask"].shape[1]
        results: dict[int, Tensor] = {}
        base = self.module.without_adapters() if without_adapters else nullcontext()
        with resharded(self.module), _evaluating(self.module), base:
            for rows in microbatches:
                data = pack(batch, rows or companions(batch), self._device)
                outputs = self._outputs(post_hook, data)
                with _counting(rows):
                    values = post_hook(outputs, data)
                padded = unpack(values, data["cu_seqlens"], width).cpu()
                results.update(zip(rows, padded, strict=False))
        return results

    def _outputs(self, function: Callable[..., Any], data: dict[str, Any]) -> Tensor | TokenLogprobs:
        """What a loss or a post_hook reads of a pack: logits, or the log-probabilities that it says are enough."""
        if isinstance(function, OnLogprobs):
            return self.module.compute_logprobs(data, function.temperature, function.positions(data))
        return self.module.compute_logits(data)

    def step_lr_scheduler(self) -> float:
        """Advance the module's lr_scheduler; returns the new learning rate."""
        if self.module.lr_scheduler is None:
            raise ConfigError("step_lr_scheduler needs self.lr_scheduler: set it in on_weights_materialized")
        self.module.lr_scheduler.step()
        return float(self.module.lr_scheduler.get_last_lr()[0])

    def _need_optimizer(self) -> torch.optim.Optimizer:
        if self.module.optimizer is None:
            raise ConfigError("train_batch needs self.optimizer: set it in on_weights_materialized")
        return self.module.optimizer

    def _clip(self) -> float:
        return clip_gradients(self.module.parameters(), self._options.max_grad_norm, self._mesh, self._everyone)

    def _means(self, sums: Sums) -> dict[str, float]:
        """Return the batch's means by name. Raises: ConfigError on every rank if the ranks have different names."""
        names = sorted(sums)
        own = float(zlib.crc32("\n".join(names).encode()))
        if self._sum([own])[0] != own * self._mesh.dims.num_data_ranks:
            raise ConfigError(
                f"this rank's loss reports {names}, another rank's something else: a loss has to report the same "
                "metrics for every pack"
            )
        summed = self._sum([float(part) for name in names for part in sums[name]])
        return {
            name: total / count if count else 0.0
            for name, total, count in zip(names, summed[::2], summed[1::2], strict=True)
        }

    def _sum(self, values: list[float]) -> list[float]:
        """Sums over the ranks with different data, in float64."""
        summed = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(summed, group=self._everyone)
        return (summed / self._mesh.dims.num_peers).tolist()  # every sum is there once for each peer

    # -- weights -------------------------------------------------------------------------------------------------

    def parameter_shards(self) -> dict[str, ParameterShard]:
        return {name: local_shard(parameter) for name, parameter in self.module.named_parameters()}

    def served_shards(self, has_values: bool = True) -> dict[str, ParameterShard]:
        """The boxes as they leave this engine: renamed and changed by `postprocess_named_parameter`.

        What every tensor-parallel rank holds is served by the first of them.
        """
        served, self._own_names = {}, {}
        for name, parameter in self.module.named_parameters():
            box = local_shard(self.module.served_parameter(name, parameter) if has_values else parameter)
            out = self.module.postprocess_named_parameter(name, box.tensor)
            if out is None:
                continue
            self._own_names[out[0]] = name
            if self._mesh.tensor_rank == 0 or not parameter.placements[-1].is_replicate():  # type: ignore[attr-defined]
                served[out[0]] = ParameterShard(out[1], box.offset, box.global_shape)
        return served

    def aliases(self) -> dict[str, str]:
        """Tied parameters: every further name -> the name under which it is served, both as they leave this engine."""
        first = {id(p): name for name, p in self.module.named_parameters()}
        further: dict[str, str] = {}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            if name != first[id(p)]:
                names = (name, first[id(p)])
                out = [self.module.postprocess_named_parameter(n, local_tensor(p.detach())) for n in names]
                if out[0] is not None and out[1] is not None:
                    further[out[0][0]] = out[1][0]
        return further

    def full_tensor(self, name: str) -> Tensor:
        """A served tensor gathered whole on this device; a collective of all ranks."""
        own = self._own_names[name]
        parameter = self.module.get_parameter(own)
        out = self.module.postprocess_named_parameter(own, full_tensor(self.module.served_parameter(own, parameter)))
        assert out is not None  # else it were not served
        return out[1]

    def export_values(self) -> dict[str, tuple[tuple[slice, ...], tuple[int, ...], Tensor]]:
        """Copies of this rank's boxes on CPU: name -> (box, global shape, values)."""
        return {
            name: (shard.box, shard.global_shape, shard.tensor.detach().cpu().clone())
            for name, shard in self.served_shards().items()
        }

    def weights_changed(self, version: int) -> None:
        """Nothing is derived from the weights here."""

    def load(self, path: str | None) -> None:
        """Read the weights again, from a Hugging Face checkpoint or from the module's own source."""
        if not hasattr(self, "module"):
            self._materialize(path)
        else:
            self._read_weights(path)

    def save(self, path: str) -> None:
        """Write a Hugging Face checkpoint, and adapters beside it; every rank takes part, rank 0 writes.

        Raises: CheckpointError on rank 0 if it could not be written; then `path` is as it was.
        """
        module = self.module
        trained: dict[str, Tensor] = {}
        if isinstance(module, LoraTrainModule) and module.lora is not None:
            trained = {name: full_tensor(p) for name, p in module.named_parameters() if p.requires_grad}
        tensors = ((name, full_tensor(module.served_parameter(name, p))) for name, p in module.named_parameters())
        served = (out for name, full in tensors if (out := module.postprocess_named_parameter(name, full)))
        try:
            if self._context.rank == 0:
                self._write(Path(path), served, trained)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: could not be written: {why_not_written(error)}") from error
        finally:  # gathering is a collective: a full disk on rank 0 must not leave its peers in one
            for _ in served:
                pass
            dist.barrier(group=self._everyone)

    def _write(self, path: Path, tensors: Iterable[tuple[str, Tensor]], adapter: Mapping[str, Tensor]) -> None:
        dtype = self.module.config.dtype if isinstance(self.module, HuggingFaceFsdp2TrainModule) else None
        writer = huggingface.Writer(path, dtype)
        for name, tensor in tensors:
            writer.add(name, tensor)
        if isinstance(self.module, HuggingFaceFsdp2TrainModule):
            source = self.module.config._name_or_path
            folder = local_checkpoint(source, weights=False) if source else None
            writer.add_config(self.module.exported_config(), exported_class(self.module), folder)
        if isinstance(self.module, LoraTrainModule) and adapter:
            self.module.save_adapter(writer.folder / "adapter", adapter)
        writer.finish()

    def save_state(self, folder: str, path: str, facts: dict[str, Any], is_asynchronous: bool) -> None:
        """Write into `folder` all that resume needs, and publish it as `path`: now, or beside what comes next."""
        module = self.module
        memory = self._snapshot_memory if self._device.type == "cuda" else None  # elsewhere it need not be pinned
        state = sharded.snapshot(module, module.optimizer, module.lr_scheduler, is_asynchronous, memory)
        group = subgroup(self._context.world_ranks, "checkpoint", "gloo")
        self._writing = sharded.start_writing(state, Path(folder), Path(path), facts, self._context.rank, group)
        if not is_asynchronous:
            self.finish_saving()

    def has_saved(self) -> bool:
        """Whether `finish_saving` need not wait."""
        return self._writing is None or self._writing.done()

    def finish_saving(self) -> None:
        """Wait until what `save_state` began is written. Raises: CheckpointError if it could not be."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load_state(self, path: str) -> None:
        sharded.load(
            Path(path), self.module, self.module.optimizer, self.module.lr_scheduler, self._context.rank, self._everyone
        )
        self.module.on_state_loaded()
        self._rest_optimizer()

    # -- residency -----------------------------------------------------------------------------------------------

    def to_device(self, what: Part) -> None:
        if what == "kv_cache":
            return
        if not hasattr(self, "module"):
            self._materialize(is_read=False)
        self._move(self._device)

    def to_cpu(self) -> None:
        if hasattr(self, "module"):
            self._move(torch.device("cpu"))

    def to_meta(self) -> None:
        if hasattr(self, "module"):
            del self.module
            for arena in (self.arena, self.staged):
                if isinstance(arena, SharedArena):
                    arena.discard()
            self.arena = self.staged = self._rested = None
            gc.collect()  # a module and its FSDP state refer to each other
        give_back_cached_memory()

    def _move(self, device: torch.device) -> None:
        """Move parameters, gradients and optimizer state; on a CPU slot they are there already."""
        if self._device.type == "cpu":
            return
        self.module.to(device)
        self.staged = None  # what was shared for the last sync would hold the memory that is to be left
        if self._is_state_on_host:
            self._rest_optimizer()
        elif self.module.optimizer is not None:
            move_state(self.module.optimizer, device)
        torch.cuda.synchronize()
        if device.type == "cpu":
            give_back_cached_memory()

    def _rest_optimizer(self) -> None:
        """With offload_optimizer: its state goes to the host, where every step from now on leaves it."""
        optimizer = self.module.optimizer
        if optimizer is None or not self._is_state_on_host:
            return
        if optimizer is not self._rested:
            keep_on_host_between_steps(optimizer, self._device)
            self._rested = optimizer
        move_state(optimizer, torch.device("cpu"))

    def memory_bytes(self) -> dict[str, int]:
        if not hasattr(self, "module"):
            return {"weights": 0, "optimizer": 0}
        weights = sum(_bytes(parameter) for parameter in self.module.parameters())
        optimizer = self.module.optimizer
        states = optimizer.state.values() if optimizer else ()
        held = sum(_bytes(value) for state in states for value in state.values() if isinstance(value, Tensor))
        return {"weights": weights, "optimizer": held}

    def device_usage(self) -> DeviceUsage:
        return device_usage(self._device)


def _number(value: Any) -> Tensor | float:
    """In float64, and where it is: a GPU goes on with its work until `_means` asks for the batch's means."""
    return value.detach().double().reshape(()) if isinstance(value, Tensor) else float(value)


class _Tensors:
    """A dict of tensors, read as a checkpoint is."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise CheckpointError(f"materialization_source() has no tensor named {name!r}")
        return tuple(self._tensors[name].shape)

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        return self._tensors[name][box]


def _bytes(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.element_size()


def _loss(loss_fn: Loss, outputs: Tensor | TokenLogprobs, data: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    result = loss_fn(outputs, data)
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    loss, report = result if is_pair else (result, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ConfigError(
            f"loss_fn returned {found}; expected a mean, one number in a tensor, or (mean, dict of means)"
        )
    return loss, report


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Inside, the module is in evaluation mode; afterwards every submodule is in the mode that it was in."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True


def _counting(rows: list[int]) -> AbstractContextManager[Any]:
    """What is told to stats_tracker of rows that only fill a microbatch up counts nowhere."""
    return nullcontext() if rows else stats_tracker.apart()


def _add(sums: Sums, means: Mapping[str, Any], weight: float) -> None:
    """Add a microbatch's means: a `Mean` counts its elements, a number `weight`. Without weight it may be NaN."""
    for key, mean in means.items():
        total, count = sums.get(key, (0.0, 0.0))
        if weight:
            own = (mean.total, mean.count) if isinstance(mean, Mean) else (_number(mean) * weight, weight)
            total, count = total + _number(own[0]), count + _number(own[1])
        sums[key] = total, count


BACKEND = Backend(options=Fsdp2Options, worker=Fsdp2Worker)
