"""SHA-256 digests of weights at both ends of a weight sync.

    sent        the train engine, in the target's dtype
    arrived     memory on the way into another program, before the program reads it
    served      the values that an engine computes with after the sync: `digest()` of its workers

Digests are made where the weights are, block by block, so that no weight passes through the driver.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlite.runtime.parallel.shards import Box, ParameterShard
from rlite.runtime.replicas.transport import Piece
from rlite.runtime.replicas.workers import SourceWorker, StagingWorker, Worker


class Digest(NamedTuple):
    """The SHA-256 of a block of a piece."""

    sha256: bytes
    part: Box = ()
    """the block, relative to the piece; () is the whole piece"""
    is_computed: bool = False
    """the values were read through a kernel, which loses the sign of zeros"""


class Served(NamedTuple):
    """A worker's answer to the question which weights it serves."""

    digests: list[list[Digest]]
    """digests of the blocks of each piece that the worker's engine holds; [] if the piece is not compared"""
    version: int | None = None
    """policy version that tokens get now; None if the worker does not know it"""
    limit: str = ""
    """why pieces are not compared, or what the comparison does not show"""
    checksums: Mapping[str, str] = {}
    """the engine's own checksums, which are compared with those of other replicas and of the last verified sync"""


@runtime_checkable
class DigestingWorker(Worker, Protocol):
    """A target that reads back what its engine serves."""

    def digest(self, pieces: Sequence[Piece]) -> Served:
        """Return digests of the weights that the engine computes with now."""


def sha256_of(tensor: Tensor, is_computed: bool = False) -> bytes:
    """Return the SHA-256 of a tensor's elements, in row-major order. `is_computed` loses the sign of zeros."""
    values = (tensor + 0 if is_computed else tensor).detach().contiguous().flatten()
    return hashlib.sha256(values.view(torch.uint8).cpu().numpy().data).digest()


def own_digests(shards: Mapping[str, ParameterShard], pieces: Sequence[Piece]) -> list[list[Digest]]:
    """Return the digest of each piece in the shards that it was written into."""
    return _in_threads(lambda piece: [Digest(sha256_of(shards[piece.name].tensor[piece.target_box]))], pieces)


def block_digests(blocks: Iterable[tuple[ParameterShard, bool]], box: Box, dtype: torch.dtype) -> Iterable[Digest]:
    """Yield digests of the parts of a piece that a process holds.

    `dtype`: dtype in which the piece was written. A kernel may hold it wider.
    """
    for shard, is_computed in blocks:
        both = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, shard.box, strict=True)]
        if all(start < stop for start, stop in both):
            own = tuple(slice(i - zero, j - zero) for (i, j), zero in zip(both, shard.offset, strict=True))
            part = tuple(slice(i - each.start, j - each.start) for (i, j), each in zip(both, box, strict=True))
            yield Digest(sha256_of(shard.tensor[own].to(dtype), is_computed), part, is_computed)


@torch.no_grad()
def held_digests(worker: Worker, pieces: Sequence[Piece], is_served: bool) -> Served:
    """Return digests at the receiving end.

    `is_served`: after the sync, of what is served; otherwise before it, of what waits for another program to read it.
    """
    if is_served and isinstance(worker, DigestingWorker):
        return worker.digest(pieces)
    if is_served == isinstance(worker, StagingWorker):  # the program has the weights, or will be asked for them
        return Served([[] for _ in pieces if is_served], limit="compared is what it has read, and not what it serves")
    return Served(own_digests(worker.parameter_shards(), pieces))


@torch.no_grad()
def sent_digests(worker: SourceWorker, asked: Sequence[tuple[Piece, Box, bool]]) -> list[bytes]:
    """Return digests of what a source worker sends, in the target's dtype. A collective of its copy of the model."""
    served = worker.served_shards()

    def digest(asked: tuple[Piece, Box, bool]) -> bytes:
        piece, part, is_computed = asked
        return sha256_of(served[piece.source_name].tensor[piece.source_box][part].to(piece.dtype), is_computed)

    return _in_threads(digest, asked)


def _in_threads(act: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # hashing releases the interpreter
        return list(pool.map(act, items))
