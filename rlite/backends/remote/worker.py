"""The worker in the place of the servers: it writes the weights of a sync into a folder that the servers read."""

from __future__ import annotations

import shutil
import threading
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError

from rlite.backends.models.stored import StoredForm, stored_form
from rlite.backends.remote.server import RemoteOptions
from rlite.backends.serving.staging import CheckpointStaging
from rlite.errors import ConfigError, StorageError, why_not_written
from rlite.nn.pretrained import load_config, meta_model, stored_dtype
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.parallel.shards import ParameterShard
from rlite.runtime.replicas.replica import ServingWorker
from rlite.runtime.storage.atomic import discard
from rlite.runtime.storage.huggingface import Writer, copy_companions

NUM_KEPT = 2
"""folders of weights that stay: the newest, and the one before, which a server reads again if the newest is damaged"""


class RemoteWorker(ServingWorker):
    """A worker without a model, in the place of the servers."""

    def __init__(self, context: WorkerContext, path: str, options: RemoteOptions, executor_size: int) -> None:
        self._path, self._options, self._device = path, options, torch.device(context.torch_device)
        self._folder = path
        """folder of the latest weights that are not staged"""
        self._turn = threading.Lock()

    def checkpoint(self) -> str:
        """Return the folder of the checkpoint with which servers are compared."""
        return self._path

    def stage(self, is_near: bool) -> None:
        """Begin a sync with unwritten host memory; see `StagingWorker.stage`."""
        staged, wide = self._staged, self._form.wide
        for group in staged.stored.conversion.groups:
            if wide & group.stored.keys():
                staged.held |= {name: (torch.float32, staged.held[name][1]) for name in group.held.keys() & staged.held}
        staged.begin(is_near=False)

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """Return staging memory of all parameters during a sync."""
        return self._staged.shards if self._options.weights_folder else {}

    def folder_of(self, version: int) -> str:
        """Return the folder of the latest weights. The first call after a sync writes it, named after a version."""
        with self._turn:
            if shards := self.parameter_shards():
                self._folder = self._write(version, shards)
                self._staged.end()
            return self._folder

    def load_weights(self, path: str | None) -> None:
        """Let the servers read a checkpoint; None is the engine's own."""
        if not self._options.weights_folder:
            remedy = "load them there, or set weights_folder and the administrator's token"
            raise ConfigError(f"load: the executor 'remote' cannot change the weights of its servers; {remedy}")
        self._staged.forget()
        self._folder = path or self._path

    def memory_bytes(self) -> dict[str, int]:
        """Return zeros."""
        return {"weights": 0, "kv_cache": 0}

    @cached_property
    def _staged(self) -> CheckpointStaging:
        given = self._options.dtype
        dtype = getattr(torch, given) if given else stored_dtype(self._path, load_config(self._path))
        return CheckpointStaging(self._path, dtype, self._device)

    @cached_property
    def _form(self) -> StoredForm:
        return stored_form(meta_model(load_config(self._path)), self._staged.stored, is_writer=True, drops=False)

    def _write(self, version: int, shards: dict[str, ParameterShard]) -> str:
        assert self._options.weights_folder is not None
        place = Path(self._options.weights_folder).expanduser()
        target = place / f"version-{version}"
        try:
            writer = Writer(target)
            for name, tensor, dtype in self._form.tensors((name, shard.tensor) for name, shard in shards.items()):
                writer.add(name, tensor, dtype)
            shutil.copy2(Path(self._path) / "config.json", writer.folder)
            copy_companions(Path(self._path), writer.folder)
            writer.finish()
            known = [each for each in place.glob("version-*") if each.name.removeprefix("version-").isdecimal()]
            for old in sorted(known, key=lambda folder: folder.stat().st_mtime_ns)[:-NUM_KEPT]:
                discard(old)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"weights_folder: {target} could not be written: {why_not_written(error)}") from error
        return str(target)
