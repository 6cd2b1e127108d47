"""The worker side of weight sync: say what lies where, and bring boxes of tensors from one process to another.

These functions run in worker processes, on a source worker, a target worker, or both when one process hosts both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rlite.engine.base import SourceWorker, Worker
from rlite.parallel.arena import ArenaReader, SharedArena, SharedBlock, aligned_bytes, host_identity
from rlite.parallel.processes import close_store, connect_store, process_identity
from rlite.parallel.shards import Box, ParameterShard


@dataclass(frozen=True)
class Place:
    """One worker's box of one tensor, as the driver knows it."""

    dtype: torch.dtype
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class Layout:
    """What one worker holds: its places by tensor name, and where that memory is."""

    places: dict[str, Place]
    host: str
    aliases: dict[str, str] = field(default_factory=dict)
    """other names of tied tensors, to the name in `places`"""
    handles: dict[str, Any] | None = field(default=None, compare=False)
    """how a process on `host` reads each place where it lies, if it was asked for"""
    process: str = field(default="", compare=False)
    """`process_identity` of the worker's process"""


@dataclass(frozen=True)
class Piece:
    """A block to copy: from a box of one source place to a box of one target place, both relative to their shard."""

    name: str
    source_name: str
    source: int
    source_box: Box
    target_box: Box


@torch.no_grad()
def describe(worker: SourceWorker | Worker, is_source: bool, is_shared: bool) -> Layout:
    """The places that a source offers or a target wants written; a source's with handles if `is_shared`."""
    if not is_source:
        places = {name: _place(shard) for name, shard in worker.parameter_shards().items()}
        return Layout(places, host_identity(), process=process_identity())
    source = cast(SourceWorker, worker)
    served = source.served_shards(has_values=is_shared)
    return Layout(
        places={name: _place(shard) for name, shard in served.items()},
        host=host_identity(),
        aliases=source.aliases(),
        handles=_handles(source, {name: shard.tensor for name, shard in served.items()}) if is_shared else None,
        process=process_identity(),
    )


def _place(shard: ParameterShard) -> Place:
    return Place(shard.tensor.dtype, tuple(shard.offset), tuple(shard.tensor.shape), tuple(shard.global_shape))


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
def share(
    worker: SourceWorker, names: Sequence[str] | None, is_gathered: bool, readers: Collection[str]
) -> dict[str, Any]:
    """Return handles by which the readers, processes of this machine, read this worker's tensors where they lie.

    Args:
        names: tensors to share; None is all.
        is_gathered: first gather each whole tensor from all ranks of the source (a collective): CUDA workers see only
            their own device, so a target there cannot read another one's shard.
        readers: `process_identity` of each process that reads the tensors.
    """
    shards = worker.served_shards(has_values=not is_gathered)
    wanted = shards if names is None else names
    # what is gathered may be a tensor that another rank serves
    chosen = {name: worker.full_tensor(name) if is_gathered else shards[name].tensor for name in wanted}
    return _own(worker, chosen) if set(readers) == {process_identity()} else _handles(worker, chosen)


def _own(worker: SourceWorker, chosen: dict[str, Tensor]) -> dict[str, Any]:
    """Return handles that lead to the tensors themselves, for a reader in this process."""
    worker.staged = chosen  # held until the next call
    handles = {name: OwnTensor(process_identity(), next(_numbers)) for name in chosen}
    _own_tensors.update((handle.number, chosen[name]) for name, handle in handles.items())
    return handles


def _handles(worker: SourceWorker, chosen: dict[str, Tensor]) -> dict[str, Any]:
    if any(tensor.is_cuda for tensor in chosen.values()):
        worker.staged = chosen  # held until the next call: the target maps this memory
        torch.cuda.synchronize()
        return {name: reduce_tensor(tensor.contiguous()) for name, tensor in chosen.items()}
    handles = {name: worker.arena.handle_of(tensor) if worker.arena else None for name, tensor in chosen.items()}
    outside = {name: chosen[name] for name, handle in handles.items() if handle is None}
    if outside:  # padded by FSDP, changed by the user's hook, or gathered: it needs a copy that others can read
        staging = _staging(worker, outside)
        for name, tensor in outside.items():
            staged = staging.empty(tuple(tensor.shape), tensor.dtype)
            staged.copy_(tensor)
            handles[name] = staging.handle_of(staged)
    return handles


def _staging(worker: SourceWorker, tensors: dict[str, Tensor]) -> SharedArena:
    needed = sum(aligned_bytes(tuple(tensor.shape), tensor.dtype) for tensor in tensors.values())
    if not isinstance(worker.staged, SharedArena) or worker.staged.nbytes < needed:
        worker.staged = SharedArena(needed)
    worker.staged.reset()
    return worker.staged


_reader = ArenaReader()


@torch.no_grad()
def read(worker: Worker, pieces: Sequence[Piece], handles: Sequence[dict[str, Any]]) -> int:
    """Copy pieces into the target's tensors from where they lie; returns bytes written."""
    shards = worker.parameter_shards()
    written = 0
    for piece in pieces:
        target = shards[piece.name].tensor[piece.target_box]
        target.copy_(open_handle(handles[piece.source][piece.source_name])[piece.source_box])
        written += target.numel() * target.element_size()
    if any(shard.tensor.is_cuda for shard in shards.values()):
        torch.cuda.synchronize()
    return written


def open_handle(handle: Any) -> Tensor:
    """Return the tensor that a handle of `share` leads to, to be read only."""
    if isinstance(handle, SharedBlock):
        return _reader.view(handle)
    if isinstance(handle, OwnTensor):
        if handle.process != process_identity():
            raise RuntimeError(f"a tensor of process {handle.process} was offered to readers in that process alone")
        return _own_tensors[handle.number]
    rebuild, args = handle
    return rebuild(*args)


# -- broadcast --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """Some boxes of one source that travel in one broadcast."""

    source: int
    names: tuple[str, ...]
    places: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        return sum(aligned_bytes(place.shape, place.dtype) for place in self.places)


@dataclass(frozen=True)
class Broadcast:
    """What every process of a broadcast sync knows: where to meet, and which bucket comes when, from whom."""

    ip: str
    port: int
    size: int
    buckets: tuple[Bucket, ...]
    roots: tuple[int, ...]
    """process rank of each source"""
    timeout_s: float


@torch.no_grad()
def take_part(
    source: SourceWorker | None,
    target: Worker | None,
    plan: Broadcast,
    rank: int,
    source_index: int | None,
    pieces: Sequence[Piece],
) -> int:
    """Send this process's buckets, receive the others', and copy what the target needs; returns bytes written."""
    some = next(iter((source or target).parameter_shards().values())).tensor  # type: ignore[union-attr]
    store = dist.PrefixStore("rlite-weight-sync", connect_store(plan.ip, plan.port, plan.timeout_s))
    timeout = timedelta(seconds=plan.timeout_s)
    if some.is_cuda:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group: Any = dist.ProcessGroupNCCL(store, rank, plan.size, options)
    else:
        group = dist.ProcessGroupGloo(store, rank, plan.size, timeout)
    try:
        written = _exchange(group, source, target, plan, source_index, pieces, some.device)
        group.barrier().wait()  # nobody closes its end while another still sends
    finally:
        if source_index == 0:
            close_store(plan.port)  # they met here
    if some.is_cuda:
        torch.cuda.synchronize()
    return written


def _exchange(
    group: Any,
    source: SourceWorker | None,
    target: Worker | None,
    plan: Broadcast,
    source_index: int | None,
    pieces: Sequence[Piece],
    device: torch.device,
) -> int:
    offered = source.served_shards() if source is not None else {}
    wanted: dict[tuple[int, str], list[Piece]] = {}
    for piece in pieces:
        wanted.setdefault((piece.source, piece.source_name), []).append(piece)
    held = target.parameter_shards() if target is not None else {}
    written = 0
    for bucket in plan.buckets:
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
        views = _views(buffer, bucket)
        if bucket.source == source_index:
            for name, view in zip(bucket.names, views, strict=True):
                view.copy_(offered[name].tensor)
        group.broadcast(buffer, plan.roots[bucket.source]).wait()
        for name, view in zip(bucket.names, views, strict=True):
            for piece in wanted.get((bucket.source, name), ()):
                place = held[piece.name].tensor[piece.target_box]
                place.copy_(view[piece.source_box])
                written += place.numel() * place.element_size()
    return written


def _views(buffer: Tensor, bucket: Bucket) -> list[Tensor]:
    views, start = [], 0
    for place in bucket.places:
        nbytes = math.prod(place.shape) * place.dtype.itemsize
        views.append(buffer[start : start + nbytes].view(place.dtype).view(place.shape))
        start += aligned_bytes(place.shape, place.dtype)
    return views


# -- checksums --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def source_checksums(worker: SourceWorker, pieces: Sequence[Piece], dtypes: Sequence[torch.dtype]) -> list[int]:
    """One number for each piece as it should arrive: converted to the target's dtype."""
    shards = worker.served_shards()
    return [
        _checksum(shards[piece.source_name].tensor[piece.source_box].to(dtype))
        for piece, dtype in zip(pieces, dtypes, strict=True)
    ]


@torch.no_grad()
def target_checksums(worker: Worker, pieces: Sequence[Piece]) -> list[int]:
    """One number for each piece as it has arrived."""
    shards = worker.parameter_shards()
    return [_checksum(shards[piece.name].tensor[piece.target_box]) for piece in pieces]


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(tensor: Tensor) -> int:
    """Of the bits, weighted by position, so that exchanged rows are seen."""
    bits = tensor.contiguous().view(_BITS[tensor.element_size()]).flatten().to(torch.int64)
    weights = torch.arange(1, bits.numel() + 1, device=bits.device) % 65521 + 1
    return int((bits * weights).sum())


def is_finite(worker: Worker) -> list[str]:
    """Names of the tensors that hold NaN or infinity."""
    return [name for name, s in worker.parameter_shards().items() if not torch.isfinite(s.tensor).all()]
