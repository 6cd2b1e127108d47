"""The worker of the train executor "fsdp2": it holds a shard of a user's module and runs its methods."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlite.checkpoint import sharded
from rlite.cluster.host import WorkerContext
from rlite.engine.batch_shares import BatchShare
from rlite.engine.fsdp2.batch_runner import BatchRunner
from rlite.engine.fsdp2.export import export
from rlite.engine.fsdp2.materialize import make_module, read_weights
from rlite.engine.fsdp2.options import Fsdp2Options
from rlite.engine.fsdp2.served import ServedParameters
from rlite.engine.train_executor import Loss, Weight
from rlite.engine.workers import Part
from rlite.errors import ConfigError
from rlite.nn.base import BaseTrainModule
from rlite.nn.meta import real_tensors
from rlite.parallel.arena import HostMemory, SharedArena
from rlite.parallel.dims import ParallelDims
from rlite.parallel.fsdp import local_shard, local_tensor, resharded
from rlite.parallel.mesh import make_mesh
from rlite.parallel.offload import keep_on_host_between_steps, move_state
from rlite.parallel.processes import subgroup
from rlite.parallel.shards import ParameterShard, nonfinite_names
from rlite.parallel.usage import DeviceUsage, device_usage, give_back_cached_memory


class Fsdp2Worker:
    """One rank of a train engine; `TrainExecutor` documents the meaning of each method.

    Args:
        context: the place of this worker.
        source: the pickled module, on the meta device.
        options: options of the executor.
        executor_size: number of workers that hold one copy of the model.
    """

    def __init__(self, context: WorkerContext, source: bytes, options: Fsdp2Options, executor_size: int) -> None:
        self._context = context
        self._options = options
        self._source = source
        self._device = torch.device(context.torch_device)
        self._is_state_on_host = options.offload_optimizer and self._device.type != "cpu"
        self._rested: torch.optim.Optimizer | None = None
        dims = ParallelDims.of(context.world_size, executor_size, options.sp_size, options.tp_size)
        self._mesh = make_mesh(self._device.type, context.world_ranks, context.rank, dims)
        self._everyone = subgroup(context.world_ranks)
        self.module: BaseTrainModule
        self.arena: SharedArena | None = None
        self.staged: Any = None
        self._batches: BatchRunner
        self._served: ServedParameters
        self._writing: Future[None] | None = None
        self._snapshot_memory = HostMemory()
        # who shares the work must draw alike
        torch.manual_seed(options.seed + context.rank // dims.num_peers)
        self._materialize()

    def _materialize(self, path: str | None = None, is_read: bool = True) -> None:
        """Make the module, and read its weights or leave them unwritten for a sync to fill."""
        with real_tensors(self._device):
            self.module, self.arena = make_module(self._source, self._options, self._mesh, self._device)
            self._batches = BatchRunner(self.module, self._mesh, self._everyone, self._device)
            self._served = ServedParameters(self.module, self._mesh)
            if is_read:
                read_weights(self.module, path)
            self.module.on_weights_materialized()
            self._rest_optimizer()

    # -- atomic operations ---------------------------------------------------------------------------------------

    def forward_backward(self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight) -> dict[str, float]:
        """Accumulate the gradients of a batch; see `TrainExecutor.forward_backward`.

        Args:
            share: this data rank's rows and microbatches.
            loss_fn: the mean loss of a pack.
            loss_weight_fn: weight of a pack's mean.

        Returns:
            Weighted means over all ranks, by name, and `weight`.
        """
        return self._batches.forward_backward(share, loss_fn, loss_weight_fn)

    def optimizer_step(self) -> dict[str, float]:
        """Clip gradients and make one optimizer step; see `TrainExecutor.optimizer_step`.

        Returns:
            `grad_norm`, `lr`, `weight` and `is_skipped`.
        """
        return self._batches.optimizer_step(self._options.max_grad_norm)

    def train_batch(self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight) -> dict[str, float]:
        """Make one optimizer step on a batch; see `TrainExecutor.train_batch`.

        Args:
            share: this data rank's rows and microbatches.
            loss_fn: the mean loss of a pack.
            loss_weight_fn: weight of a pack's mean.

        Returns:
            The results of `forward_backward` and `optimizer_step`.
        """
        self._batches.start("train_batch")
        means = self.forward_backward(share, loss_fn, loss_weight_fn)
        return {**means, **self.optimizer_step()}

    def eval_batch(self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight) -> dict[str, float]:
        """Evaluate a batch without gradients; see `TrainExecutor.eval_batch`.

        Args:
            share: this data rank's rows and microbatches.
            loss_fn: the mean loss of a pack.
            loss_weight_fn: weight of a pack's mean.

        Returns:
            Weighted means over all ranks, by name, and `weight`.
        """
        return self._batches.eval_batch(share, loss_fn, loss_weight_fn)

    def forward(self, share: BatchShare, post_hook: Callable[..., Tensor], without_adapters: bool) -> dict[int, Tensor]:
        """Apply `post_hook` to every pack; see `TrainExecutor.forward`.

        Args:
            share: this data rank's rows and microbatches.
            post_hook: `post_hook(logits [T, V], data) -> [T, ...]`.
            without_adapters: switch the module's adapters off meanwhile.

        Returns:
            The values of each row on CPU, by row number in the share.
        """
        return self._batches.forward(share, post_hook, without_adapters)

    def invoke(self, args: tuple, kwargs: dict, method: str) -> Any:
        """Return the result of a method of the user's module.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            method: name of the method.
        """
        with resharded(self.module):
            return getattr(self.module, method)(*args, **kwargs)

    def set_mode(self, is_training: bool) -> None:
        """Put the module into training or evaluation mode."""
        self.module.train(is_training)

    def step_lr_scheduler(self) -> float:
        """Advance the module's `lr_scheduler`.

        Returns:
            The new learning rate.

        Raises:
            ConfigError: the module has no lr_scheduler.
        """
        if self.module.lr_scheduler is None:
            raise ConfigError("step_lr_scheduler needs self.lr_scheduler: set it in on_weights_materialized")
        self.module.lr_scheduler.step()
        return float(self.module.lr_scheduler.get_last_lr()[0])

    # -- weights -------------------------------------------------------------------------------------------------

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """Return this rank's boxes of the parameters, by parameter name."""
        return {name: local_shard(parameter) for name, parameter in self.module.named_parameters()}

    def served_shards(self, has_values: bool = True) -> dict[str, ParameterShard]:
        """Return this rank's served boxes; see `SourceWorker.served_shards`."""
        return self._served.shards(has_values)

    def aliases(self) -> dict[str, str]:
        """Return the other served names of tied tensors; see `SourceWorker.aliases`."""
        return self._served.aliases()

    def full_tensor(self, name: str) -> Tensor:
        """Return a served tensor, gathered whole; see `SourceWorker.full_tensor`."""
        return self._served.full_tensor(name)

    def export_values(self) -> dict[str, tuple[tuple[slice, ...], tuple[int, ...], Tensor]]:
        """Return copies of this rank's served boxes on CPU: name -> (box, global shape, values)."""
        return {
            name: (shard.box, shard.global_shape, shard.tensor.detach().cpu().clone())
            for name, shard in self.served_shards().items()
        }

    def weights_changed(self, version: int) -> None:
        """Do nothing: no state is derived from the weights."""

    def nonfinite_parameters(self) -> list[str]:
        """Return the names of parameters of which this rank's part holds NaN or infinity."""
        return nonfinite_names(self.parameter_shards())

    def load(self, path: str | None) -> None:
        """Read the weights from a Hugging Face folder; None is the module's own source."""
        if hasattr(self, "module"):
            read_weights(self.module, path)
        else:
            self._materialize(path)

    def save(self, path: str) -> None:
        """Write a Hugging Face checkpoint; see `TrainExecutor.save`."""
        export(self.module, Path(path), self._context.rank == 0, self._everyone)

    # -- state ---------------------------------------------------------------------------------------------------

    def save_state(self, folder: str, path: str, facts: dict[str, Any], is_asynchronous: bool) -> None:
        """Write the state to resume from; see `TrainExecutor.save_state`.

        Args:
            folder: folder in which every rank writes.
            path: final name of the folder.
            facts: JSON-serialisable facts, sealed with the checkpoint.
            is_asynchronous: copy the state and return; write while training continues.
        """
        module = self.module
        memory = self._snapshot_memory if self._device.type == "cuda" else None  # elsewhere it need not be pinned
        accumulated = self._batches.accumulated()
        state = sharded.snapshot(
            module, module.optimizer, module.lr_scheduler, is_asynchronous, memory, accumulated=accumulated
        )
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
        """Resume from the state that `save_state` wrote; see `TrainExecutor.load_state`."""
        module = self.module
        accumulated = sharded.load(
            Path(path), module, module.optimizer, module.lr_scheduler, self._context.rank, self._everyone
        )
        self._batches.resume(accumulated)
        module.on_state_loaded()
        self._rest_optimizer()

    # -- residency -----------------------------------------------------------------------------------------------

    def to_device(self, what: Part) -> None:
        """Move the module and optimizer state to the device, or make the module with unwritten weights.

        There is no KV cache.
        """
        if what == "kv_cache":
            return
        if not hasattr(self, "module"):
            self._materialize(is_read=False)
        self._move(self._device)

    def to_cpu(self) -> None:
        """Move the module and optimizer state to host memory."""
        if hasattr(self, "module"):
            self._move(torch.device("cpu"))

    def to_meta(self) -> None:
        """Free the module, the optimizer and shared memory."""
        if hasattr(self, "module"):
            del self.module, self._batches, self._served
            for arena in (self.arena, self.staged):
                if isinstance(arena, SharedArena):
                    arena.discard()
            self.arena = self.staged = self._rested = None
            gc.collect()  # a module and its FSDP state refer to each other
        give_back_cached_memory()

    def _move(self, device: torch.device) -> None:
        """Move parameters, gradients and optimizer state. On a CPU slot they are there already."""
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
        """Move the optimizer state to the host if `offload_optimizer` is set. Every later step leaves it there."""
        optimizer = self.module.optimizer
        if optimizer is None or not self._is_state_on_host:
            return
        if optimizer is not self._rested:
            keep_on_host_between_steps(optimizer, self._device)
            self._rested = optimizer
        move_state(optimizer, torch.device("cpu"))

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank holds, by part: weights, optimizer."""
        if not hasattr(self, "module"):
            return {"weights": 0, "optimizer": 0}
        weights = sum(_bytes(parameter) for parameter in self.module.parameters())
        optimizer = self.module.optimizer
        states = optimizer.state.values() if optimizer else ()
        held = sum(_bytes(value) for state in states for value in state.values() if isinstance(value, Tensor))
        return {"weights": weights, "optimizer": held}

    def device_usage(self) -> DeviceUsage:
        """Return this rank's device and the peak memory of its process there since the last call."""
        return device_usage(self._device)


def _bytes(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.element_size()
