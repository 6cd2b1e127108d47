"""A train engine whose state is kept: checkpoints to resume from, snapshots in memory, and recovery from deaths."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import torch
from torch import Tensor

from rlite.engine.registry import TrainBackend, TrainWorker
from rlite.errors import CheckpointError, ConfigError, RliteError, WorkerError, why_not_written
from rlite.nn.base import BaseTrainModule
from rlite.nn.pretrained import local_checkpoint
from rlite.runtime.parallel.microbatch_plan import sequence_flops
from rlite.runtime.replicas.engine import Engine, Weights
from rlite.runtime.replicas.workers import Kind, WorkerSet
from rlite.runtime.storage.atomic import is_staged, staging, verify
from rlite.runtime.storage.sharded import load_values, random_state, set_random_state

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
    facts: Mapping[str, Any]
    """facts of the engine, as in a checkpoint"""


class StateWriting:
    """A checkpoint that workers write while training continues."""

    def __init__(self, path: Path, workers: WorkerSet) -> None:
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
        return self.is_known or all(self._workers.call(TrainWorker.has_saved))

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is written. The engine's other calls wait, too.

        `timeout`: seconds; None is the session's `call_timeout`. Returns the path of the checkpoint.
        """
        if not self.is_known:
            try:
                replace(self._workers, timeout=timeout).call(TrainWorker.finish_saving)
            except CheckpointError as error:
                self._error = error
            self.is_known = True
        if self._error is not None:
            raise self._error
        return self.path


class ResumableEngine(Engine):
    """The base of the train engine: its weights and state in files and in memory.

    Args:
        backend: the executor.
        executor: its name.
        module: the user's module.
    """

    kind: ClassVar[Kind] = "train"
    _backend: TrainBackend

    def __init__(self, backend: TrainBackend, executor: str, module: BaseTrainModule) -> None:
        super().__init__(backend, executor)
        self.module = module
        self._writing: StateWriting | None = None
        self._obstacles: dict[type, str | None] = {}
        """results of `prefix_obstacle` by class of the module, since the engine was built"""

    def _validate(self, copy_size: int) -> None:
        try:
            self._backend.layout(copy_size, copy_size, self.options)
        except ConfigError as error:
            raise ConfigError(f"tensor_parallel_size={copy_size}: {error}") from error
        if self._backend.check_module is not None:
            self._backend.check_module(self.module, self.options)
        self._obstacles = {}

    def _source(self) -> bytes:
        for parameter in self.module.parameters():
            # accelerate notes it there for tied parameters, and what was frozen since would arrive as it was before
            vars(parameter).pop("requires_grad", None)
        return cloudpickle.dumps(self.module)

    def _flops(self, lengths: Sequence[int]) -> list[float]:
        """Return the FLOPs of rows of these lengths."""
        if (config := getattr(self.module, "config", None)) is None:
            raise ConfigError("balance_by=flops: the module has no config that says how wide and deep it is")
        text = config.get_text_config()
        return [sequence_flops(length, text.hidden_size, text.num_hidden_layers) for length in lengths]

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

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model on the driver's CPU, by parameter name; tied parameters once."""
        if self.weights in (Weights.EMPTY, Weights.RELEASED):
            self._need_weights("state_dict")
        full: dict[str, Tensor] = {}
        for part in self.copies[0].call(TrainWorker.export_values):
            for name, (box, global_shape, values) in part.items():
                if name not in full:
                    full[name] = values.new_empty(global_shape)
                full[name][box] = values
        return full

    def save(self, path: str | Path) -> None:
        """Write a Hugging Face checkpoint that transformers opens, with the tokenizer of the original beside it.

        Weights are written in the `dtype` of the model's config, regardless of the dtype of the master weights.
        `save_state` keeps the master weights.
        """
        self._need_weights("save")
        self._workers.call(TrainWorker.save, str(path))

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
        self._workers.call(TrainWorker.load, folder)
        self.weights = Weights.DEVICE

    # -- state ---------------------------------------------------------------------------------------------------

    def save_state(
        self, path: str | Path, asynchronous: bool = False, kept: Mapping[str, Any] | None = None, **facts: Any
    ) -> StateWriting:
        """Write a checkpoint to resume from: weights, optimizer, scheduler, gradients, random numbers of every rank.

        Adapters by name belong to it. The checkpoint is written whole or not at all: `path` is unchanged until
        everything is written.

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
        facts = {"module": type(self.module).__name__, **self._facts(), **facts}
        self._workers.call(TrainWorker.save_state, str(folder), str(final), facts, asynchronous)
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
        return MemorySnapshot(tuple(self.group.keep(TrainWorker.pack_state.__name__)), self._facts())

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
        self.group.call(TrainWorker.unpack_state.__name__, calls)
        self._take_facts(source.facts)
        self.weights = Weights.DEVICE
        return {}

    def _facts(self) -> dict[str, Any]:
        """Return JSON-serialisable facts about the engine that belong to its state."""
        return {}

    def _check_facts(self, facts: Mapping[str, Any]) -> None:
        """Check that the engine can resume from a state with these facts."""

    def _take_facts(self, facts: Mapping[str, Any]) -> None:
        """Note that the workers have resumed from a state with these facts."""

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
        self._session.restart(self.name, 0, self._factory)
        self.weights = Weights.DEVICE

    def _finish_saving(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None and not writing.is_known:
            writing.result()

    def load_state(self, path: str | Path) -> dict[str, Any]:
        """Resume from a checkpoint of `save_state`, with any number of workers in any layout.

        Adapters by name are those of the checkpoint afterwards.

        Returns:
            The checkpoint's facts and kept values.

        Raises:
            ConfigError: the checkpoint has adapters by name, which this engine cannot train. Nothing was changed.
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
        self._check_facts(facts)
        driver = load_values(folder / DRIVER_STATE)
        self.weights = Weights.EMPTY  # until all of it is read
        self._workers.call(TrainWorker.load_state, str(folder))
        self._take_facts(facts)
        self.weights = Weights.DEVICE
        set_random_state(driver["random"])
        return {**facts, **driver["kept"]}
