"""`RLJob.submit`: check the cluster, start the job's master, and wait for the result.

`RLJobBuilder`: a job in a chain of calls. Every mistake is an error at `build`, before a process starts.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import cloudpickle
from omegaconf import DictConfig, OmegaConf

from rlite.control.entry import JobEntry, keep_record, save_entry
from rlite.control.spec import JobClasses, JobPlan, JobSpec, RLRoleType, WorkloadClass, check_capacity
from rlite.control.workers import BaseTrainer, BaseWorkload
from rlite.errors import CallTimeout, ConfigError, JobNotFound, RliteError, did_you_mean
from rlite.imports import require
from rlite.runtime.cluster.launcher import interface_of
from rlite.runtime.owner import Owner
from rlite.runtime.storage.texts import check_name
from rlite.services.recovery.record import JobRecord, LogEntry, forget_old, load_record, save_record

WAIT_S = 5.0
"""seconds to wait for one status query"""


@dataclass(frozen=True)
class JobResult:
    """End of a job."""

    succeeded: bool
    """the trainer's `fit` returned"""
    restarts: int
    """number of repeated runs of `init` and `fit`"""
    events: tuple[LogEntry, ...]
    """events and decisions"""
    error: str = ""
    """why the job did not succeed"""
    is_stopped: bool = False
    """it was ended on request"""

    def __str__(self) -> str:
        end = "succeeded" if self.succeeded else f"{'was stopped' if self.is_stopped else 'failed'}: {self.error}"
        lines = "".join(f"\n{entry}" for entry in self.events)
        return f"job {end}; restarts of the trainer: {self.restarts}{lines}"


class JobHandle:
    """A submitted job.

    Args:
        name: its name.
        submission: its submission; "" for the job that has the name now.
        store: `store` of its spec.
    """

    def __init__(self, name: str, submission: str = "", store: str = "ray") -> None:
        self.name, self._submission, self._store = name, submission, store
        self._fleet = _ray("fleet")
        self._processes = self._fleet.Fleet(name)
        self._ask: Callable[..., Any] = self._fleet.Service(name).ask

    def record(self) -> JobRecord:
        """Return the job's state and log, which a store may keep after the end."""
        return self._record("record")

    def _record(self, method: str, *args: Any) -> JobRecord:
        try:
            record: JobRecord = self._ask(method, *args)
        except JobNotFound as error:
            found = load_record(self._fleet.make_store(self._store), self.name)
            if found is None:
                raise JobNotFound(f"no job {self.name!r}: {error}, and its store has no record of it") from error
            if method == "wait" and not found.state.has_ended:
                raise  # it has lost its master
            record = found
        if self._submission not in ("", record.submission):
            raise RliteError(f"job {self.name!r}: a later submission has its name, and its own end is not recorded")
        return record

    def devices(self) -> dict[str, list[str]]:
        """Return the devices of the workloads, by role."""
        return self._ask("placement")

    def orphans(self) -> list[str]:
        """Return the names of the job's processes that have no master."""
        names = self._processes.names()
        return [] if "master" in names else names

    def stop(self, why: str = "stopped on request", is_now: bool = False) -> None:
        """End the job. `result` waits for the end. If the job has no master any more, end the processes that it left.

        Args:
            why: the reason, for the log.
            is_now: do not let a program save before; so does a second call.

        Raises:
            JobNotFound: the job has no process.
        """
        try:
            self._ask("stop", why, is_now)
        except JobNotFound:
            if not self.orphans():
                raise
            self._processes.end()
            store = self._fleet.make_store(self._store)
            record = load_record(store, self.name) or JobRecord(self._submission)
            state = replace(record.state, stage="STOPPED", error=f"{why}; its master was gone")
            save_record(store, self.name, replace(record, state=state))

    def result(self, timeout: float | None = None) -> JobResult:
        """Wait for the job's end, and end its master.

        Args:
            timeout: seconds; None waits as long as the job runs.

        Returns:
            The result.

        Raises:
            CallTimeout: the job still runs.
        """
        left = math.inf if timeout is None else timeout
        deadline = time.monotonic() + left
        while not (record := self._record("wait", min(WAIT_S, left))).state.has_ended:
            if left == 0.0:
                raise CallTimeout(f"job {self.name!r} still runs after {timeout:g} s; stop() ends it")
            left = max(deadline - time.monotonic(), 0.0)
        self._processes.kill(lambda name: name == "master")  # first, so that it starts nothing more
        self._processes.end()
        self._fleet.drop_plan(self.name, record.submission)
        keep_record(self.name, record)
        stage, state = record.state.stage, record.state
        return JobResult(stage == "FINISHED", state.restarts, record.log, state.error, stage == "STOPPED")


class RLJob:
    """A job that was checked. `RLJobBuilder` makes it, and `job_of` from a spec."""

    def __init__(self, spec: JobSpec, classes: JobClasses) -> None:
        self.spec, self.classes, self.layout = spec, classes, spec.layout()

    def submit(
        self, job_name: str = "rlite-job", blocking: bool = True, job_max_restart: int = 10, address: str | None = None
    ) -> JobResult | JobHandle:
        """Run the job on a Ray cluster: the connected one, the one at `address`, or one that is started for it.

        Args:
            job_name: name of the job, unique among the running jobs of the cluster.
            blocking: wait for the result. If the wait is interrupted, the job ends.
            job_max_restart: restarts of the job, after which a failure ends it.
            address: address of a running cluster; default: RAY_ADDRESS, or a cluster that `ray start` left here.

        Returns:
            The result, or a handle if not `blocking`.

        Raises:
            ConfigError: the name is taken or not valid, or Ray is not installed.
            KeyboardInterrupt: the wait was interrupted; its argument says how the job ended.
        """
        check_name(job_name)
        if not isinstance(job_max_restart, int) or isinstance(job_max_restart, bool) or job_max_restart < 0:
            raise ConfigError(f"job_max_restart={job_max_restart!r}: expected a number of restarts, 0 or more")
        connect(self.spec, address)
        fleet = _ray("fleet")
        check_capacity(self.layout, fleet.capacities(self.spec.device_kind), self.spec.device_type)
        processes = fleet.Fleet(job_name)
        if processes.names():
            raise ConfigError(f"job_name={job_name!r}: {fleet.TAKEN}")
        load_record(fleet.make_store(self.spec.store), job_name)  # refused here if it cannot be read
        forget_old(fleet.RayStore())
        plan = self.plan(job_name, job_max_restart)
        fleet.keep_plan(job_name, plan.submission, plan)
        try:
            processes.serve(partial(make_master, job_name, plan.submission))
        except ConfigError:
            fleet.drop_plan(job_name, plan.submission)
            raise
        handle = JobHandle(job_name, plan.submission, self.spec.store)
        save_entry(self._entry(plan))
        handle.record()  # an error if the master cannot be made, as with another rlite on the cluster
        if not blocking:
            return handle
        try:
            return handle.result()
        except KeyboardInterrupt as error:
            error.args = (self._end(handle),)
            raise
        except BaseException:
            self._abandon(handle)
            raise

    def plan(self, job_name: str, job_max_restart: int) -> JobPlan:
        """Return what the master of a new submission needs."""
        policy = self.spec.policy(job_max_restart)
        return JobPlan(job_name, uuid.uuid4().hex, self.spec, self.classes, self.layout, policy, os.getcwd())

    def _entry(self, plan: JobPlan) -> JobEntry:
        address = _ray("fleet").cluster_address()
        trainer = self.spec.config.get("trainer") if self.spec.is_program else None
        folder = trainer.get("save_dir") if isinstance(trainer, dict) else None
        run_folder = os.path.realpath(folder) if isinstance(folder, str) else ""
        owner = Owner.of_this_process() if _ray("connection").is_started_here(address) else None
        return JobEntry(plan.name, plan.submission, address, self.spec.store, run_folder, owner)

    def _end(self, handle: JobHandle) -> str:
        """Let a job whose submitter was interrupted save and end. A second interruption ends it at once.

        Returns how it ended, in words.
        """
        if self.spec.is_program:
            print("\nThe job saves and ends; a second signal ends it at once.", file=sys.stderr, flush=True)
        try:
            handle.stop("its submitter was interrupted")
            result = handle.result()
        except KeyboardInterrupt:
            self._abandon(handle)
            return f"Job {handle.name} was ended at once."
        except RliteError as error:  # the cluster is gone, or does not answer
            return str(error)
        said = next((entry.detail for entry in reversed(result.events) if entry.detail), result.error)
        return f"Job {handle.name}: {said.splitlines()[-1]}"

    def _abandon(self, handle: JobHandle) -> None:
        """End a job whose submitter no longer waits."""
        with suppress(RliteError):  # the cluster is gone, or does not answer; the first error counts
            handle.stop("its submitter was interrupted", is_now=True)
            handle.result(timeout=60.0)


def make_master(job: str, submission: str) -> Any:
    """Return the master of a job, in its own process."""
    return importlib.import_module("rlite.control.master").Master(job, submission)


def job_of(spec: JobSpec) -> RLJob:
    """Return the job of a spec, with the classes that it names."""
    if spec.is_program:
        check_program(spec.trainer)
        return RLJob(spec, JobClasses(b"", {}))
    workloads = {role: workload_class(role, each.workload) for role, each in spec.roles().items()}
    return RLJob(spec, JobClasses(cloudpickle.dumps(trainer_class(spec.trainer)), workloads))


def workload_class(role: RLRoleType, given: Any) -> WorkloadClass:
    """Return the class of a role's workloads."""
    found, options = _subclass(role.lower(), given, BaseWorkload)
    return WorkloadClass(label_of(found), cloudpickle.dumps(found), interface_of(found), options)


def label_of(cls: type) -> str:
    """Return the name of a class: module:Class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def trainer_class(given: Any) -> type[BaseTrainer]:
    """Return the class of a trainer."""
    found, _ = _subclass("trainer", given, BaseTrainer)
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"trainer: {found.__name__} does not define {', '.join(missing)}")
    return found


def check_program(module: str) -> None:
    """Check that a trainer's module exists. It is not imported."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"trainer: {module!r} cannot be found: {error}") from error
    if found is None:
        expected = "expected a module such as rlite.trainer.ppo, or module:Class"
        raise ConfigError(f"trainer: no module {module!r}; {expected}")


def _subclass(where: str, given: Any, base: type) -> tuple[Any, dict[str, Any]]:
    """Return a class that extends a base, and its options of `@ray.remote`."""
    found, options = _imported(where, given), {}
    if hasattr(found, "__ray_metadata__"):
        found, options = _ray("host").plain_class(found)
    if not isinstance(found, type) or not issubclass(found, base):
        name = getattr(found, "__name__", repr(found))
        raise ConfigError(f"{where}: {name} is not a class that extends rlite.control.{base.__name__}")
    return found, options


def _imported(where: str, given: Any) -> Any:
    if not isinstance(given, str):
        return given
    module_name, _, name = given.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{where}: {given!r}: expected module:Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(f"{where}: {given!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{where}: module {module_name!r} has no {name!r}; {did_you_mean(name, vars(module))}")
    return getattr(module, name)


NEEDS_RAY = ("the control plane needs", "ray", "ray")
"""arguments of `require` for Ray"""


def connect(spec: JobSpec | None, address: str | None) -> None:
    """Connect this program to Ray until `rlite.shutdown()`. Without a running cluster, start one as large as the job.

    `spec`: the job; None: there must be a running cluster.
    """
    require(*NEEDS_RAY)
    make = _ray("connection").RayConnection
    if spec is None:
        made = make("cpu", None, address, may_start=False)
    else:
        made = make(spec.device_kind, spec.node_num * spec.device_per_node, address)
    importlib.import_module("rlite.runtime.cluster.session").at_shutdown(made.close)


def _ray(module: str) -> Any:
    """Return a module that needs Ray, which is optional and heavy."""
    return importlib.import_module(f"rlite.runtime.cluster.ray.{module}")


class RoleBuilder:
    """Options of one role. `end()` returns to the job."""

    def __init__(self, job: RLJobBuilder, workload: Any) -> None:
        self._job, self._workload = job, workload
        self._values: dict[str, Any] = {}

    def total(self, total: int) -> RoleBuilder:
        """Set the number of workloads."""
        return self._with(total=total)

    def per_node(self, per_node: int) -> RoleBuilder:
        """Set the number of workloads on one node."""
        return self._with(per_node=per_node)

    def env(self, env: Mapping[str, Any]) -> RoleBuilder:
        """Set environment variables of the workloads."""
        return self._with(env=dict(env))

    def resource(self, resource: Mapping[str, float] | None = None, **more: float) -> RoleBuilder:
        """Set the Ray resources of one workload: `resource(GPU=0.5)` or `resource({"GPU": 0.5})`."""
        return self._with(resource={name: float(amount) for name, amount in {**(resource or {}), **more}.items()})

    def on_failure(
        self, level: Literal["ignore", "workload", "role", "job"], max_restarts: int | None = None
    ) -> RoleBuilder:
        """Set the failure scope and restart limit."""
        limit = {} if max_restarts is None else {"max_restarts": max_restarts}
        return self._with(on_failure=level, **limit)

    def end(self) -> RLJobBuilder:
        """Return to the job."""
        return self._job

    def _with(self, **values: Any) -> RoleBuilder:
        self._values.update(values)
        return self


class RLJobBuilder:
    """A job, built step by step. An actor and a trainer are mandatory."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._trainer: Any = None
        self._roles: dict[RLRoleType, RoleBuilder] = {}
        self._collocations: list[list[str]] = []

    def node_num(self, num: int) -> RLJobBuilder:
        """Set the number of nodes."""
        return self.options(node_num=num)

    def device_per_node(self, num: int) -> RLJobBuilder:
        """Set the number of devices on each node."""
        return self.options(device_per_node=num)

    def device_type(self, kind: str) -> RLJobBuilder:
        """Set the kind of the devices: "CPU" or "GPU"."""
        return self.options(device_type=str(kind).upper())

    def config(self, config: Mapping[str, Any] | DictConfig) -> RLJobBuilder:
        """Set the configuration of the trainer and the workloads.

        Raises:
            ConfigError: it is not a mapping.
        """
        if isinstance(config, DictConfig):
            config = OmegaConf.to_container(config)  # type: ignore[assignment]
        if not isinstance(config, Mapping):
            raise ConfigError(f"config: expected a mapping, found a {type(config).__name__}")
        return self.options(config=dict(config))

    def global_env(self, env: Mapping[str, Any]) -> RLJobBuilder:
        """Set environment variables of the trainer and all workloads."""
        return self.options(global_env=dict(env))

    def options(self, **options: Any) -> RLJobBuilder:
        """Set further options of `JobSpec`, such as `start_timeout`."""
        self._values.update(options)
        return self

    def trainer(self, trainer: Any, class_name: str | None = None) -> RLJobBuilder:
        """Set the trainer: a class, or a module and the name of a class."""
        self._trainer = _given(trainer, class_name)
        return self

    def actor(self, workload: Any, class_name: str | None = None) -> RoleBuilder:
        """Add the actor: a class (plain or @ray.remote), or a module and the name of a class."""
        return self._role(RLRoleType.ACTOR, workload, class_name)

    def rollout(self, workload: Any, class_name: str | None = None) -> RoleBuilder:
        """Add the rollout role."""
        return self._role(RLRoleType.ROLLOUT, workload, class_name)

    def reward(self, workload: Any, class_name: str | None = None) -> RoleBuilder:
        """Add the reward role."""
        return self._role(RLRoleType.REWARD, workload, class_name)

    def reference(self, workload: Any, class_name: str | None = None) -> RoleBuilder:
        """Add the reference role."""
        return self._role(RLRoleType.REFERENCE, workload, class_name)

    def critic(self, workload: Any, class_name: str | None = None) -> RoleBuilder:
        """Add the critic."""
        return self._role(RLRoleType.CRITIC, workload, class_name)

    def with_collocation(self, *roles: str | RLRoleType) -> RLJobBuilder:
        """Let roles share devices."""
        self._collocations.append([RLRoleType.of(role).lower() for role in roles])
        return self

    def with_collocation_all(self) -> RLJobBuilder:
        """Let all roles share devices."""
        self._collocations = [[role.lower() for role in RLRoleType if role in self._roles]]
        return self

    def build(self) -> RLJob:
        """Return the job.

        Raises:
            ConfigError: something is missing or wrong.
        """
        if self._trainer is None:
            raise ConfigError("a job needs a trainer: .trainer(MyTrainer)")
        if RLRoleType.ACTOR not in self._roles:
            raise ConfigError("a job needs an actor: .actor(MyActor).total(N).per_node(N).end()")
        workloads = {role: workload_class(role, own._workload) for role, own in self._roles.items()}
        trainer = trainer_class(self._trainer)
        roles = {role.lower(): {"workload": workloads[role].label, **own._values} for role, own in self._roles.items()}
        values = {**self._values, **roles, "trainer": label_of(trainer), "collocations": self._collocations}
        return RLJob(JobSpec(**values), JobClasses(cloudpickle.dumps(trainer), workloads))

    def _role(self, role: RLRoleType, workload: Any, class_name: str | None) -> RoleBuilder:
        if role in self._roles:
            raise ConfigError(f"{role} is already in the job")
        self._roles[role] = RoleBuilder(self, _given(workload, class_name))
        return self._roles[role]


def _given(given: Any, class_name: str | None) -> Any:
    return given if class_name is None else f"{given}:{class_name}"
