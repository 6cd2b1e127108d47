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

Layout of a job: which workload is on which device. A pure function; nodes and devices are numbers.

    roles, collocation groups, nodes --lay_out--> Layout  |  PlacementError

A role outside of any group has its devices for itself, one for each workload. The roles of a group share all devices of
their nodes in turns: with 4 actors and 4 rollouts on 4 devices, each device has an actor and a rollout.

`JobPlan`: everything that a job's master needs, with the job's classes, and the names of the job's processes.

A plan holds classes as bytes. Only the processes that make their objects unpickle them, so that the master imports
none of the libraries of the user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlite.config import Count, Natural, Options, Seconds
from rlite.errors import ConfigError, PlacementError, did_you_mean
from rlite.runtime.cluster.launcher import Interface
from rlite.runtime.cluster.placement import DeviceKind
from rlite.services.recovery.failover import FailoverPolicy, JobState, RolePolicy, WorkloadId


class RLRoleType(StrEnum):
    """Purpose of a workload in reinforcement learning."""

    ACTOR = "ACTOR"
    ROLLOUT = "ROLLOUT"
    REWARD = "REWARD"
    REFERENCE = "REFERENCE"
    CRITIC = "CRITIC"

    @property
    def group(self) -> str:
        """Name of the role's group on a trainer: "RG_ACTOR"."""
        return f"RG_{self.value}"

    @classmethod
    def of(cls, given: RLRoleType | str) -> RLRoleType:
        """Return the role of a name, in any case.

        Raises:
            ConfigError: there is no such role.
        """
        try:
            return cls(str(given).upper())
        except ValueError:
            raise ConfigError(f"unknown role {given!r}; {did_you_mean(str(given).upper(), cls)}") from None


MAX_SHARING = 5
"""workloads on one device"""


@dataclass(frozen=True)
class Seat:
    """Device of a workload."""

    node: int
    device: int


@dataclass(frozen=True)
class Layout:
    """Seats of all workloads."""

    seats: Mapping[RLRoleType, tuple[Seat, ...]]
    """by role and rank"""
    num_devices: tuple[int, ...]
    """devices in use on each node"""

    def local_ranks(self, role: RLRoleType) -> tuple[tuple[int, int], ...]:
        """Return each rank's local rank and local world size. Neighbouring ranks share a node."""
        sizes = Counter(seat.node for seat in self.seats[role]).values()
        return tuple((local_rank, size) for size in sizes for local_rank in range(size))


def lay_out(
    sizes: Mapping[RLRoleType, RoleSpec], groups: Sequence[Sequence[RLRoleType]], node_num: int, device_per_node: int
) -> Layout:
    """Place all workloads."""
    shared = {role for group in groups for role in group}
    widths = {tuple(group): _shared_width(group, sizes, device_per_node) for group in groups}
    widths |= {(role,): _own_width(role, size, device_per_node) for role, size in sizes.items() if role not in shared}
    used = [0] * node_num
    seats: dict[RLRoleType, tuple[Seat, ...]] = {}
    for group, width in sorted(widths.items(), key=lambda item: -item[1]):  # large ones first, to fit more
        num_nodes = max(ceil(sizes[role].total / sizes[role].per_node) for role in group)
        free = [node for node in range(node_num) if device_per_node - used[node] >= width]
        if len(free) < num_nodes:
            raise PlacementError(
                f"{','.join(group)}: {num_nodes} nodes with {width} free devices are needed, and {len(free)} of "
                f"{node_num} nodes have them: {device_per_node} devices on each node, and other roles hold "
                f"{sum(used)} of {node_num * device_per_node}. Share devices (with_collocation), ask for fewer "
                "workloads, or for more nodes or devices"
            )
        chosen, offset = free[:num_nodes], 0
        for role in group:
            seats[role] = _seats(sizes[role], chosen, used, width, offset)
            offset += sizes[role].per_node
        for node in chosen:
            used[node] += width
    return Layout({role: seats[role] for role in sizes}, tuple(used))


def _seats(size: RoleSpec, nodes: Sequence[int], used: Sequence[int], width: int, offset: int) -> tuple[Seat, ...]:
    places = (divmod(rank, size.per_node) for rank in range(size.total))
    return tuple(Seat(nodes[node], used[nodes[node]] + (offset + place) % width) for node, place in places)


def _shared_width(group: Sequence[RLRoleType], sizes: Mapping[RLRoleType, RoleSpec], device_per_node: int) -> int:
    per_node = {role: sizes[role].per_node for role in group}
    total = sum(per_node.values())
    if total % device_per_node or not 1 <= total // device_per_node <= MAX_SHARING:
        terms = " + ".join(f"{number} ({role})" for role, number in per_node.items())
        raise PlacementError(
            f"collocation {','.join(group)} does not fit: {terms} = {total} workloads per node; expected a multiple of "
            f"device_per_node={device_per_node}, at most {MAX_SHARING} times it"
        )
    return device_per_node


def _own_width(role: RLRoleType, size: RoleSpec, device_per_node: int) -> int:
    width = min(size.per_node, size.total)
    if width > device_per_node:
        told = f"{role}: per_node={size.per_node} workloads need a device each, and device_per_node={device_per_node}"
        raise PlacementError(f"{told}; ask for fewer per node, or for more devices")
    return width


def check_capacity(layout: Layout, capacities: Sequence[int], kind: str) -> None:
    """Check that a cluster's nodes can hold a layout."""
    free = sorted(capacities, reverse=True)
    for width in sorted(filter(None, layout.num_devices), reverse=True):
        fitting = [node for node, left in enumerate(free) if left >= width]
        if not fitting:
            asked = " + ".join(map(str, filter(None, layout.num_devices[:8])))
            more = " + ..." if len(layout.num_devices) > 8 else ""
            has = ", ".join(map(str, list(capacities)[:8])) or "none"
            told = f"the job needs {asked}{more} devices (Ray resource {kind}) on its nodes"
            raise PlacementError(f"{told}, and the cluster's nodes have {has}. Ask for fewer, or start Ray with more")
        free[min(fitting, key=free.__getitem__)] -= width


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
        return lay_out(self.roles(), self.groups(), self.node_num, self.device_per_node)

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
        roles = {str(role): RolePolicy(spec.on_failure, spec.max_restarts) for role, spec in self.roles().items()}
        limits = max_job_restarts, self.max_trainer_restarts, self.max_node_faults
        return FailoverPolicy(roles, *limits, backoff_s=self.backoff)

    @property
    def device_kind(self) -> DeviceKind:
        """Kind of the devices in rlite's words."""
        return "cpu" if self.device_type == "CPU" else "cuda"


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
        counts = enumerate(self.layout.num_devices)
        bundles = {node: [{kind: 1.0} for _ in range(count)] for node, count in counts if count}
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
