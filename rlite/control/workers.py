"""Workers of a job: workloads and the trainer, with the classes that users extend, and the makers of both.

A trainer that is started by module path is a program of its own, watched by the job's trainer process.

    trainer process (Ray)                    program: python -m rlite.trainer.ppo --config FILE, or under torchrun
      ├─ starts ────────────────────────────>  │
      ├─ looks twice a second: dead, stopped?  │
      └─ reads the step and final errors <──── report_step, once per step

The end of the program, for any cause, is the end of the trainer's run. The master restarts the trainer process,
which starts the program again with the same options. The program then resumes from its newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import yaml
from omegaconf import DictConfig, OmegaConf

from rlite.control.health import Judge, NodeAgent
from rlite.control.role_group import RoleGroup, UnboundGroup, role_groups
from rlite.control.spec import HealthOptions, JobPlan, RLRoleType
from rlite.errors import RliteError
from rlite.runtime.cluster.group import WorkerGroup
from rlite.runtime.cluster.guard import Guard, ranks_of, reap
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.cluster.placement import Device
from rlite.services.recovery import record
from rlite.services.recovery.failover import WorkloadId
from rlite.services.recovery.record import TrainerReport


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


def _read(path: str, meaning: str) -> Any:
    """Return a property that reads an attribute, or an attribute of an attribute."""
    return property(attrgetter(path), doc=meaning)


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
        self._master_handle, self._config = master_handle, config

    master_handle: Any = _read("_master_handle", "Ray actor handle of the job's master.")
    config: DictConfig = _read("_config", "Configuration of the job.")
    name: str = _read("_where.name", 'Unique name of the workload: "ACTOR-0".')
    role: RLRoleType = _read("_where.role", "Role of the workload.")
    rank: int = _read("_where.rank", "Rank among the workloads of the role.")
    world_size: int = _read("_where.world_size", "Number of the role's workloads.")
    word_size: int = _read("_where.world_size", "Same as `world_size`, in DLRover's spelling.")
    local_rank: int = _read("_where.local_rank", "Rank among the role's workloads on this node.")
    local_world_size: int = _read("_where.local_world_size", "Number of the role's workloads on this node.")
    torch_master_addr: str = _read("_where.torch_master_addr", "Address of rank 0, for torch.distributed's rendezvous.")
    torch_master_port: int = _read(
        "_where.torch_master_port",
        "Port at rank 0, for torch.distributed's rendezvous. No other program gets it while the role lives.",
    )

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


def make_workload(
    pickled: bytes,
    role: RLRoleType,
    config: Mapping[str, Any],
    master: Any,
    local_ranks: Sequence[tuple[int, int]],
    rendezvous: tuple[str, int],
    collocation: str | None,
    context: WorkerContext,
) -> BaseWorkload:
    """Return the workload of a rank, in its process. Its place is set before its constructor runs.

    `rendezvous`: address and port of rank 0. `context`: place of the process.
    """
    workload = object.__new__(cloudpickle.loads(pickled))
    own = (role, context.rank, context.world_size, *local_ranks[context.rank], *rendezvous, collocation)
    workload._place = WorkloadPlace(f"{role}-{context.rank}", *own)
    workload.__init__(master, OmegaConf.create(dict(config)))
    return workload


def _handles_of(role: RLRoleType, meaning: str) -> Any:
    """Return a property that reads the actor handles of a role."""
    return property(lambda trainer: trainer.actor_handles.get(role, []), doc=meaning)


class BaseTrainer(ABC):
    """Program that calls the workloads. A subclass defines `init` and `fit`, and only sets attributes in `__init__`.

    `self.RG_ACTOR`, `RG_ROLLOUT`, `RG_REWARD`, `RG_REFERENCE` and `RG_CRITIC` are the groups of the roles that the job
    has. They exist in `init` and `fit`.
    """

    _groups: Mapping[str, RoleGroup] | None = None
    _resources: Mapping[RLRoleType, Mapping[str, float]] = {}

    def __init__(
        self, actor_handles: dict[RLRoleType, list[Any]], actor_classes: dict[RLRoleType, type], config: DictConfig
    ) -> None:
        """Keep the arguments.

        Args:
            actor_handles: Ray actor handles of the workloads, by role, in rank order.
            actor_classes: classes of the workloads, by role.
            config: the job's configuration.
        """
        self._actor_handles, self._actor_classes, self._config = actor_handles, actor_classes, config

    @abstractmethod
    def init(self) -> None:
        """Prepare the training. It runs again after each restart."""

    @abstractmethod
    def fit(self) -> None:
        """Train. It runs again after each restart, so it resumes from its own stored state."""

    def is_recoverable(self) -> bool:
        """Return True if `init` and `fit` may run again beside the same workloads when the trainer's process ended."""
        return False

    config: DictConfig = _read("_config", "Configuration of the job.")
    actor_handles: dict[RLRoleType, list[Any]] = _read(
        "_actor_handles", "Ray actor handles of all workloads, by role, in rank order."
    )
    actor_classes: dict[RLRoleType, type] = _read("_actor_classes", "Classes of the workloads, by role.")
    actors: list[Any] = _handles_of(RLRoleType.ACTOR, "Ray actor handles of the actors.")
    references: list[Any] = _handles_of(RLRoleType.REFERENCE, "Ray actor handles of the reference workloads.")
    rollouts: list[Any] = _handles_of(RLRoleType.ROLLOUT, "Ray actor handles of the rollout workloads.")
    rewards: list[Any] = _handles_of(RLRoleType.REWARD, "Ray actor handles of the reward workloads.")
    critics: list[Any] = _handles_of(RLRoleType.CRITIC, "Ray actor handles of the critics.")

    def get_role_groups(self) -> list[str]:
        """Return the names of the job's role groups."""
        return [role.group for role in RLRoleType if role in self._actor_handles]

    def get_workload_resource(self, role: RLRoleType | str) -> dict[str, float]:
        """Return the Ray resources of one workload of a role, as a copy. A role that the job lacks has none."""
        return dict(self._resources.get(RLRoleType.of(role), {}))

    def __getattr__(self, name: str) -> RoleGroup:
        if not name.startswith("RG_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self._groups is None:
            why = "does not exist in __init__, which only sets attributes; use it in init() or fit()"
            raise UnboundGroup(f"{name} {why}")
        if name not in self._groups:
            raise UnboundGroup(f"{name}: the job has no such role; it has {', '.join(self._groups)}")
        return self._groups[name]


Progress = Literal["new", "running", "finished", "raised"]


@dataclass(frozen=True)
class RoleActors:
    """Processes of a role's workloads."""

    name: str
    """name of their worker group"""
    actors: tuple[Any, ...]
    """Ray actor handles, in rank order"""
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class TrainerOutcome:
    """State of a trainer's run."""

    progress: Progress
    is_recoverable: bool = False
    error: str = ""
    """type and message of the exception"""
    trace: str = ""
    report: TrainerReport | None = None
    """latest report of a program"""
    is_final: bool = False
    """every restart would repeat the error"""


class TrainerRun(ABC):
    """Worker of a trainer's process. `run` is called in order, the other methods beside it."""

    def __init__(self) -> None:
        self._progress: Progress = "new"
        self._error = self._trace = ""
        self._report: TrainerReport | None = None
        self._lock, self._ended = threading.Lock(), threading.Event()

    @abstractmethod
    def _run(self) -> str:
        """Run to the end. Return why the trainer failed, or ""."""

    def _is_recoverable(self) -> bool:
        """Return True if a new process may run the trainer again beside the same workloads."""
        return True

    def outcome(self, wait_s: float) -> TrainerOutcome:
        """Return the state of the run, at its end or after `wait_s` seconds."""
        self._ended.wait(wait_s)
        report, recoverable = self._report, self._is_recoverable()
        is_final = self._progress == "raised" and report is not None and bool(report.final_error)
        return TrainerOutcome(self._progress, recoverable, self._error, self._trace, report, is_final)

    def run(self) -> None:
        """Run to the end, once."""
        with self._lock:
            if self._progress != "new":
                return
            self._progress = "running"
        try:
            self._error = self._run()
        except BaseException as error:  # the boundary: the master decides what follows
            self._error, self._trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        self._progress = "raised" if self._error else "finished"
        self._ended.set()


class TrainerProcess(TrainerRun):
    """Worker of the process of a user's trainer."""

    def __init__(
        self,
        plan: JobPlan,
        roles: Mapping[RLRoleType, RoleActors],
        make_handle: Callable[[Any, str], Any],
        report_late: Callable[[str, list[int], str, float], None],
        context: WorkerContext,
    ) -> None:
        super().__init__()
        self._make_handle, self._call_timeout = make_handle, plan.spec.call_timeout
        cls: type[BaseTrainer] = cloudpickle.loads(plan.classes.trainer)
        classes = {role: cloudpickle.loads(each.pickled) for role, each in plan.classes.workloads.items()}
        self._groups = {
            role: RoleGroup(role, classes[role], self._group(own), report_late) for role, own in roles.items()
        }
        handles = {role: list(own.actors) for role, own in roles.items()}
        config = OmegaConf.create(dict(plan.spec.config))
        self._trainer = cls.__new__(cls)
        self._trainer._resources = {role: plan.spec.resource_of(role) for role in plan.spec.roles()}
        self._trainer.__init__(handles, classes, config)  # type: ignore[misc]
        self._trainer._groups = role_groups(self._groups.values())
        if not hasattr(self._trainer, "_actor_handles"):
            call = "super().__init__(actor_handles, actor_classes, config)"
            raise RliteError(f"{cls.__name__}.__init__ has to call {call}")

    def _run(self) -> str:
        self._trainer.init()
        self._trainer.fit()
        return ""

    def _is_recoverable(self) -> bool:
        return self._trainer.is_recoverable()

    def renew(self, role: RLRoleType, actors: RoleActors) -> None:
        """Use new processes of a role."""
        self._groups[role]._renew(self._group(actors))
        self._trainer.actor_handles[role][:] = actors.actors

    def _group(self, role: RoleActors) -> WorkerGroup:
        names = [f"{role.name} rank {rank}" for rank in range(len(role.actors))]
        handles: Sequence[Any] = list(map(self._make_handle, role.actors, names))
        return WorkerGroup(role.name, role.devices, handles, self._call_timeout, replica_size=1)


SUBMISSION = "RLITE_SUBMISSION"
"""environment variable with the id of the job's submission, in every process of the program"""
LOOK_S = 0.5
TAIL_LINES = 40
"""last lines of the program's output in the event log"""
NODE = "here"


class ProgramProcess(TrainerRun):
    """Worker of the trainer's process of a program: `python -m MODULE --config FILE`."""

    def __init__(self, plan: JobPlan, ray_address: str, has_begun: bool, context: WorkerContext) -> None:
        super().__init__()
        self._plan, self._ray_address, self._has_begun = plan, ray_address, has_begun
        self._is_interrupted = False
        self._process: subprocess.Popen[str] | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def _run(self) -> str:
        reap(self._plan.submission, SUBMISSION)  # what an earlier start left on this machine
        guard = Guard()
        try:
            with tempfile.TemporaryDirectory(prefix="rlite-program-") as folder:
                error = self._run_in(Path(folder), guard)
        finally:
            guard.end()
            guard.close()
        self._trace = "\n".join(self._tail) if error else ""
        return error

    def interrupt(self) -> None:
        """Let the program save and end, as after SIGTERM without a control plane."""
        was_asked, self._is_interrupted = self._is_interrupted, True
        if self._process is not None and not was_asked:  # a second signal would end it at once
            self._process.terminate()

    def _run_in(self, folder: Path, guard: Guard) -> str:
        """Run the program.

        Returns why the program failed; "" if it did not.
        """
        options, report_file = folder / "config.yaml", folder / "report.json"
        options.write_text(yaml.safe_dump(dict(self._plan.spec.config), sort_keys=False))
        process = self._process = subprocess.Popen(
            self._command(options),
            env=self._environment(report_file, guard),
            cwd=self._plan.folder if os.path.isdir(self._plan.folder) else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if self._is_interrupted:
            process.terminate()
        reader = threading.Thread(target=self._pass_on, args=(process,), name="rlite-program-output", daemon=True)
        reader.start()
        watch = ProgramWatch(self._plan.spec.health, process.pid)
        error = ""
        while process.poll() is None and not error:
            self._report = record.read(report_file) or self._report
            error = watch.look(self._report)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.0 if error else LOOK_S)
        guard.end()  # all that the program left, and a stopped or hung program itself
        process.wait()
        reader.join(LOOK_S)
        self._report = record.read(report_file) or self._report
        final_error = "" if self._report is None else self._report.final_error
        return final_error or error or _end_of(self._plan.spec.trainer, process.returncode)

    def _command(self, file: Path) -> list[str]:
        """Return the command of the program, whose options are in a file."""
        spec, torchrun = self._plan.spec, list[str]()
        if spec.num_processes > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={spec.num_processes}"]
        return [sys.executable, *torchrun, "-m", spec.trainer, "--config", str(file)]

    def _environment(self, report_file: Path, guard: Guard) -> dict[str, str]:
        plan, spec = self._plan, self._plan.spec
        paths = [path for path in (plan.folder, os.environ.get("PYTHONPATH")) if path]
        is_left = "OMP_NUM_THREADS" in plan.env() or spec.device_type == "GPU"
        threads = {} if is_left else {"OMP_NUM_THREADS": str(spec.device_per_node // spec.num_processes)}
        return {
            **os.environ,
            **threads,
            **guard.mark,
            **record.environment(report_file, self._has_begun),
            SUBMISSION: plan.submission,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "RAY_ADDRESS": self._ray_address,
        }

    def _pass_on(self, process: subprocess.Popen[str]) -> None:
        """Print the program's output, which Ray shows to the submitter, and keep the end of it."""
        assert process.stdout is not None
        for line in process.stdout:
            self._tail.append(line.rstrip())
            print(line, end="", flush=True)


class ProgramWatch:
    """Health of a program: its first process and the ranks that torchrun started."""

    def __init__(self, health: HealthOptions, pid: int) -> None:
        self._judge = Judge(health)
        self._late_after_s = health.late_step
        self._agent = NodeAgent()
        self._pid = pid
        self._first = WorkloadId("program", 0)
        self._looked_at = self._advanced_at = time.monotonic()
        self._is_late = False
        self._report: record.TrainerReport | None = None

    def look(self, report: record.TrainerReport | None) -> str:
        """Return the reason why the program counts as failed, or ""."""
        now = time.monotonic()
        seconds, self._looked_at = min(now - self._looked_at, 2 * LOOK_S), now
        if report != self._report:
            self._report, self._advanced_at = report, now
        for pid in {self._pid, *ranks_of(self._pid)} - set(self._judge.pids().get(NODE, ())):
            life = self._first if pid == self._pid else WorkloadId("rank", pid)
            self._judge.watch(life, NODE, pid)
        is_late = now - self._advanced_at > self._late_after_s
        if is_late != self._is_late:
            self._is_late = is_late
            self._judge.note_late(self._first, f"a step (limit {self._late_after_s:g} s)" if is_late else "")
        findings = self._judge.observe(NODE, self._agent.look(self._judge.pids().get(NODE, [])), seconds)
        return "; ".join(f"{finding.condition}: {finding.detail}" for finding in findings)


def _end_of(module: str, status: int) -> str:
    """Return how a program failed, in words; "" if it did not."""
    if status < 0:
        return f"{module} was killed by {signal.Signals(-status).name}"
    if status in (130, 143):
        return f"{module} was ended by {signal.Signals(status - 128).name}"
    return f"{module} ended with status {status}" if status else ""
