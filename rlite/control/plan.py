"""`JobPlan`: everything that a job's master needs, with the job's classes, and the names of the job's processes.

A plan holds classes as bytes. Only the processes that make their objects unpickle them, so that the master imports
none of the libraries of the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlite.control.spec import JobSpec, Layout, RLRoleType
from rlite.runtime.cluster.launcher import Interface
from rlite.services.recovery.failover import FailoverPolicy, JobState, WorkloadId


@dataclass(frozen=True)
class WorkloadClass:
    """Class of a role's workloads, for processes that do not import it."""

    label: str
    """module:Class"""
    pickled: bytes
    interface: Interface
    actor_options: Mapping[str, Any]
    """options of `@ray.remote(...)`"""


@dataclass(frozen=True)
class JobClasses:
    """All classes of a job."""

    trainer: bytes
    """pickled; empty for a program, which the job's spec names"""
    workloads: Mapping[RLRoleType, WorkloadClass]


TRAINER = "TRAINER"
"""role of the trainer's process, in identities and names"""


@dataclass(frozen=True)
class JobPlan:
    """A job that was checked and named."""

    name: str
    submission: str
    """unique id of this submission"""
    spec: JobSpec
    classes: JobClasses
    layout: Layout
    policy: FailoverPolicy
    folder: str
    """working folder of the submitter"""

    def bundles(self) -> dict[int, list[dict[str, float]]]:
        """Return the resources to reserve for each device, by node. Nodes without workloads are left out.

        A program's devices are one bundle.
        """
        kind: str = self.spec.device_type
        if self.spec.is_program:
            return {0: [{kind: float(self.spec.device_per_node)}]}
        bundles = {
            node: [{kind: 1.0} for _ in range(count)] for node, count in enumerate(self.layout.num_devices) if count
        }
        for role, seats in self.layout.seats.items():
            more = {name: amount for name, amount in self.spec.resource_of(role).items() if name != kind and amount}
            for seat in seats if more else ():
                bundle = bundles[seat.node][seat.device]
                bundle |= {name: bundle.get(name, 0.0) + amount for name, amount in more.items()}
        return bundles

    def lives(self, state: JobState) -> dict[RLRoleType, list[WorkloadId]]:
        """Return the current life of every workload."""
        seats = self.layout.seats
        return {role: [state.life(str(role), rank) for rank in range(len(seats[role]))] for role in seats}

    def env(self, role: RLRoleType | None = None) -> dict[str, str]:
        """Return the environment variables of a role's workloads, or of the trainer."""
        own = {} if role is None else self.spec.roles()[role].env
        return {name: str(value) for name, value in {**self.spec.global_env, **own}.items()}


def actor_name(life: WorkloadId) -> str:
    """Return the name of a process within its job: "2.0.1/ACTOR-3"."""
    return f"{life.attempt}.{life.epoch}.{life.incarnation}/{life.role}-{life.rank}"


def trainer_life(run: int) -> WorkloadId:
    """Return the identity of a trainer's process."""
    return WorkloadId(TRAINER, 0, incarnation=run)
