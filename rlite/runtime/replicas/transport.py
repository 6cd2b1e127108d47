"""The worker side of weight sync: describe layouts, and move boxes of tensors from one process to another.

These functions run in worker processes, on a source worker, a target worker, or both when one process hosts both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal, cast, get_args
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from rlite.errors import ConfigError
from rlite.runtime.cluster.placement import Device
from rlite.runtime.parallel import shared_memory
from rlite.runtime.parallel.processes import close_store, connect_store, process_identity
from rlite.runtime.parallel.shards import Box, ParameterShard
from rlite.runtime.parallel.shared_memory import Arena, DeviceArena, SharedArena, SharedMemoryReader, aligned_bytes
from rlite.runtime.replicas.workers import GatheringWorker, SourceWorker, StagingWorker, Worker

Transport = Literal["auto", "shared", "gathered", "broadcast"]
BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Place:
    """One worker's box of one tensor, as the driver knows it."""

    dtype: torch.dtype
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Tensors that one worker holds: its places by tensor name, and the host and process of their memory.

    Layouts are equal if they hold the same places under the same names, wherever their memory is.
    """

    places: dict[str, Place]
    host: str = field(compare=False)
    aliases: dict[str, str] = field(default_factory=dict)
    """other names of tied tensors, to the name in `places`"""
    handles: dict[str, Any] | None = field(default=None, compare=False)
    """handles by which a process on `host` reads each place, if requested"""
    process: str = field(default="", compare=False)
    """`process_identity` of the worker's process"""
    device: str = field(default="", compare=False)
    """kind of the device that holds the tensors: "cpu" also for a target on a GPU that stages weights in host memory"""


@dataclass(frozen=True)
class Piece:
    """A block to copy: from a box of one source place to a box of one target place, both relative to their shard."""

    name: str
    source_name: str
    source: int
    source_box: Box
    target_box: Box
    dtype: torch.dtype
    """the target's dtype"""


def check_transport(
    transport: str, source: str, sources: Collection[Device], target: str, targets: Collection[Device]
) -> None:
    """Refuse a way for weights that does not exist between two engines."""
    if transport not in get_args(Transport):
        raise ConfigError(f"transport={transport!r}: expected one of {', '.join(get_args(Transport))}")
    if transport == "gathered" and (apart := set(targets) - set(sources)):
        told = f"transport='gathered': {target} has {min(map(str, apart))}, which {source} does not have"
        raise ConfigError(f"{told}. Use 'auto' or 'broadcast', or build both on the same devices (colocate_with)")


@torch.no_grad()
def describe(worker: SourceWorker | Worker, is_source: bool, is_shared: bool, is_near: bool = False) -> Layout:
    """Return the places that a source offers or a target receives."""
    source = cast(SourceWorker, worker)
    if not is_source and isinstance(worker, StagingWorker):
        worker.stage(is_near)
    shards = source.served_shards(has_values=is_shared) if is_source else worker.parameter_shards()
    return Layout(
        places={
            name: Place(shard.tensor.dtype, tuple(shard.offset), tuple(shard.tensor.shape), tuple(shard.global_shape))
            for name, shard in shards.items()
        },
        host=shared_memory.host_identity(),
        aliases=source.aliases() if is_source else {},
        handles=_handles(source, {name: shard.tensor for name, shard in shards.items()}) if is_shared else None,
        process=process_identity(),
        device=next((shard.tensor.device.type for shard in shards.values()), ""),
    )


# -- shared memory ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnTensor:
    """A tensor for a reader in the process that holds it: CUDA cannot open a handle of its own process."""

    process: str
    """`process_identity` of the process that holds the tensor"""
    number: int


_own_tensors: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""by `OwnTensor.number`; a source worker's `staged` keeps them alive"""
_numbers = itertools.count()


@torch.no_grad()
def share(worker: SourceWorker, readers: Collection[str]) -> dict[str, Any]:
    """Return handles by which processes of this machine read this worker's tensors in place.

    `readers`: `process_identity` of each process that reads some of the tensors. Without any, nothing is shared. On a
    GPU there is at most one: a CUDA IPC handle that is not opened, or that is opened twice, is never freed.
    """
    chosen = {name: shard.tensor for name, shard in worker.served_shards().items()}
    if not readers:
        return {}
    return _own(worker, chosen) if set(readers) == {process_identity()} else _handles(worker, chosen)


@torch.no_grad()
def gather(worker: SourceWorker, places: Mapping[str, Place], readers: Collection[str]) -> dict[str, Any]:
    """Gather whole tensors from all ranks of the source, and share them; a collective.

    CUDA workers see only their own device, so a target there cannot read another device's shard.

    Returns handles as `share` returns them.
    """
    worker.served_shards(has_values=False)
    device = next(iter(worker.parameter_shards().values())).tensor.device if readers else torch.device("meta")
    is_for_others = bool(readers) and set(readers) != {process_identity()}
    empty = _staging(worker, places, device).empty if is_for_others else partial(torch.empty, device=device)
    whole: dict[str, Tensor] = {name: empty(place.shape, dtype=place.dtype) for name, place in places.items()}
    for name, out in whole.items():
        if isinstance(worker, GatheringWorker):
            worker.gather_into(name, out)
        else:
            out.copy_(worker.full_tensor(name))
    if is_for_others:
        return _shared(worker.staged, whole)
    return _own(worker, whole) if readers else {}


def unshare(worker: SourceWorker) -> None:
    """Drop the tensors that `share` offered, after every reader is done.

    On CPU, staging memory stays for the next sync.
    """
    if not isinstance(worker.staged, SharedArena):
        worker.staged = None
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()


def _own(worker: SourceWorker, chosen: dict[str, Tensor]) -> dict[str, Any]:
    """Return handles that lead to the tensors themselves, for a reader in this process."""
    worker.staged = chosen  # held until the next call
    handles = {name: OwnTensor(process_identity(), next(_numbers)) for name in chosen}
    _own_tensors.update((handle.number, chosen[name]) for name, handle in handles.items())
    return handles


def _handles(worker: SourceWorker, chosen: dict[str, Tensor]) -> dict[str, Any]:
    handles: dict[str, Any] = {
        name: worker.arena.handle_of(tensor) if worker.arena else None for name, tensor in chosen.items()
    }
    outside = {name: chosen[name] for name, handle in handles.items() if handle is None}
    if outside:  # on a GPU, padded by FSDP, or changed by the user's hook: others can read a copy
        staging = _staging(worker, outside, next(iter(outside.values())).device)
        copies = {name: staging.empty(tensor.shape, tensor.dtype).copy_(tensor) for name, tensor in outside.items()}
        handles |= _shared(staging, copies)
    return handles


def _shared(staging: SharedArena | DeviceArena, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the handles of tensors in staging memory, after everything is written."""
    if isinstance(staging, DeviceArena):
        torch.cuda.synchronize()
    return {name: staging.handle_of(tensor) for name, tensor in tensors.items()}


def _staging(
    worker: SourceWorker, tensors: Mapping[str, Tensor | Place], device: torch.device
) -> SharedArena | DeviceArena:
    """Return memory for copies of tensors, which other processes can read."""
    needed = sum(aligned_bytes(tensor.shape, tensor.dtype) for tensor in tensors.values())
    if not isinstance(worker.staged, SharedArena | DeviceArena) or worker.staged.nbytes < needed:
        worker.staged = None  # before its successor is allocated
        worker.staged = SharedArena(needed) if device.type == "cpu" else DeviceArena(needed, device)
    worker.staged.reset()
    return worker.staged


@torch.no_grad()
def read(worker: Worker, pieces: Sequence[Piece], handles: Sequence[dict[str, Any]]) -> int:
    """Copy pieces from shared memory into the target's tensors.

    Returns the number of bytes written.
    """
    shards = worker.parameter_shards()
    reader = SharedMemoryReader()
    written = sum(_write(shards, p, open_handle(handles[p.source][p.source_name], reader)) for p in pieces)
    if any(shard.tensor.is_cuda for shard in shards.values()):
        torch.cuda.synchronize()
    return written


def _write(shards: Mapping[str, ParameterShard], piece: Piece, source: Tensor) -> int:
    """Copy a piece into the target's tensor.

    Returns the number of bytes written.
    """
    target = shards[piece.name].tensor[piece.target_box]
    target.copy_(source[piece.source_box])
    return target.nbytes


def open_handle(handle: Any, reader: SharedMemoryReader) -> Tensor:
    """Return the read-only tensor of a handle of `share`."""
    if not isinstance(handle, OwnTensor):
        return reader.view(handle)
    if handle.process != process_identity():
        raise RuntimeError(f"a tensor of process {handle.process} was offered to readers in that process alone")
    return _own_tensors[handle.number]


# -- broadcast --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """Boxes of one source that travel in one broadcast."""

    source: int
    places: dict[str, Place]
    """by tensor name"""

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return sum(aligned_bytes(place.shape, place.dtype) for place in self.places.values())


def make_buckets(layouts: Sequence[Layout], most_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Return every box of every source once, in broadcasts of at most `most_bytes` bytes.

    A larger box travels alone.
    """
    buckets: list[Bucket] = []
    for index, layout in enumerate(layouts):
        num_bytes: float = math.inf  # no bucket has boxes of two sources
        for name, place in layout.places.items():
            size = aligned_bytes(place.shape, place.dtype)
            if num_bytes + size > most_bytes:
                buckets.append(Bucket(index, {}))
                num_bytes = 0
            buckets[-1].places[name] = place
            num_bytes += size
    return tuple(buckets)


@dataclass(frozen=True)
class Meeting:
    """Rendezvous of the processes of two engines, used by all syncs between them."""

    ip: str
    port: int
    size: int
    timeout_s: float


@dataclass(frozen=True)
class Broadcast:
    """The plan of a broadcast sync: its process group, and the order and sources of its buckets."""

    meeting: Meeting
    buckets: tuple[Bucket, ...]
    roots: tuple[int, ...]
    """process rank of each source"""
    is_on_host: bool = False
    """buckets travel through host memory, because some process has its tensors there"""


_groups: dict[Meeting, Any] = {}
"""process groups of this process; making a new group costs more than a sync"""


@torch.no_grad()
def take_part(
    source: SourceWorker | None, target: Worker | None, plan: Broadcast, rank: int, pieces: Sequence[Piece]
) -> int:
    """Send this process's buckets, receive the other buckets, and copy pieces into the target.

    Returns the number of bytes written.
    """
    device = next(iter((source or target).parameter_shards().values())).tensor.device  # type: ignore[union-attr]
    if plan.is_on_host:
        device = torch.device("cpu")
    wanted: dict[tuple[int, str], list[Piece]] = {}
    for piece in pieces:
        wanted.setdefault((piece.source, piece.source_name), []).append(piece)
    written = 0
    try:
        if plan.meeting not in _groups:
            _groups[plan.meeting] = _meet(plan.meeting, rank, device)
        offered = source.served_shards() if source is not None else {}
        held = target.parameter_shards() if target is not None else {}
        for bucket in plan.buckets:
            root = plan.roots[bucket.source]
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
            arena = Arena(buffer)
            views = {name: arena.empty(p.shape, p.dtype) for name, p in bucket.places.items()}
            if root == rank:
                for name, view in views.items():
                    view.copy_(offered[name].tensor)
            _groups[plan.meeting].broadcast(buffer, root).wait()
            for name, view in views.items():
                written += sum(_write(held, piece, view) for piece in wanted.get((bucket.source, name), ()))
    except BaseException:
        leave_meeting(plan.meeting)  # its peers must not wait for it
        raise
    if device.type == "cuda":
        torch.cuda.synchronize()
    return written


def _meet(meeting: Meeting, rank: int, device: torch.device) -> Any:
    store = dist.PrefixStore("rlite-weight-sync", connect_store(meeting.ip, meeting.port, meeting.timeout_s))
    timeout = timedelta(seconds=meeting.timeout_s)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, meeting.size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, meeting.size, options)


def leave_meeting(meeting: Meeting) -> None:
    """Leave the process group, regardless of the state of its other processes."""
    group = _groups.pop(meeting, None)
    if group is not None and group.name() == "nccl":
        group.abort()
    close_store(meeting.port)  # if it was opened here
