"""The life of a train engine: its layout over workers, its weights, and the state to resume from.

The seam of training backends: the workers behind a `RliteTrainEngine`.

A backend is a `TrainBackend` that is registered under a name. Each of its workers is a `TrainExecutor`: one rank that
holds a part of the user's module. All ranks get the same calls in the same order. `TrainBackend.layout` divides a batch
over the ranks. `Backend.ranks` names, among the ranks that share the same rows, the ranks that receive arguments and
the rank that returns the result. A rank that receives nothing is called too, with None for each argument.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import cloudpickle
import torch
from torch import Tensor

from rlite.engine.base import Engine, Weights
from rlite.engine.microbatches import BatchShare, Loss, Weight
from rlite.engine.registry import Backend, Kind
from rlite.engine.weight_sync import OnInflight, SyncReport, sync_weights
from rlite.engine.workers import Executor, SourceWorker
from rlite.errors import CheckpointError, ConfigError, RliteError, WorkerError, why_not_written
from rlite.nn.base import BaseTrainModule
from rlite.nn.pretrained import local_checkpoint
from rlite.runtime.parallel.host_memory import DeviceUsage
from rlite.runtime.storage.atomic import is_staged, staging, verify
from rlite.runtime.storage.safe import load_values
from rlite.runtime.storage.sharded import random_state, set_random_state


class WorkLayout(Protocol):
    """Division of a batch over an engine's ranks: `num_peers` neighbouring ranks make one data rank."""

    @property
    def num_data_ranks(self) -> int:
        """Parts into which the rows of a batch are split."""

    @property
    def num_peers(self) -> int:
        """Neighbouring ranks that work on one part together."""

    @property
    def seq(self) -> int:
        """Pieces into which the peers cut the sequences of an argument in `NeedParallel(type="seq")`."""

    @property
    def pack_factor(self) -> int:
        """Multiple of `max_tokens_per_microbatch` that a microbatch may hold because peers share its activations."""


@dataclass(frozen=True, kw_only=True)
class TrainBackend(Backend):
    """A training backend as `register_executor("train", name, backend)` takes it.

    `worker` makes a `TrainExecutor` from the pickled module. The engine itself reads `max_tokens_per_microbatch`,
    `balance_by` and `packing_method` of `options`; `Fsdp2Options` explains them.
    """

    layout: Callable[[int, int, Any], WorkLayout]
    """layout(num_workers, workers per copy of the model, options); raises ConfigError for sizes that cannot be"""
    check_module: Callable[[BaseTrainModule, Any], None] | None = None
    """check_module(module, options) in the driver, before any process starts; raises ConfigError"""


class TrainExecutor(SourceWorker, Protocol):
    """One rank of a train engine."""

    # -- atomic operations ---------------------------------------------------------------------------------------

    def forward_backward(self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight) -> dict[str, Any]:
        """Accumulate the gradients of a batch, without a step.

        After any number of calls the gradients are those of the weighted mean over all microbatches since the last
        step. A batch without weight changes nothing. If `loss_fn` raises, all accumulated gradients are dropped.

        Args:
            share: this data rank's rows and microbatches. An empty microbatch is computed on padding rows with weight
                zero, because every rank takes part in every collective.
            loss_fn: the mean loss of a pack.
            loss_weight_fn: weight of a pack's mean.

        Returns:
            Over all ranks: the weighted means of the loss and of the means that loss_fn reports, and `weight`. For each
                `PerToken` that loss_fn reports an executor may also return the values [T] of the tokens of the share's
                own rows on CPU, without padding, in the order of the microbatches.
        """

    def optimizer_step(self) -> dict[str, float]:
        """Clip the accumulated gradients, make one optimizer step, and drop the gradients.

        Returns:
            `grad_norm`, `lr`, `weight` of all accumulated batches, and `is_skipped`. `is_skipped` is 1 if there was no
                step, because there is no gradient, or a loss or a gradient is not finite.

        Raises:
            ConfigError: the module has no optimizer.
        """

    def train_batch(self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight) -> dict[str, Any]:
        """Drop accumulated gradients, then call `forward_backward` and `optimizer_step`.

        Args:
            share: as for `forward_backward`.
            loss_fn: as for `forward_backward`.
            loss_weight_fn: as for `forward_backward`.

        Returns:
            The results of both calls.
        """

    def eval_batch(self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight) -> dict[str, float]:
        """Return the means of `forward_backward`, in evaluation mode and without gradients.

        Args:
            share: as for `forward_backward`.
            loss_fn: as for `forward_backward`.
            loss_weight_fn: as for `forward_backward`.
        """

    def forward(self, share: BatchShare, post_hook: Callable[..., Tensor], without_adapters: bool) -> Tensor:
        """Apply `post_hook(logits [T, V], data) -> [T, ...]` in evaluation mode, without gradients.

        Args:
            share: as for `forward_backward`.
            post_hook: function of each pack.
            without_adapters: switch the module's adapters off meanwhile.

        Returns:
            The values [T, ...] of the tokens of the share's own rows on CPU, without padding, in the order of the
                microbatches. A share without rows of its own has no values [0, ...].
        """

    def invoke(self, args: tuple, kwargs: dict, method: str) -> Any:
        """Return the result of a method of the user's module.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            method: name of the method.
        """

    def set_mode(self, is_training: bool) -> None:
        """Put the module into training or evaluation mode."""

    def step_lr_scheduler(self) -> float:
        """Advance the module's `lr_scheduler` by one step.

        Returns:
            The new learning rate.

        Raises:
            ConfigError: the module has no lr_scheduler.
        """

    def reload_methods(self, source: bytes) -> None:
        """Give the module the class of another module, whose methods are called from now on.

        Weights, optimizer and attributes stay.

        Args:
            source: the pickled module, on the meta device, as the worker's constructor takes it.
        """

    # -- weights and state ---------------------------------------------------------------------------------------

    def load(self, path: str | None) -> None:
        """Read the weights from a Hugging Face folder; None is the module's own source."""

    def save(self, path: str) -> None:
        """Write a Hugging Face checkpoint, whole or not at all.

        Raises:
            CheckpointError: this rank could not write it.
        """

    def export_values(self) -> dict[str, tuple[tuple[slice, ...], tuple[int, ...], Tensor]]:
        """Return copies of this rank's served boxes on CPU: name -> (box, global shape, values)."""

    def save_state(self, folder: str, path: str, facts: dict[str, Any], is_asynchronous: bool) -> None:
        """Write the state to resume from: weights, optimizer, scheduler, accumulated gradients, random numbers.

        Args:
            folder: folder in which every rank writes. The driver has made it and put its own file into it.
            path: final name of the folder, after it is whole and sealed (`rlite.runtime.storage.atomic`).
            facts: JSON-serialisable facts, sealed with the checkpoint.
            is_asynchronous: copy the state and return; write while training continues.

        Raises:
            CheckpointError: the state could not be written. An asynchronous save raises in `finish_saving`.
        """

    def has_saved(self) -> bool:
        """Return whether `finish_saving` would return at once."""

    def finish_saving(self) -> None:
        """Wait until the last `save_state` is written.

        Raises:
            CheckpointError: the state could not be written.
        """

    def load_state(self, path: str) -> None:
        """Resume from the state that `save_state` wrote, with any number of ranks that the backend allows.

        Raises:
            CheckpointError: the checkpoint does not fit. Nothing was changed.
        """

    def pack_state(self) -> bytes:
        """Return this rank's state to resume from, as `save_state` writes it."""

    def unpack_state(self, packed: bytes) -> None:
        """Resume exactly from the state that `pack_state` returned on the same rank of the same layout.

        Args:
            packed: the state.
        """

    # -- health --------------------------------------------------------------------------------------------------

    def nonfinite_parameters(self) -> list[str]:
        """Return the names of parameters of which this rank's part holds NaN or infinity."""

    def device_usage(self) -> DeviceUsage:
        """Return this rank's device and the peak memory of its process there since the last call."""


logger = logging.getLogger(__name__)

END_S = 10.0
"""seconds that lost workers may take to end"""
DRIVER_STATE = "driver.pt"
"""file in a checkpoint that holds the driver's random state and the values that the program keeps"""


@dataclass(frozen=True)
class MemorySnapshot:
    """The state of a train engine at a step boundary, in memory outside of its workers."""

    references: tuple[Any, ...]
    """one for each rank"""


class StateWriting:
    """A checkpoint that workers write while training continues.

    Args:
        path: final path of the checkpoint.
        workers: the workers that write it.
    """

    def __init__(self, path: Path, workers: Executor) -> None:
        self.path = path
        self._workers = workers
        self._error: CheckpointError | None = None
        self.is_known = False
        """true if the outcome has been reported to the caller"""

    def workers_ended(self) -> None:
        """Note that the workers have ended: the checkpoint is written by now, or never."""
        if not self.is_known and is_staged(self.path):
            self._error = CheckpointError(f"{self.path}: the workers that wrote it have ended")
        self.is_known = True

    def done(self) -> bool:
        """Return whether the checkpoint is written or has failed, without waiting."""
        return self.is_known or all(self._workers.call(TrainExecutor.has_saved))

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is written. The engine's other calls wait, too.

        Args:
            timeout: seconds; None is the session's `call_timeout`.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: the checkpoint could not be written.
            CallTimeout: the checkpoint was not written in time.
        """
        if not self.is_known:
            try:
                replace(self._workers, timeout=timeout).call(TrainExecutor.finish_saving)
            except CheckpointError as error:
                self._error = error
            self.is_known = True
        if self._error is not None:
            raise self._error
        return self.path


class TrainLifecycle(Engine):
    """The base of the train engine: everything but batches and the module's methods."""

    kind: ClassVar[Kind] = "train"
    backend_type: ClassVar[type[Backend]] = TrainBackend
    _backend: TrainBackend

    def __init__(self, module: BaseTrainModule, executor: str) -> None:
        super().__init__(executor)
        self.module = module
        self._writing: StateWriting | None = None

    @property
    def dims(self) -> Any:
        """Division of work over the workers: a `WorkLayout`. The executor "fsdp2" has a `ParallelDims`."""
        return self._backend.layout(len(self.group), self.executors[0].size, self.options)

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks over which batches are split."""
        return self.dims.num_data_ranks

    @property
    def num_parameters(self) -> int:
        """Number of the module's parameters; tied parameters count once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def device(self) -> torch.device:
        """Device on which the driver should keep batches for this engine."""
        return torch.device("cpu")

    def _validate(self, executor_size: int) -> None:
        try:
            self._backend.layout(executor_size, executor_size, self.options)
        except ConfigError as error:
            raise ConfigError(f"tensor_parallel_size={executor_size}: {error}") from error
        if self._backend.check_module is not None:
            self._backend.check_module(self.module, self.options)

    def _source(self) -> bytes:
        for parameter in self.module.parameters():
            # accelerate notes it there for tied parameters, and what was frozen since would arrive as it was before
            vars(parameter).pop("requires_grad", None)
        return cloudpickle.dumps(self.module)

    def _num_peers(self) -> int:
        return self.dims.num_peers

    def _built(self) -> None:
        assert self._session is not None
        self._session.before_release(self.name, self._before_release)

    def _before_release(self) -> None:
        """Wait until a checkpoint is written. The workers end afterwards, even if it could not be written."""
        try:
            self._finish_saving()
        except (RliteError, OSError) as error:
            logger.error("%s: %s", self.name, error)
        except RuntimeError:  # at the interpreter's end there are no threads to ask; they have written what they had to
            pass

    # -- weights -------------------------------------------------------------------------------------------------

    def p2p_weight_sync(
        self, target: Engine, on_inflight: OnInflight = "continue", verify_checksums: bool = False
    ) -> SyncReport:
        """Write this engine's weights into `target` and raise its policy version by one.

        Args:
            target: an inference engine, or a train engine, with its weights on the device.
            on_inflight: "continue" resumes generation in flight from its tokens, with a recomputed cache; "abort" ends
                it with stop_reason "abort".
            verify_checksums: compare every tensor at both ends afterwards.

        Returns:
            The report of the sync.

        Raises:
            ResidencyError: weights are not on the device.
            WeightSyncError: a tensor does not match. The target then refuses to serve.
        """
        self._need_weights("p2p_weight_sync")
        return sync_weights(self, target, on_inflight, verify_checksums)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model on the driver's CPU, by parameter name; tied parameters once."""
        if self.weights in (Weights.EMPTY, Weights.RELEASED):
            self._need_weights("state_dict")
        full: dict[str, Tensor] = {}
        for part in self.executors[0].call(TrainExecutor.export_values):
            for name, (box, global_shape, values) in part.items():
                if name not in full:
                    full[name] = torch.empty(global_shape, dtype=values.dtype)
                full[name][box] = values
        return full

    def save(self, path: str | Path) -> None:
        """Write a Hugging Face checkpoint that transformers opens, with the tokenizer of the original beside it.

        Weights are written in the `dtype` of the model's config, regardless of the dtype of the master weights.
        `save_state` keeps the master weights.
        """
        self._need_weights("save")
        self._workers.call(TrainExecutor.save, str(path))

    def load(self, path: str | Path | None = None) -> None:
        """Read weights from a Hugging Face checkpoint; without a path, from the module's own source.

        Raises:
            ConfigError: the folder does not exist.
            CheckpointError: the checkpoint does not fit. A part of the weights may be written, so the engine refuses to
                serve until a load or a sync succeeds.
        """
        folder = None if path is None else str(local_checkpoint(path))
        if self.weights is Weights.HOST:
            self.cuda()
        self.weights = Weights.EMPTY
        self._workers.call(TrainExecutor.load, folder)
        self.weights = Weights.DEVICE

    def save_state(
        self, path: str | Path, asynchronous: bool = False, kept: Mapping[str, Any] | None = None, **facts: Any
    ) -> StateWriting:
        """Write a checkpoint to resume from: weights, optimizer, scheduler, gradients, random numbers of every rank.

        The checkpoint is written whole or not at all: `path` is unchanged until everything is written.

        Args:
            path: a folder on a file system that all workers and this process share.
            asynchronous: copy the state to host memory and write it while training continues.
            kept: further state of the program: plain values and tensors. `load_state` returns it among the facts.
            **facts: JSON-serialisable facts; `load_state` returns them.

        Returns:
            A handle to wait for an asynchronous save. A synchronous save is already written.

        Raises:
            CheckpointError: this save, or the asynchronous save before it, failed.
        """
        self._need_weights("save_state")
        self._finish_saving()
        final = Path(path).absolute()
        try:
            folder = staging(final)
            with (folder / DRIVER_STATE).open("wb") as file:
                torch.save({"random": random_state(), "kept": dict(kept or {})}, file)
        except (OSError, RuntimeError) as error:  # torch.save makes either of a full disk
            raise CheckpointError(f"{final}: could not be written: {why_not_written(error)}") from error
        self._writing = StateWriting(final, self._workers)
        facts = {"module": type(self.module).__name__, **facts}
        self._workers.call(TrainExecutor.save_state, str(folder), str(final), facts, asynchronous)
        return self._writing

    def take_snapshot(self) -> MemorySnapshot:
        """Copy the state of `save_state` to memory outside of the workers, for `recover`.

        Under Ray, each rank's part lies in the object store of its node, and outlives the rank's process. The memory is
        free again when the snapshot is no longer referenced.

        Returns:
            The snapshot.

        Raises:
            ConfigError: the launcher has no memory outside of the workers.
        """
        self._need_weights("take_snapshot")
        return MemorySnapshot(tuple(self.group.keep(TrainExecutor.pack_state.__name__)))

    def recover(self, source: MemorySnapshot | str | Path | None) -> dict[str, Any]:
        """Go back to a state, after starting all workers again on their devices if one of them has died.

        From a snapshot, the state is bit-identical on CPU. An asynchronous save that the workers did not finish has
        failed.

        Args:
            source: a snapshot of this engine, a checkpoint of `save_state`, or None for the module's own weights.

        Returns:
            The facts of the checkpoint; {} without one.

        Raises:
            ConfigError: the launcher starts no process while others run.
            SnapshotLost: a node that kept a part of the snapshot has died. The engine has no weights, and may recover
                from a checkpoint.
        """
        if self.has_died:
            self._restart()
        elif self.weights is Weights.HOST:
            self.cuda()
        if isinstance(source, str | Path):
            return self.load_state(source)
        if source is None:
            self.load()
            return {}
        calls: list[Any] = [((reference,), {}) for reference in source.references]
        self.weights = Weights.EMPTY  # until all of it is read
        self.group.call(TrainExecutor.unpack_state.__name__, calls)
        self.weights = Weights.DEVICE
        return {}

    @property
    def has_died(self) -> bool:
        """True if a worker has died, or was stopped because it waited for a dead one."""
        return self._group is not None and any(handle.death.done() for handle in self._group.handles)

    def _restart(self) -> None:
        assert self._session is not None
        group = self.group
        group.mark_lost(range(len(group)), WorkerError(f"{self.name} is being started again"))
        wait([handle.death for handle in group.handles], END_S)  # their memory is free then
        if self._writing is not None:
            self._writing.workers_ended()
            self._writing = None
        self._session.restart(self.name, 0, self._factory)
        self.weights = Weights.DEVICE

    def _finish_saving(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None and not writing.is_known:
            writing.result()

    def load_state(self, path: str | Path) -> dict[str, Any]:
        """Resume from a checkpoint of `save_state`, with any number of workers in any layout.

        Returns:
            The checkpoint's facts and kept values.

        Raises:
            DamagedCheckpointError: a file is missing or damaged. Nothing was changed.
            CheckpointError: the checkpoint was saved from another module. Nothing was changed.
        """
        if self.weights is not Weights.EMPTY:
            self._need_weights("load_state")
        self._finish_saving()
        folder = Path(path).absolute()
        facts, module = verify(folder), type(self.module).__name__
        if facts.get("module") != module:
            raise CheckpointError(f"{folder}: saved from {facts.get('module')}, this engine has {module}")
        driver = load_values(folder / DRIVER_STATE)
        self.weights = Weights.EMPTY  # until all of it is read
        self._workers.call(TrainExecutor.load_state, str(folder))
        self.weights = Weights.DEVICE
        set_random_state(driver["random"])
        return {**facts, **driver["kept"]}
