"""The arithmetic of parallelism: the role of each rank of an engine, and torch's device mesh for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlite.errors import ConfigError
from rlite.parallel.processes import subgroup


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the mesh axes: world = copies x fsdp x seq x tensor, from the slowest to the fastest axis."""

    copies: int
    """whole copies of the model (HSDP); gradients are averaged over them"""
    fsdp: int
    """ranks with different data among which each copy is sharded"""
    seq: int
    """ranks that share the tokens of one pack (context parallel); parameters are sharded over them, too"""
    tensor: int
    """ranks that share each matrix (tensor parallel)"""

    @classmethod
    def of(cls, world_size: int, executor_size: int, seq: int, tensor: int) -> ParallelDims:
        """Compute the axes of an engine.

        Args:
            world_size: all workers of the engine.
            executor_size: workers that hold one copy of the model.
            seq: `sp_size`.
            tensor: `tp_size`.

        Returns:
            The sizes of all axes.

        Raises:
            ConfigError: a size is not positive, or the equation in the message has no whole solution.
        """
        for name, size in (("sp_size", seq), ("tp_size", tensor)):
            if size < 1:
                raise ConfigError(f"{name}={size}: expected at least 1")
        if executor_size % (seq * tensor):
            raise ConfigError(
                f"{executor_size} workers hold one copy of the model, and {executor_size} = fsdp x sp_size={seq} x "
                f"tp_size={tensor} has no whole solution: choose sizes whose product divides {executor_size}"
            )
        return cls(world_size // executor_size, executor_size // (seq * tensor), seq, tensor)

    @classmethod
    def of_world(cls, world_size: int, copies: int, seq: int, tensor: int) -> ParallelDims:
        """Compute the axes from the options of the trainers.

        Args:
            world_size: all devices.
            copies: `ddp_size`.
            seq: `sp_size`.
            tensor: `tp_size`.

        Returns:
            The sizes of all axes.

        Raises:
            ConfigError: the equation in the message has no whole solution.
        """
        if copies < 1 or world_size % copies:
            raise ConfigError(f"ddp_size={copies} copies do not divide the world of {world_size} devices")
        return cls.of(world_size, world_size // copies, seq, tensor)

    @property
    def num_shards(self) -> int:
        """Ranks over which FSDP shards the part of a parameter that a tensor-parallel rank holds."""
        return self.fsdp * self.seq

    @property
    def num_data_ranks(self) -> int:
        """Ranks with different data."""
        return self.copies * self.fsdp

    @property
    def num_peers(self) -> int:
        """Ranks that work on the same data."""
        return self.seq * self.tensor

    @property
    def pack_factor(self) -> int:
        """Multiple of one rank's tokens that a microbatch holds, because its activations are shared."""
        return self.num_peers

    def __str__(self) -> str:
        return f"{self.copies} copies x {self.fsdp} shards x sp {self.seq} x tp {self.tensor}"


@dataclass(frozen=True)
class TrainMesh:
    """One rank's place among the ranks of an engine, with its process groups."""

    dims: ParallelDims
    rank: int
    data: DeviceMesh
    """FSDP's: ("shard") or ("replicate", "shard")"""
    tensor: DeviceMesh
    """of this rank's tensor-parallel group"""
    seq: dist.ProcessGroup
    """of this rank's context-parallel group"""

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
    lines = {
        "replicate": subgroup(table[:, shard, tensor].tolist()),
        "shard": subgroup(table[copy, :, tensor].tolist()),
        "tensor": subgroup(table[copy, shard, :].tolist()),
    }
    names = ("replicate", "shard", "tensor") if dims.copies > 1 else ("shard", "tensor")
    whole = DeviceMesh.from_group(
        [lines[name] for name in names],
        device_type,
        mesh=table if dims.copies > 1 else table[0],
        mesh_dim_names=names,
    )
    first = shard - shard % dims.seq
    return TrainMesh(
        dims=dims,
        rank=rank,
        data=whole["replicate", "shard"] if dims.copies > 1 else whole["shard"],
        tensor=whole["tensor"],
        seq=subgroup(table[copy, first : first + dims.seq, tensor].tolist()),
    )
