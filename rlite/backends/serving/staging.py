"""Memory of weights on their way into another program: weight sync writes it, then the program reads it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from rlite.backends.models.stored import StoredCheckpoint, held_tensors
from rlite.nn.pretrained import load_config, meta_model
from rlite.runtime.parallel.host_memory import give_back_cached_memory, pin
from rlite.runtime.parallel.shards import ParameterShard
from rlite.runtime.parallel.shared_memory import DeviceArena, SharedArena, aligned_bytes

Weights = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
RESERVED_BYTES = 2**31
"""memory that stays free on a GPU, for the program that loads the weights layer by layer"""


class Staging:
    """Memory for all weights of a model, for one sync after another.

    Host memory is kept, and pinned beside a GPU: to fill fresh pages takes longer than the copy. Memory of a GPU is
    allocated in no time, and given back after each sync.

    `weights`: dtypes and shapes of all weights. `reader_index`: number of the GPU in the program that reads the memory;
    None if it is the same as here.
    """

    def __init__(self, device: torch.device, weights: Weights, reader_index: int | None = None) -> None:
        self._device, self._reader_index = device, reader_index
        self._nbytes = sum(aligned_bytes(shape, dtype) for dtype, shape in weights.values())
        self._on_host: SharedArena | None = None

    def begin(self, is_near: bool) -> SharedArena | DeviceArena:
        """Return an empty arena.

        `is_near`: the weights come from the same GPU. They stay there if it has room for them.
        """
        if is_near and has_room(self._device, self._nbytes):
            return DeviceArena(self._nbytes, self._device, self._reader_index)
        if self._on_host is None:
            self._on_host = SharedArena(self._nbytes)
            if self._device.type == "cuda":
                pin(self._on_host, self._on_host.base.data_ptr(), self._on_host.nbytes)
        self._on_host.reset()
        return self._on_host

    def end(self) -> None:
        """Give memory of the GPU back, when nothing refers to it any more."""
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()
            give_back_cached_memory()

    def free(self) -> None:
        """Give host memory back, too."""
        if self._on_host is not None:
            self._on_host.discard()
        self._on_host = None


def has_room(device: torch.device, nbytes: int) -> bool:
    """Return True if a GPU has room for so many bytes, beside what other programs need to load them."""
    if device.type != "cuda":
        return False
    give_back_cached_memory()
    return torch.cuda.mem_get_info(device)[0] >= nbytes + RESERVED_BYTES


class CheckpointStaging:
    """The weights of a checkpoint's model on their way into a program that knows them by their stored names.

    `reader_index`: number of the GPU in the program that reads the memory; None if it is the same as here.
    """

    def __init__(self, path: str, dtype: torch.dtype, device: torch.device, reader_index: int | None = None) -> None:
        self.held = held_tensors(meta_model(load_config(path), dtype))
        """dtypes and shapes of all weights, by the names of their parameters"""
        self.shards: dict[str, ParameterShard] = {}
        """weights of a sync that the program has not read yet"""
        self._path, self._device, self._reader_index = path, device, reader_index
        self._arena: SharedArena | DeviceArena | None = None

    @cached_property
    def stored(self) -> StoredCheckpoint:
        """The checkpoint, whose names the program knows."""
        return StoredCheckpoint(meta_model(load_config(self._path)), self._path)

    @cached_property
    def _memory(self) -> Staging:
        return Staging(self._device, self.held, self._reader_index)

    def begin(self, is_near: bool) -> None:
        """Begin a sync with unwritten memory; see `Staging.begin`."""
        self.stored.check_syncable()
        self.forget()  # what a failed sync has left
        self._arena = arena = self._memory.begin(is_near)
        boxes = {name: arena.empty(shape, dtype) for name, (dtype, shape) in self.held.items()}
        self.shards = {name: ParameterShard(box, (0,) * box.dim(), tuple(box.shape)) for name, box in boxes.items()}

    def handles(self) -> dict[str, Any]:
        """Return the handles by which another process opens the weights of a sync."""
        assert self._arena is not None
        return {name: self._arena.handle_of(shard.tensor) for name, shard in self.shards.items()}

    def forget(self) -> None:
        """Drop the weights of a sync."""
        self.shards, self._arena = {}, None

    def end(self) -> None:
        """Drop the weights, which the program has read; see `Staging.end`."""
        self.forget()
        self._memory.end()

    def free(self) -> None:
        """Drop the weights, and give host memory back, too."""
        self.forget()
        self._memory.free()
