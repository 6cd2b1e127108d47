"""Job specs: what `RLJobBuilder` builds and a yaml file holds.

node_num: 1
device_per_node: 4
device_type: CPU
trainer: my_project.ppo:Trainer
config: {lr: 1.0e-6}
actor: {workload: my_project.ppo:Actor, total: 4, per_node: 4}
rollout: {workload: my_project.ppo:Rollout, total: 4, per_node: 4, on_failure: workload}
collocations: [[actor, rollout]]

A trainer may also be a program, which is started by module path:

device_per_node: 2
trainer: rlite.trainer.ppo
num_processes: 2                      # under torchrun
config: {actor: {model_name: ...}}    # options of the program
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlite.cluster.placement import DeviceKind
from rlite.config import Count, Natural, Options, Seconds
from rlite.control.layout import Layout, RoleSize, lay_out
from rlite.control.roles import RLRoleType
from rlite.errors import ConfigError
from rlite.recovery.failover import FailoverPolicy, RolePolicy

Environment = dict[str, str | int | float]


class RoleSpec(Options):
    """Workloads of one role."""

    workload: str
    """class of the workloads: module:Class"""
    total: Count
    """number of workloads"""
    per_node: Count
    """workloads on one node"""
    env: Environment = {}
    """environment variables of the workloads"""
    resource: dict[str, float] = {}
    """resources of Ray for one workload; default: one device. A workload has one device at most"""
    on_failure: Literal["ignore", "workload", "role", "job"] = "job"
    """scope of the restart when a workload fails. Every scope except job needs a trainer that catches WorkerDied"""
    max_restarts: Natural = 10
    """restarts of the role or of its workloads, after which a failure restarts the job"""


class HealthOptions(Options):
    """Conditions under which an existing process counts as failed."""

    stopped_after: Seconds = 3.0
    """seconds in process state T (SIGSTOP)"""
    silent_after: Seconds = 8.0
    """seconds without a heartbeat from a node"""
    hung_after: Seconds = 20.0
    """seconds without any use of the CPU in a call whose declared time-out has passed"""
    late_step: Seconds = 1800.0
    """seconds that one step of a program may take; after them, a program that does not use the CPU counts as hung"""


class JobSpec(Options):
    """Everything about a job except live classes."""

    node_num: Count = 1
    """number of nodes"""
    device_per_node: Count
    """devices on one node"""
    device_type: Literal["CPU", "GPU"] = "GPU"
    """kind of the devices; a CPU device is one CPU of Ray"""
    trainer: str
    """class of the trainer: module:Class; or the module of a program, such as rlite.trainer.ppo"""
    num_processes: Count = 1
    """processes of a program; more than one run under torchrun"""
    config: dict[str, Any] = {}
    """configuration of the trainer and the workloads, or the options of the program"""
    global_env: Environment = {}
    """environment variables of the trainer and the workloads"""
    actor: RoleSpec | None = None
    """the policy that is trained; mandatory unless the trainer is a program"""
    rollout: RoleSpec | None = None
    """generates trajectories"""
    reward: RoleSpec | None = None
    """scores trajectories"""
    reference: RoleSpec | None = None
    """the frozen policy"""
    critic: RoleSpec | None = None
    """estimates values"""
    collocations: list[list[str]] = []
    """groups of roles that share devices"""
    health: HealthOptions = HealthOptions()
    max_trainer_restarts: Natural = 10
    """restarts of a program, or of a recoverable trainer alone"""
    max_node_faults: Natural = 3
    """faults of a node, after which it is left out if there are others"""
    backoff: Seconds = 1.0
    """seconds that restarts wait, in multiples 0, 1, 3, 7, ..."""
    start_timeout: Seconds = 300.0
    """seconds in which the workloads have to start"""
    call_timeout: Seconds = 604800.0
    """seconds that a call without a declared time-out may take"""
    store: str = "ray"
    """place of the state: ray, memory, or a folder that all nodes see"""

    def problems(self) -> Iterable[str]:
        """Check the rules between options.

        Yields:
            One message for each broken rule.
        """
        if self.is_program:
            yield from self._problems_of_program()
            return
        if self.num_processes > 1:
            yield "num_processes: only for a trainer that is started by module path; set total and per_node of a role"
        if self.actor is None:
            yield "actor: a job needs one, with workload, total and per_node"
            return
        for role, spec in self.roles().items():
            device = spec.resource.get(self.device_type, 1)
            if not 0 < device <= 1:
                yield f"{role.lower()}.resource: {self.device_type}={device:g}, but a workload has one device at most"
        try:
            OmegaConf.create(self.config)
        except OmegaConfBaseException as error:
            yield f"config: {error}"
        self.layout()

    def _problems_of_program(self) -> Iterable[str]:
        if roles := ", ".join(role.lower() for role in self.roles()):
            yield f"{roles}: trainer={self.trainer} is a program without workloads; a class is given as module:Class"
        if self.node_num > 1:
            yield f"node_num={self.node_num}: the processes of a program are on one node"
        if self.num_processes > self.device_per_node:
            yield f"num_processes={self.num_processes} need a device each, and device_per_node={self.device_per_node}"

    @property
    def is_program(self) -> bool:
        """True if the trainer is started by module path, as a program of its own."""
        return ":" not in self.trainer

    def roles(self) -> dict[RLRoleType, RoleSpec]:
        """Return the roles of the job."""
        given = {role: getattr(self, role.lower()) for role in RLRoleType}
        return {role: spec for role, spec in given.items() if spec is not None}

    def groups(self) -> list[tuple[RLRoleType, ...]]:
        """Return the collocation groups.

        Raises:
            ConfigError: a group names a role that the job does not have, or a role twice.
        """
        groups = [tuple(RLRoleType.of(name) for name in names) for names in self.collocations]
        named = [role for group in groups for role in group]
        for role in named:
            if role not in self.roles():
                raise ConfigError(f"collocations: {role} has no workloads; has: {', '.join(self.roles())}")
            if named.count(role) > 1:
                raise ConfigError(f"collocations: {role} occurs twice; a role is in one group at most")
        return groups

    def layout(self) -> Layout:
        """Return the place of every workload.

        Raises:
            PlacementError: the workloads do not fit.
        """
        if self.is_program:
            return Layout({}, (self.device_per_node,))
        sizes = {role: RoleSize(spec.total, spec.per_node) for role, spec in self.roles().items()}
        return lay_out(sizes, self.groups(), self.node_num, self.device_per_node)

    def collocation_of(self, role: RLRoleType) -> str | None:
        """Return the names of the roles that share devices with a role, in the order given, or None."""
        return next((",".join(group) for group in self.groups() if role in group), None)

    def resource_of(self, role: RLRoleType) -> dict[str, float]:
        """Return the resources of one workload of a role."""
        return dict(self.roles()[role].resource) or {self.device_type: 1}

    def policy(self, max_job_restarts: int) -> FailoverPolicy:
        """Return the failover policy.

        Args:
            max_job_restarts: restarts of the job, after which a failure ends it.
        """
        return FailoverPolicy(
            roles={str(role): RolePolicy(spec.on_failure, spec.max_restarts) for role, spec in self.roles().items()},
            max_job_restarts=max_job_restarts,
            max_trainer_restarts=self.max_trainer_restarts,
            max_node_faults=self.max_node_faults,
            backoff_s=self.backoff,
        )

    @property
    def device_kind(self) -> DeviceKind:
        """Kind of the devices in rlite's words."""
        return "cpu" if self.device_type == "CPU" else "cuda"
