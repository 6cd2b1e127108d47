"""Memory that another process of this machine can read in place.

On CPU an arena is one anonymous memory file (`memfd_create`). It has no name, needs no room in /dev/shm, and disappears
with the last process that maps it, however that process ends. Systems without memfd (macOS) get ordinary memory, and
`handle_of` returns None; weights then travel through a process group.

On a GPU an arena is one allocation that is opened through one CUDA IPC handle. Every handle has to be opened exactly
once: torch keeps memory whose handle nobody opened, and memory whose handle was opened twice.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import socket
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rlite.errors import ConfigError, StorageError, why_not_written

logger = logging.getLogger(__name__)

ALIGNMENT = 64
PORTABLE = 1
"""cudaHostRegisterPortable"""


@dataclass(frozen=True)
class SharedBlock:
    """A tensor in another process's arena, with everything that a reader needs to map it."""

    host: str
    pid: int
    fd: int
    inode: int
    """tells an arena from a later one that got the same fd"""
    arena_bytes: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes that a tensor takes in an arena."""
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class DeviceBlock:
    """A tensor in another process's GPU memory."""

    arena: tuple[Any, tuple]
    """function and arguments that open the whole arena; a reader calls it once for all blocks that share it"""
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Arena:
    """Allocator of tensors inside one block of memory; the tensors keep the memory alive.

    Args:
        base: the memory, a tensor of bytes.
    """

    def __init__(self, base: Tensor) -> None:
        self.nbytes = base.numel()
        self._base = base
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor with unspecified content."""
        start, self._used = self._used, self._used + aligned_bytes(shape, dtype)
        return _view(self._base, start, shape, dtype)

    def reset(self) -> None:
        """Forget all tensors; the next ones take the same memory."""
        self._used = 0


class DeviceArena(Arena):
    """Arena of `nbytes` on a GPU."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__(torch.empty(max(nbytes, ALIGNMENT), dtype=torch.uint8, device=device))
        self._opening: tuple[Any, tuple] | None = None

    def reset(self) -> None:
        """Forget all tensors, and share the memory under a new handle."""
        super().reset()
        self._opening = None

    def handle_of(self, tensor: Tensor) -> DeviceBlock:
        """Return what one other process needs to read `tensor`, which lies here.

        All handles between two resets open together.
        """
        if self._opening is None:
            self._opening = reduce_tensor(self._base)
        offset = tensor.data_ptr() - self._base.data_ptr()
        return DeviceBlock(self._opening, offset, tuple(tensor.shape), tensor.dtype)


class DeviceReader:
    """Reader of other processes' GPU arenas. Each arena is opened once and closed with the reader."""

    def __init__(self) -> None:
        self._arenas: dict[int, tuple[Any, Tensor]] = {}

    def view(self, block: DeviceBlock) -> Tensor:
        """Return the shared tensor itself; it must not be written to."""
        key = id(block.arena)
        if key not in self._arenas:
            rebuild, args = block.arena
            self._arenas[key] = (block.arena, rebuild(*args))  # the first keeps its id from being used again
        return _view(self._arenas[key][1], block.offset, block.shape, block.dtype)


class HostMemory:
    """One reusable block of host memory for copies of tensors, pinned if a tensor is on a GPU.

    The block is exactly as large as the copies; torch's own pinned memory is rounded up to a power of two.
    """

    def __init__(self) -> None:
        self._arena: Arena | None = None

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors, overwriting earlier copies. A copy from a GPU is asynchronous.

        Returns:
            The copies, in the order of `tensors`.
        """
        needed = sum(aligned_bytes(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        if self._arena is None or self._arena.nbytes < needed:
            self._arena = None  # before its successor is allocated
            self._arena = Arena(_host_bytes(needed, is_pinned=any(tensor.is_cuda for tensor in tensors)))
        self._arena.reset()
        return [
            self._arena.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor, non_blocking=True) for tensor in tensors
        ]


def _host_bytes(num: int, is_pinned: bool) -> Tensor:
    """Return unwritten bytes in host memory; they stay pinned as long as a tensor lies in them."""
    memory = np.empty(num + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    if is_pinned:
        error = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.size, PORTABLE))
        if error:
            logger.warning("%d bytes of host memory could not be pinned (CUDA error %d): copies are slower", num, error)
            with suppress(RuntimeError):  # CUDA reports it a second time, at the next launch
                torch.zeros(1, device="cuda")
        else:
            unpin = weakref.finalize(memory, torch.cuda.cudart().cudaHostUnregister, memory.ctypes.data)
            unpin.atexit = False  # CUDA may be gone by then
    return torch.from_numpy(memory[start : start + num])


PIDFD_GETFD = 438
"""number of the system call, the same on every architecture"""


def check_gpu_sharing(pid: int) -> None:
    """Check that torch can open GPU memory that process `pid` shares with this process.

    Memory in expandable segments travels as a file descriptor, which unprivileged containers may not copy.

    Raises:
        ConfigError: it cannot.
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
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        copied = libc.syscall(PIDFD_GETFD, process, 0, 0)
        reason = ctypes.get_errno()
    finally:
        os.close(process)
    if copied >= 0:
        os.close(copied)
    return None if copied >= 0 or reason == errno.EBADF else os.strerror(reason)  # it may, but has closed this one


class SharedArena(Arena):
    """Arena of `nbytes` in shared memory on CPU.

    Raises:
        StorageError: the memory file could not be made so large.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = max(nbytes, ALIGNMENT)
        self._fd = os.memfd_create("rlite-arena") if can_share_memory() else -1
        try:
            if self._fd >= 0:
                os.ftruncate(self._fd, nbytes)
        except OSError as error:  # a limit of file sizes counts here, too
            raise StorageError(f"{nbytes} bytes of shared memory for weights: {why_not_written(error)}") from error
        self._inode = os.fstat(self._fd).st_ino if self._fd >= 0 else 0
        self._map = mmap.mmap(self._fd, nbytes)
        super().__init__(torch.frombuffer(self._map, dtype=torch.uint8))

    def handle_of(self, tensor: Tensor) -> SharedBlock | None:
        """Return what another process needs to map `tensor`; None if it is not in this arena or cannot be shared."""
        offset = tensor.data_ptr() - self._base.data_ptr()
        if self._fd < 0 or not 0 <= offset < self.nbytes or not tensor.is_contiguous():
            return None
        return SharedBlock(
            host=host_identity(),
            pid=os.getpid(),
            fd=self._fd,
            inode=self._inode,
            arena_bytes=self.nbytes,
            offset=offset,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
        )

    def discard(self) -> None:
        """Give the memory back now, even where it is still mapped. Every tensor in it then reads as zeros."""
        if self._fd >= 0:
            self._map.madvise(mmap.MADV_REMOVE)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class ArenaReader:
    """Reader of other processes' arenas, each mapped once. Not thread-safe."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int, int], Tensor] = {}
        """by pid, fd and inode; while an arena is mapped, no other file has its inode"""

    def view(self, block: SharedBlock) -> Tensor:
        """Return the shared tensor itself; it must not be written to.

        Raises:
            FileNotFoundError: the process has closed the arena. Other OSErrors: the process is gone or not ours.
        """
        key = (block.pid, block.fd, block.inode)
        if key not in self._maps:
            self._maps = {known: arena for known, arena in self._maps.items() if _is_there(*known)}
            fd = os.open(_path(block.pid, block.fd), os.O_RDWR)
            try:
                if os.fstat(fd).st_ino != block.inode:
                    raise FileNotFoundError(f"process {block.pid} has closed the arena that {block} lies in")
                self._maps[key] = torch.frombuffer(mmap.mmap(fd, block.arena_bytes), dtype=torch.uint8)
            finally:
                os.close(fd)
        return _view(self._maps[key], block.offset, block.shape, block.dtype)


def _view(base: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return base[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _path(pid: int, fd: int) -> str:
    return f"/proc/{pid}/fd/{fd}"


def _is_there(pid: int, fd: int, inode: int) -> bool:
    try:
        return os.stat(_path(pid, fd)).st_ino == inode
    except OSError:
        return False


def can_share_memory() -> bool:
    """Return True if another process can map an arena: on Linux with /proc."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


@cache
def host_identity() -> str:
    """Return a text that is equal for processes that share memory and process ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
