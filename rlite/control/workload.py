"""`BaseWorkload`: one process of a role, with the user's methods."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
from omegaconf import DictConfig, OmegaConf

from rlite.control.spec import RLRoleType
from rlite.errors import RliteError
from rlite.runtime.cluster.host import WorkerContext

_held: list[socket.socket] = []
"""sockets that keep the rendezvous ports of this process's workloads"""


@dataclass(frozen=True)
class WorkloadPlace:
    """Place of a workload in its job."""

    name: str
    role: RLRoleType
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    torch_master_addr: str
    torch_master_port: int
    collocation: str | None


class BaseWorkload:
    """One of a role's processes. The trainer calls the methods of subclasses through role groups.

    A subclass may define `__init__(self, master_handle, config)`. All properties are known there.
    """

    _place: WorkloadPlace | None = None

    def __init__(self, master_handle: Any, config: DictConfig) -> None:
        """Keep the arguments.

        Args:
            master_handle: Ray actor handle of the job's master.
            config: the job's configuration.
        """
        self._master_handle = master_handle
        self._config = config

    @property
    def master_handle(self) -> Any:
        """Ray actor handle of the job's master."""
        return self._master_handle

    @property
    def config(self) -> DictConfig:
        """Configuration of the job."""
        return self._config

    @property
    def name(self) -> str:
        """Unique name of the workload: "ACTOR-0"."""
        return self._where.name

    @property
    def role(self) -> RLRoleType:
        """Role of the workload."""
        return self._where.role

    @property
    def rank(self) -> int:
        """Rank among the workloads of the role."""
        return self._where.rank

    @property
    def world_size(self) -> int:
        """Number of the role's workloads."""
        return self._where.world_size

    @property
    def word_size(self) -> int:
        """Same as `world_size`, in DLRover's spelling."""
        return self._where.world_size

    @property
    def local_rank(self) -> int:
        """Rank among the role's workloads on this node."""
        return self._where.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of the role's workloads on this node."""
        return self._where.local_world_size

    @property
    def torch_master_addr(self) -> str:
        """Address of rank 0, for torch.distributed's rendezvous."""
        return self._where.torch_master_addr

    @property
    def torch_master_port(self) -> int:
        """Port at rank 0, for torch.distributed's rendezvous. No other program gets it while the role lives."""
        return self._where.torch_master_port

    def is_actor_role(self) -> bool:
        """Return True for an actor."""
        return self.role is RLRoleType.ACTOR

    def is_reference_role(self) -> bool:
        """Return True for a reference model."""
        return self.role is RLRoleType.REFERENCE

    def is_rollout_role(self) -> bool:
        """Return True for a rollout workload."""
        return self.role is RLRoleType.ROLLOUT

    def is_reward_role(self) -> bool:
        """Return True for a reward workload."""
        return self.role is RLRoleType.REWARD

    def is_critic_role(self) -> bool:
        """Return True for a critic."""
        return self.role is RLRoleType.CRITIC

    def get_device_collocation(self) -> str | None:
        """Return the roles that share this workload's devices ("ACTOR,ROLLOUT"), or None."""
        return self._where.collocation

    def _rendezvous_address(self) -> tuple[str, int]:
        return self.torch_master_addr, self.torch_master_port

    @property
    def _where(self) -> WorkloadPlace:
        if self._place is None:
            raise RliteError(f"{type(self).__name__} has no place: a job makes workloads, see RLJobBuilder")
        return self._place


@dataclass(frozen=True)
class WorkloadFactory:
    """Maker of a role's workloads, called in their processes."""

    workload: bytes
    """the pickled class"""
    role: RLRoleType
    config: Mapping[str, Any]
    master: Any
    local_ranks: tuple[tuple[int, int], ...]
    """by rank: local rank and local world size"""
    rendezvous: tuple[str, int]
    collocation: str | None

    def __call__(self, context: WorkerContext) -> BaseWorkload:
        """Return the workload of a rank. Its place is set before its constructor runs."""
        workload = object.__new__(cloudpickle.loads(self.workload))
        local_rank, local_world_size = self.local_ranks[context.rank]
        workload._place = WorkloadPlace(
            f"{self.role}-{context.rank}",
            self.role,
            context.rank,
            context.world_size,
            local_rank,
            local_world_size,
            *self.rendezvous,
            self.collocation,
        )
        workload.__init__(self.master, OmegaConf.create(dict(self.config)))
        return workload


def hold_port(address: str, port: int = 0) -> int:
    """Keep a port of this process for a later rendezvous.

    The socket is bound and does not listen. Linux then gives the port to no program that asks for a free port, and
    still lets a server with SO_REUSEADDR (torch's store) bind it.

    Args:
        address: address of this node.
        port: a certain port; 0 takes a free one.

    Returns:
        The port.
    """
    line = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    line.bind(("", port))
    _held.append(line)
    return line.getsockname()[1]
