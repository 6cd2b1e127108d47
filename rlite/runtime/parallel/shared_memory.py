"""Memory that another process of this machine can read in place.

On CPU an arena is one anonymous memory file (`memfd_create`). It has no name, needs no room in /dev/shm, and disappears
with the last process that maps it, however that process ends. Systems without memfd (macOS) get ordinary memory, and
`handle_of` returns None; weights then travel through a process group.

On a GPU an arena is one allocation that is opened through one CUDA IPC handle. Every handle has to be opened exactly
once: torch keeps memory whose handle was never opened, and memory whose handle was opened twice.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rlite.errors import ConfigError, StorageError, why_not_written

ALIGNMENT = 64


@dataclass(frozen=True)
class SharedBlock:
    """A tensor in shared memory, with everything that a reader in another process needs to open it."""

    memory: tuple[Callable[..., Tensor], tuple]
    """function and arguments that open the whole arena; a reader calls it once for all blocks that share it"""
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes that a tensor takes in an arena."""
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Arena:
    """Allocator of tensors inside one block of memory; the tensors keep the memory alive.

    `base`: the memory, a tensor of bytes.
    """

    def __init__(self, base: Tensor) -> None:
        self.base, self.nbytes, self._used = base, base.numel(), 0
        self._memory: tuple[Callable[..., Tensor], tuple] | None = None
        """value that opens the arena in another process, if that is possible"""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor with unspecified content."""
        start, self._used = self._used, self._used + aligned_bytes(shape, dtype)
        return _view(self.base, start, shape, dtype)

    def reset(self) -> None:
        """Forget all tensors; the next ones take the same memory."""
        self._used = 0

    def handle_of(self, tensor: Tensor) -> SharedBlock | None:
        """Return what another process needs to read `tensor`; None if it is not in this arena or cannot be shared."""
        offset = tensor.data_ptr() - self.base.data_ptr()
        if self._memory is None or not 0 <= offset < self.nbytes or not tensor.is_contiguous():
            return None
        return SharedBlock(self._memory, offset, tuple(tensor.shape), tensor.dtype)


class SharedArena(Arena):
    """Arena of `nbytes` in shared memory on CPU."""

    def __init__(self, nbytes: int) -> None:
        nbytes = max(nbytes, ALIGNMENT)
        self._fd = os.memfd_create("rlite-arena") if can_share_memory() else -1
        try:
            if self._fd >= 0:
                os.ftruncate(self._fd, nbytes)
        except OSError as error:  # a limit of file sizes counts here, too
            raise StorageError(f"{nbytes} bytes of shared memory for weights: {why_not_written(error)}") from error
        self._map = mmap.mmap(self._fd, nbytes)
        super().__init__(torch.frombuffer(self._map, dtype=torch.uint8))
        if self._fd >= 0:
            self._memory = _map_file, (os.getpid(), self._fd, os.fstat(self._fd).st_ino, nbytes)

    def discard(self) -> None:
        """Give the memory back now, even where it is still mapped. Every tensor in it then reads as zeros."""
        if self._fd >= 0:
            self._map.madvise(mmap.MADV_REMOVE)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class DeviceArena(Arena):
    """Arena of `nbytes` on a GPU. All handles between two resets open together, in one other process.

    `reader_index` is the number of the GPU in that process; None if it is the same as here.
    """

    def __init__(self, nbytes: int, device: torch.device, reader_index: int | None = None) -> None:
        super().__init__(torch.empty(max(nbytes, ALIGNMENT), dtype=torch.uint8, device=device))
        self._reader_index = reader_index

    def reset(self) -> None:
        """Forget all tensors, and share the memory under a new handle."""
        super().reset()
        self._memory = None

    def handle_of(self, tensor: Tensor) -> SharedBlock | None:
        """Return what one other process needs to read `tensor`, which lies here."""
        self._memory = self._memory or renumbered(reduce_tensor(self.base), self._reader_index)
        return super().handle_of(tensor)


def renumbered(handle: tuple[Any, tuple], index: int | str | None) -> tuple[Any, tuple]:
    """Return torch's handle of a CUDA tensor with another number or the UUID of its GPU; None leaves its own."""
    rebuild, arguments = handle
    return rebuild, arguments if index is None else (*arguments[:6], index, *arguments[7:])


class SharedMemoryReader:
    """Reader of other processes' arenas. Each is opened once, and on a GPU closed with the reader."""

    def __init__(self) -> None:
        self._opened: dict[int, tuple[Any, Tensor]] = {}

    def view(self, block: SharedBlock) -> Tensor:
        """Return the shared tensor itself; it must not be written to."""
        key = id(block.memory)
        if key not in self._opened:
            function, args = block.memory
            self._opened[key] = (block.memory, function(*args))  # the first keeps its id from being used again
        return _view(self._opened[key][1], block.offset, block.shape, block.dtype)


_maps: dict[tuple[int, int, int], Tensor] = {}
"""memory files of other processes by pid, fd and inode; while one is mapped, no other file has its inode"""


def _map_file(pid: int, fd: int, inode: int, nbytes: int) -> Tensor:
    """Return the bytes of a memory file of process `pid`. It stays mapped until another is opened after its end."""
    if (pid, fd, inode) not in _maps:
        for known in [known for known in _maps if not _is_there(*known)]:
            del _maps[known]
        own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        try:
            if os.fstat(own_fd).st_ino != inode:
                raise FileNotFoundError(f"process {pid} has closed the arena of its file descriptor {fd}")
            _maps[pid, fd, inode] = torch.frombuffer(mmap.mmap(own_fd, nbytes), dtype=torch.uint8)
        finally:
            os.close(own_fd)
    return _maps[pid, fd, inode]


def _is_there(pid: int, fd: int, inode: int) -> bool:
    with suppress(OSError):
        return os.stat(f"/proc/{pid}/fd/{fd}").st_ino == inode
    return False


def _view(base: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return base[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


PIDFD_GETFD = 438
"""number of the system call, the same on every architecture"""


def check_gpu_sharing(pid: int) -> None:
    """Check that torch can open GPU memory that process `pid` shares with this process.

    Memory in expandable segments travels as a file descriptor, which unprivileged containers may not copy.
    """
    if has_expandable_segments(os.environ) and (error := _descriptor_error(pid)) is not None:
        raise ConfigError(
            "PYTORCH_ALLOC_CONF asks for expandable_segments, and this process may not copy file descriptors of "
            f"process {pid} (pidfd_getfd: {error}), as weight sync between two processes of one GPU has to then. Leave "
            "expandable_segments out, or give the container the capability SYS_PTRACE"
        )


def has_expandable_segments(environment: Mapping[str, str]) -> bool:
    """Return True if the environment tells torch's allocator to use expandable segments."""
    settings = ",".join(environment.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return "expandable_segments:true" in settings.replace(" ", "").lower()


def _descriptor_error(pid: int) -> str | None:
    """Return why this process may not copy a file descriptor of process `pid`, or None if it may."""
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        return error.strerror
    libc = ctypes.CDLL(None, use_errno=True)
    copied = libc.syscall(PIDFD_GETFD, process, 0, 0)
    reason = ctypes.get_errno()
    os.close(process)
    if copied >= 0:
        os.close(copied)
    return None if copied >= 0 or reason == errno.EBADF else os.strerror(reason)  # it may, but has closed this one


def can_share_memory() -> bool:
    """Return True if another process can map an arena: on Linux with /proc."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


@cache
def host_identity() -> str:
    """Return a text that is equal for processes that share memory and process ids."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
