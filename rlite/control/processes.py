"""Processes of a job as its master holds them: workloads by role, the trainer, and an agent on each node."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rlite.control.entry import run_in_job
from rlite.control.health import NodeAgent
from rlite.control.role_group import Rendezvous
from rlite.control.spec import TRAINER, JobPlan, RLRoleType, actor_name, trainer_life
from rlite.control.workers import ProgramProcess, RoleActors, TrainerOutcome, TrainerProcess, make_workload
from rlite.runtime.cluster.group import WorkerGroup, worker_name
from rlite.runtime.cluster.host import CallPosition, Outcome, WorkerContext, WorkerFactory, WorkerHost
from rlite.runtime.cluster.placement import Device
from rlite.runtime.cluster.ray import fleet
from rlite.runtime.cluster.ray.host import HostActor, RayHandle, handle_of, hosting
from rlite.services.recovery.failover import WorkloadId

GPU_SHARE = 0.02
"""share of a device's Ray resource for each workload, so that several workloads share the device"""
LOOK_S = 5.0
"""seconds that a process may take to report its position"""
END_S = 15.0
"""seconds that processes may take to end"""
TRAINER_KEY = (TRAINER, 0)
T = TypeVar("T")
Lives = Mapping[RLRoleType, Sequence[WorkloadId]]


@dataclass(frozen=True)
class ProcessView:
    """A process, as the master watches it."""

    node: str
    """id of the node, if it is known"""
    death: Future[Any]
    """raises WorkerDied when the process is gone"""
    look: Future[CallPosition]
    """position, as soon as the process runs"""


OnStart = Callable[[WorkloadId, ProcessView], None]


class JobProcesses:
    """All processes of a job. Threads of several actions may use it at the same time."""

    def __init__(self, plan: JobPlan, own: fleet.Fleet) -> None:
        self._plan, self._fleet = plan, own
        self._reserved: dict[int, fleet.Reserved] = {}
        self._groups: dict[RLRoleType, WorkerGroup] = {}
        self._rendezvous = Rendezvous(plan.spec.start_timeout)
        self._trainer: RayHandle | None = None
        self._agents: dict[str, RayHandle] = {}
        self._lock = threading.Lock()
        classes = plan.classes.workloads
        self._actor_classes = {role: hosting(each.interface, each.actor_options) for role, each in classes.items()}

    # Devices

    def reserve(self, avoid: Sequence[str]) -> None:
        """Hold the job's devices, on nodes that are not excluded."""
        name = f"devices-{len(avoid)}"
        with self._lock:
            self._fleet.release(lambda full: not full.startswith(f"{name}/"))
            self._reserved = self._fleet.reserve(name, self._plan.bundles(), avoid, self._plan.spec.start_timeout)

    def has_lost_node(self) -> bool:
        """Return True if a node that held devices of the job has died."""
        return not {reserved.node for reserved in self._reserved.values()} <= fleet.living_nodes()

    def has_spare(self, excluded: Collection[str]) -> bool:
        """Return True if the cluster has enough nodes for the job without the excluded ones."""
        return len(fleet.living_nodes()) - len(excluded) >= len(self._plan.bundles())

    def devices(self) -> dict[str, list[str]]:
        """Return the devices of the workloads, by role."""
        return {str(role): [str(device) for device in group.devices] for role, group in self._groups.items()}

    # Workloads

    def create(self, lives: Lives, on_start: OnStart) -> None:
        """Make all workloads of some roles. The processes of all roles start together."""
        groups = {role: self._group(role, [self._start(role, life) for life in each]) for role, each in lives.items()}
        for role, group in groups.items():
            self._groups[role] = group
            for life in lives[role]:
                on_start(life, self._view(role, life.rank))
        for role, group in groups.items():
            self._rendezvous.make(role, group)
            self._furnish(role, group, range(len(group)))

    def restart_role(self, role: RLRoleType, lives: Lives, on_start: OnStart) -> None:
        """End all workloads of a role, and make them with a new rendezvous."""
        self._end(lambda name: f"/{role}-" in name, [self._groups[role]] if role in self._groups else [])
        self.create({role: lives[role]}, on_start)
        self.renew_trainer(role)

    def restart_workload(self, life: WorkloadId, on_start: OnStart) -> None:
        """Restart one workload beside its peers."""
        role = RLRoleType(life.role)
        suffix = f"/{role}-{life.rank}"
        self._fleet.kill(lambda name: name.endswith(suffix) and name != actor_name(life))
        old = self._groups[role]
        wait([old.handles[life.rank].death], END_S)
        handles = list(old.handles)
        handles[life.rank] = self._start(role, life)
        self._groups[role] = self._group(role, handles)
        on_start(life, self._view(role, life.rank))
        self._rendezvous.keep(role, self._groups[role], life.rank)
        self._furnish(role, self._groups[role], [life.rank])
        self.renew_trainer(role)

    def end_other_attempts(self, attempt: int) -> None:
        """End the trainer and all workloads that do not belong to an attempt."""
        own = f"{attempt}."
        groups = list(self._groups.values())
        self._end(lambda name: "/" in name and (TRAINER in name or not name.startswith(own)), groups)

    def end(self) -> None:
        """End every process of the job except the master, return the devices, and start no further process."""
        self._fleet.close()
        self._end(lambda name: name != "master", list(self._groups.values()))
        self._fleet.release(lambda _: True)

    def stack(self, life: WorkloadId) -> str:
        """Return the stack of a workload's call under way, as readable text."""
        handle: Any = self._groups[RLRoleType(life.role)].handles[life.rank]
        (at,) = _answers([handle.look(with_stack=True)])
        return "no stack: the process is stopped, or native code holds Python's lock" if at is None else at.stack

    def is_idle(self, life: WorkloadId) -> bool:
        """Return True if a workload has no call under way."""
        (at,) = _answers([self._groups[RLRoleType(life.role)].handles[life.rank].look()], 1.0)
        return at is not None and not at.place

    def adopt(self, lives: Lives) -> dict[WorkloadId, ProcessView]:
        """Return the processes that another master started, and use them."""
        for role, each in lives.items():
            handles = [handle_of(self._fleet.find(actor_name(life)), self._name_of(role, life.rank)) for life in each]
            self._groups[role] = self._group(role, handles)
            told = _values([h.aside((str(role), rank), "_rendezvous_address") for rank, h in enumerate(handles)])
            if told:
                self._rendezvous.known[role] = told[0]
        return {life: self._view(role, life.rank) for role, each in lives.items() for life in each}

    # The trainer

    def start_trainer(self, run: int, has_begun: bool) -> None:
        """Start the trainer's process and make the trainer. Another trainer of the job is ended before."""
        self._fleet.kill(lambda name: TRAINER in name)
        if self._trainer is not None:
            wait([self._trainer.death], END_S)
        plan = self._plan
        place = (self._reserved[0], 0) if plan.spec.is_program else None
        num_gpus = float(plan.spec.device_per_node) if place and plan.spec.device_type == "GPU" else 0.0
        actor = self._fleet.start(actor_name(trainer_life(run)), HostActor, place, num_gpus, plan.env())
        self._trainer = RayHandle(actor, TRAINER)
        device = Device("", 0)
        group = WorkerGroup(TRAINER, [device], [self._trainer], plan.spec.start_timeout)
        factory: WorkerFactory
        if plan.spec.is_program:
            factory = partial(ProgramProcess, plan, fleet.cluster_address(), has_begun)
        else:
            report_late = partial(fleet.Service(plan.name).tell, "report_late")
            actors = {role: self._actors(role) for role in self._groups}
            factory = partial(TrainerProcess, plan, actors, handle_of, report_late)
        context = WorkerContext(0, 1, device, "cpu", 0, (0,))
        group.create(self._in_job(TRAINER, factory), [context], plan.spec.start_timeout)
        for role in self._groups:  # its processes may have been replaced before the trainer could be told
            self.renew_trainer(role)

    def adopt_trainer(self, run: int) -> bool:
        """Return True if the trainer's process exists, and use it."""
        actor = self._fleet.find(actor_name(trainer_life(run)))
        self._trainer = None if actor is None else RayHandle(actor, TRAINER)
        return self._trainer is not None

    def run_trainer(self) -> None:
        """Let the trainer run `init` and `fit`; returns at once."""
        assert self._trainer is not None
        self._trainer.submit(WorkerHost.call, TRAINER_KEY, "run", (), {})

    def ask_trainer(self, wait_s: float) -> TrainerOutcome:
        """Return the state of the trainer's run, at its end or after some seconds."""
        assert self._trainer is not None
        return self._trainer.aside(TRAINER_KEY, "outcome", wait_s).result().result(TRAINER)

    def interrupt_trainer(self) -> None:
        """Let the trainer's program save and end."""
        if self._trainer is not None:
            self._trainer.aside(TRAINER_KEY, "interrupt")

    def end_trainer(self, run: int) -> None:
        """End the trainer's process of a run. This does not wait for its end."""
        name = actor_name(trainer_life(run))
        self._fleet.kill(lambda each: each == name)

    def view_of_trainer(self) -> ProcessView:
        """Return the trainer's process."""
        assert self._trainer is not None
        return ProcessView("", self._trainer.death, self._trainer.look())

    def renew_trainer(self, role: RLRoleType) -> None:
        """Let a running trainer call the new processes of a role."""
        if self._trainer is not None and not self._trainer.death.done():
            wait([self._trainer.aside(TRAINER_KEY, "renew", role, self._actors(role))], END_S)

    # Agents

    def look_on(self, node: str, pids: Sequence[int]) -> Future[Outcome]:
        """Return the answer of a node's agent about processes. The agent of this node watches this process, too."""
        master = os.getpid() if node == fleet.own_node() else 0
        return self._agent(node).aside(fleet.SERVICE_KEY, "look", list(pids), master)

    def replace_agent(self, node: str) -> None:
        """End a node's agent that does not answer. The next question starts another."""
        if (agent := self._agents.pop(node, None)) is not None:
            agent.stop(fleet.SERVICE_KEY)

    def kill_on(self, node: str, pids: Sequence[int]) -> None:
        """Let a node's agent kill processes, which Ray cannot end while they are stopped."""
        wait([self._agent(node).aside(fleet.SERVICE_KEY, "kill", list(pids))], LOOK_S)

    def _agent(self, node: str) -> RayHandle:
        if node not in self._agents:
            make = partial(NodeAgent, self._plan.spec.health.stopped_after)
            self._agents[node] = self._fleet.start_on_node(f"agent-{node}", node, make)
        return self._agents[node]

    # Parts

    def _view(self, role: RLRoleType, rank: int) -> ProcessView:
        group = self._groups[role]
        return ProcessView(group.devices[rank].node, group.handles[rank].death, group.handles[rank].look())

    def _start(self, role: RLRoleType, life: WorkloadId) -> RayHandle:
        plan = self._plan
        seat = plan.layout.seats[role][life.rank]
        place = (self._reserved[seat.node], seat.device)
        share = 0.0 if plan.spec.device_kind == "cpu" else GPU_SHARE
        actor = self._fleet.start(actor_name(life), self._actor_classes[role], place, share, plan.env(role))
        return RayHandle(actor, self._name_of(role, life.rank))

    def _name_of(self, role: RLRoleType, rank: int) -> str:
        return worker_name(str(role), rank, self._device(role, rank))

    def _device(self, role: RLRoleType, rank: int) -> Device:
        seat = self._plan.layout.seats[role][rank]
        reserved = self._reserved[seat.node]
        return Device(reserved.node, seat.device, reserved.ip, self._plan.spec.device_kind)

    def _group(self, role: RLRoleType, handles: Sequence[Any]) -> WorkerGroup:
        devices = [self._device(role, rank) for rank in range(len(handles))]
        return WorkerGroup(str(role), devices, handles, self._plan.spec.start_timeout, replica_size=1)

    def _furnish(self, role: RLRoleType, group: WorkerGroup, ranks: Sequence[int]) -> None:
        """Make the workloads in started processes."""
        plan, timeout = self._plan, self._plan.spec.start_timeout
        factory = partial(
            make_workload,
            plan.classes.workloads[role].pickled,
            role,
            plan.spec.config,
            fleet.Service(plan.name).actor,
            plan.layout.local_ranks(role),
            self._rendezvous.known[role],
            plan.spec.collocation_of(role),
        )
        torch_device = "cpu" if plan.spec.device_kind == "cpu" else "cuda:0"
        everyone = tuple(range(len(group)))
        contexts = [
            WorkerContext(rank, len(group), group.devices[rank], torch_device, 0, everyone) for rank in sorted(ranks)
        ]
        group.create(self._in_job(role, factory), contexts, timeout)

    def _in_job(self, role: str, factory: WorkerFactory) -> WorkerFactory:
        return partial(run_in_job, self._plan.name, self._plan.submission, role, factory)

    def _actors(self, role: RLRoleType) -> RoleActors:
        group: Any = self._groups[role]
        return RoleActors(group.name, tuple(handle.actor for handle in group.handles), tuple(group.devices))

    def _end(self, is_chosen: Callable[[str], bool], groups: Sequence[WorkerGroup]) -> None:
        """End actors by name, and wait until the processes of these groups are gone."""
        self._fleet.kill(is_chosen)
        deaths = [handle.death for group in groups for handle in group.handles]
        if self._trainer is not None and is_chosen(f"/{TRAINER}-0"):
            deaths.append(self._trainer.death)
        wait(deaths, END_S)


def _answers(looks: Sequence[Future[T]], timeout: float = LOOK_S) -> list[T | None]:
    wait(looks, timeout)
    return [look.result() if look.done() and look.exception() is None else None for look in looks]


def _values(answers: Sequence[Future[Outcome]]) -> list[Any]:
    """Return the values of the calls that end well in time."""
    return [found.value for found in _answers(answers) if found is not None and found.error is None]
