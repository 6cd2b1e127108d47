"""Memory of weights on their way into another program: weight sync writes it, then the program reads it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlite.runtime.parallel.host_memory import give_back_cached_memory, pin
from rlite.runtime.parallel.shared_memory import DeviceArena, SharedArena, aligned_bytes

Weights = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
RESERVED_BYTES = 2**31
"""memory that stays free on a GPU, for the program that loads the weights layer by layer"""


class Staging:
    """Memory for all weights of a model, for one sync after another.

    Host memory is kept, and pinned beside a GPU: to fill fresh pages takes longer than the copy. Memory of a GPU is
    allocated in no time, and given back after each sync.

    Args:
        device: the worker's device.
        weights: dtypes and shapes of all weights.
        reader_index: number of the GPU in the program that reads the memory; None if it is the same as here.
    """

    def __init__(self, device: torch.device, weights: Weights, reader_index: int | None = None) -> None:
        self._device, self._reader_index = device, reader_index
        self._nbytes = sum(aligned_bytes(shape, dtype) for dtype, shape in weights.values())
        self._on_host: SharedArena | None = None

    def begin(self, is_near: bool) -> SharedArena | DeviceArena:
        """Return an empty arena.

        Args:
            is_near: the weights come from the same GPU. They stay there if it has room for them.
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
