"""The arithmetic of parallelism: sizes of the mesh axes. No torch here, because options use it."""

from __future__ import annotations

from dataclasses import dataclass

from rlite.errors import ConfigError


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
    expert: int = 1
    """ranks of one copy that share the experts of each layer (expert parallel). The other parameters do not have this
    axis: the ranks of fsdp x seq x tensor are divided a second time, into `num_expert_shards` x expert"""

    @classmethod
    def of(cls, world_size: int, copy_size: int, seq: int, tensor: int, expert: int = 1) -> ParallelDims:
        """Compute the axes of an engine."""
        product, told = seq * tensor, f"{copy_size} workers hold one copy of the model, and {copy_size} = fsdp x"
        if copy_size % product:
            equation, remedy = f"sp_size={seq} x tp_size={tensor}", "choose sizes whose product divides"
            raise ConfigError(f"{told} {equation} has no whole solution: {remedy} {copy_size}")
        if copy_size % expert:
            equation, remedy = f"sp_size x tp_size = efsdp x ep_size={expert}", "choose an ep_size that divides"
            raise ConfigError(f"{told} {equation} has no whole solution: {remedy} {copy_size}")
        return cls(world_size // copy_size, copy_size // product, seq, tensor, expert)

    @classmethod
    def of_world(cls, world_size: int, copies: int, seq: int, tensor: int, expert: int = 1) -> ParallelDims:
        """Compute the axes from the options of the trainers."""
        if world_size % copies:
            raise ConfigError(f"ddp_size={copies} copies do not divide the world of {world_size} devices")
        return cls.of(world_size, world_size // copies, seq, tensor, expert)

    @property
    def num_shards(self) -> int:
        """Ranks over which FSDP shards the part of a parameter that a tensor-parallel rank holds."""
        return self.fsdp * self.seq

    @property
    def num_expert_shards(self) -> int:
        """Ranks over which FSDP shards the experts that an expert-parallel rank holds (efsdp)."""
        return self.num_shards * self.tensor // self.expert

    @property
    def has_expert_mesh(self) -> bool:
        """True if experts are divided otherwise than the other parameters."""
        return self.tensor > 1 or self.expert > 1

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
        dense = f"ddp {self.copies} x fsdp {self.fsdp} x sp {self.seq} x tp {self.tensor}"
        if self.expert == 1:
            return dense
        return f"{dense}, of experts ddp {self.copies} x efsdp {self.num_expert_shards} x ep {self.expert}"
