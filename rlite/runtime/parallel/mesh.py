"""The arithmetic of parallelism: the role of each rank of an engine, and torch's device mesh for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlite.runtime.parallel.dims import ParallelDims
from rlite.runtime.parallel.processes import subgroup


@dataclass(frozen=True)
class TrainMesh:
    """One rank's place among the ranks of an engine, with its process groups."""

    dims: ParallelDims
    rank: int
    data: DeviceMesh
    """FSDP's: ("shard") or ("replicate", "shard")"""
    tensor: DeviceMesh
    """mesh of this rank's tensor-parallel group"""
    seq: dist.ProcessGroup
    """context-parallel group of this rank"""

    @property
    def num_averaged(self) -> int:
        """Ranks over which FSDP averages gradients."""
        return self.dims.copies * self.dims.num_shards

    @property
    def tensor_rank(self) -> int:
        """Rank in the tensor-parallel group."""
        return self.rank % self.dims.tensor

    @property
    def is_plain(self) -> bool:
        """True for a single rank without any parallelism."""
        return self.num_averaged * self.dims.tensor == 1


def make_mesh(device_type: str, world_ranks: Sequence[int], rank: int, dims: ParallelDims) -> TrainMesh:
    """Build the mesh and its process groups. Every rank of the engine calls it.

    Args:
        device_type: "cpu" or "cuda".
        world_ranks: ranks of the engine's workers in the default group, in the order of `ParallelDims`.
        rank: this worker's index in `world_ranks`.
        dims: sizes of the axes.

    Returns:
        This rank's place.
    """
    table = torch.tensor(world_ranks, dtype=torch.int).view(dims.copies, dims.num_shards, dims.tensor)
    copy, shard, tensor = (int(i) for i in torch.unravel_index(torch.tensor(rank), table.shape))
    axes = {"shard": table[copy, :, tensor], "tensor": table[copy, shard, :]}
    if dims.copies > 1:
        axes = {"replicate": table[:, shard, tensor], **axes}
    groups = [subgroup(ranks.tolist()) for ranks in axes.values()]
    ranks = table if dims.copies > 1 else table[0]
    whole = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(axes))
    first = shard - shard % dims.seq
    return TrainMesh(
        dims=dims,
        rank=rank,
        data=whole["replicate", "shard"] if dims.copies > 1 else whole["shard"],
        tensor=whole["tensor"],
        seq=subgroup(table[copy, first : first + dims.seq, tensor].tolist()),
    )
