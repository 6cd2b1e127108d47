"""`RLJob.submit`: check the cluster, start the job's master, and wait for the result."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
import uuid
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlite.control.classes import JobClasses, check_program, trainer_class, workload_class
from rlite.control.entry import JobEntry, keep_record, save_entry
from rlite.control.plan import JobPlan
from rlite.control.spec import JobSpec, check_capacity
from rlite.errors import CallTimeout, ConfigError, JobNotFound, RliteError
from rlite.owner import Owner
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
        self.name = name
        self._submission, self._store = submission, store
        self._fleet = _ray("fleet")

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
        names = self._fleet.Fleet(self.name).names()
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
            self._fleet.Fleet(self.name).end()
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
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            record = self._record("wait", min(WAIT_S, left))
            if record.state.has_ended:
                break
            if left == 0.0:
                raise CallTimeout(f"job {self.name!r} still runs after {timeout:g} s; stop() ends it")
        processes = self._fleet.Fleet(self.name)
        processes.kill(lambda name: name == "master")  # first, so that it starts nothing more
        processes.end()
        self._fleet.drop_plan(self.name, record.submission)
        keep_record(self.name, record)
        state = record.state
        is_stopped = state.stage == "STOPPED"
        return JobResult(state.stage == "FINISHED", state.restarts, record.log, state.error, is_stopped)

    def _ask(self, method: str, *args: Any) -> Any:
        return self._fleet.Service(self.name).ask(method, *args)


class RLJob:
    """A job that was checked. `RLJobBuilder` makes it, and `job_of` from a spec."""

    def __init__(self, spec: JobSpec, classes: JobClasses) -> None:
        self.spec = spec
        self.classes = classes
        self.layout = spec.layout()

    def submit(
        self,
        job_name: str = "rlite-job",
        blocking: bool = True,
        job_max_restart: int = 10,
        address: str | None = None,
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
        kind = self.spec.device_type
        check_capacity(self.layout, fleet.capacities(self.spec.device_kind), kind)
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
        return JobPlan(
            name=job_name,
            submission=uuid.uuid4().hex,
            spec=self.spec,
            classes=self.classes.packed(),
            layout=self.layout,
            policy=self.spec.policy(job_max_restart),
            folder=os.getcwd(),
        )

    def _entry(self, plan: JobPlan) -> JobEntry:
        address = _ray("fleet").cluster_address()
        is_own = _ray("connection").is_started_here(address)
        trainer = self.spec.config.get("trainer") if self.spec.is_program else None
        folder = trainer.get("save_dir") if isinstance(trainer, dict) else None
        return JobEntry(
            name=plan.name,
            submission=plan.submission,
            address=address,
            store=self.spec.store,
            run_folder=os.path.realpath(folder) if isinstance(folder, str) else "",
            owner=Owner.of_this_process() if is_own else None,
        )

    def _end(self, handle: JobHandle) -> str:
        """Let a job whose submitter was interrupted save and end. A second interruption ends it at once.

        Returns:
            How it ended, in words.
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
        try:
            handle.stop("its submitter was interrupted", is_now=True)
            handle.result(timeout=60.0)
        except RliteError:  # the cluster is gone, or does not answer; the first error counts
            return


def make_master(job: str, submission: str) -> Any:
    """Return the master of a job, in its own process."""
    return importlib.import_module("rlite.control.master").Master(job, submission)


def job_of(spec: JobSpec) -> RLJob:
    """Return the job of a spec, with the classes that it names.

    Raises:
        ConfigError: a class cannot be imported, or is not a workload or trainer class.
    """
    if spec.is_program:
        check_program(spec.trainer)
        return RLJob(spec, JobClasses(None, {}))
    workloads = {role: workload_class(role, each.workload) for role, each in spec.roles().items()}
    return RLJob(spec, JobClasses(trainer_class(spec.trainer), workloads))


def check_ray() -> None:
    """Check that Ray is installed.

    Raises:
        ConfigError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("the control plane needs Ray: pip install 'rlite[ray]'")


def connect(spec: JobSpec | None, address: str | None) -> None:
    """Connect this program to Ray until `rlite.shutdown()`. Without a running cluster, start one as large as the job.

    Args:
        spec: the job; None: there must be a running cluster.
        address: address of a running cluster.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers.
    """
    check_ray()
    connection = _ray("connection")
    if spec is None:
        made = connection.RayConnection("cpu", None, address, may_start=False)
    else:
        made = connection.RayConnection(spec.device_kind, spec.node_num * spec.device_per_node, address)
    importlib.import_module("rlite.runtime.cluster.session").at_shutdown(made.close)


def _ray(module: str) -> Any:
    """Return a module that needs Ray, which is optional and heavy."""
    return importlib.import_module(f"rlite.runtime.cluster.ray.{module}")
