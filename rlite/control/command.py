"""The commands `rlite launch`, `status`, `logs` and `stop`."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from rlite.config import Natural, Options, load
from rlite.control.entry import EVENTS, JobEntry, JobOutput, entries
from rlite.control.job import NEEDS_RAY, JobHandle, JobResult, connect, job_of
from rlite.control.spec import TRAINER, JobSpec, RLRoleType
from rlite.errors import ConfigError, RliteError, did_you_mean
from rlite.imports import require
from rlite.key_value import named
from rlite.output import Result
from rlite.runtime.owner import Owner
from rlite.runtime.storage.texts import FileStore
from rlite.services.recovery.failover import JobState
from rlite.services.recovery.record import JobRecord, clock, load_record

JOB_SERVERS = ("http://", "https://")
STOPPED = 143
"""exit status of a job that was stopped, as after SIGTERM"""
FOLLOW_S = 0.5
"""seconds between two looks at the output of a job"""
LOGGED = (EVENTS, TRAINER.lower(), *(role.lower() for role in RLRoleType))
"""roles of `rlite logs`"""
LAST_EVENTS = 5
"""events of a job that `rlite status` shows"""


class LaunchConfig(JobSpec):
    """A job spec, with what `submit` takes."""

    help_arguments: ClassVar[str] = "JOB.yaml"
    help_example: ClassVar[str] = "job.yaml name=my-run"

    name: str = "rlite-job"
    """name of the job"""
    max_restarts: Natural = 10
    """restarts of the job, after which a failure ends it"""
    wait: bool = True
    """wait for the end of the job; needs to be true if no cluster runs"""
    address: str | None = None
    """address of a running Ray cluster, or of its job server: http://HEAD:8265 (`ray job submit`)"""


class JobQuery(Options):
    """A job that was submitted from here, or that a running cluster knows."""

    help_arguments: ClassVar[str] = "[NAME]"
    help_example: ClassVar[str] = "NAME"
    prints_json: ClassVar[bool] = True

    name: str | None = None
    """name of the job, or the folder of its run (trainer.save_dir); status without it shows all jobs"""
    address: str | None = None
    """address of the Ray cluster; default: the cluster that the job was submitted to"""
    store: str = "ray"
    """place of the state of a job that has ended, as in its spec: ray, or a folder"""


class StopQuery(JobQuery):
    """A job to end."""

    help_arguments: ClassVar[str] = "NAME"
    prints_json: ClassVar[bool] = False

    now: bool = False
    """end a program at once, without a checkpoint"""


class LogQuery(JobQuery):
    """A job whose logs are printed."""

    help_arguments: ClassVar[str] = "NAME [--follow]"
    prints_json: ClassVar[bool] = False

    role: str = ""
    """role whose processes' output is printed: trainer, actor, ...; events for the event log; default: all"""
    follow: bool = False
    """go on printing new events and output until the job has ended"""


def launch(arguments: Sequence[str]) -> None:
    """Run the job of a yaml file: `rlite launch job.yaml [key=value ...]`."""
    files = [each for each in arguments if "=" not in each and not each.startswith("-")]
    rest = [each for each in arguments if each not in files]
    sys.path.insert(0, os.getcwd())  # the user's modules
    config = load(LaunchConfig, [*(part for file in files for part in ("--config", file)), *rest])
    job = job_of(config)
    if config.address is not None and config.address.startswith(JOB_SERVERS):
        _submit(config, files, rest)
        return
    connect(None if not config.wait else config, config.address)
    result = job.submit(config.name, config.wait, config.max_restarts, config.address)
    if not isinstance(result, JobResult):
        print(f"job {config.name} is submitted; see it with: rlite status {config.name}")
        return
    print(result)
    if result.is_stopped:
        sys.exit(STOPPED)
    if not result.succeeded:
        raise RliteError(f"job {config.name} failed: {result.error}")


def _submit(config: LaunchConfig, files: Sequence[str], rest: Sequence[str]) -> None:
    """Let the job server of a cluster run this command, on its head node and with a copy of this folder."""
    require(*NEEDS_RAY)
    folder = Path.cwd()
    if outside := [file for file in files if not Path(file).resolve().is_relative_to(folder)]:
        found = f"{', '.join(outside)}: not in {folder}, which is the folder that the cluster receives a copy of"
        raise ConfigError(f"{found}. Start `rlite launch` in the folder of the job")
    inner = [str(Path(file).resolve().relative_to(folder)) for file in files]
    inner += [each for each in rest if not each.startswith(("address=", "wait="))]
    server = importlib.import_module("rlite.runtime.cluster.ray.submission").JobServer(config.address)
    submission = server.submit(shlex.join(["python", "-m", "rlite.cli", "launch", *inner]), folder, config.name)
    if not config.wait:
        print(f"job {config.name} is submitted; follow it with: ray job logs {submission} --follow")
        return
    server.follow(submission)


def status(arguments: Sequence[str]) -> Result:
    """Print stage, roles, devices, restarts and latest events of a job, or of all jobs that are known here."""
    query = load(JobQuery, named(arguments, ["name"]))
    if query.name is not None:
        found = _find(query)
        return Result({"jobs": [_show(found.entry.name, found.record, found.handle)]})
    known = entries() if query.address is None else []
    on_cluster, shown = set(), list[dict[str, Any]]()
    with suppress(*([ConfigError] if known else [])):  # the jobs from here may be all
        connect(None, query.address)
        for name in importlib.import_module("rlite.runtime.cluster.ray.fleet").RayStore().names():
            handle = JobHandle(name)
            try:
                record = handle.record()
            except RliteError as error:  # the others can be shown
                print(f"{name}: {error}")
                shown.append({"name": name, "unreadable": str(error)})
                continue
            on_cluster.add(record.submission)
            shown.append(_show(name, record, handle))
    for entry in known:
        if entry.submission not in on_cluster:
            stage = None if (kept := _kept(entry)) is None else kept.state.stage
            name = entry.run_folder or entry.name
            print(f"{entry.name}: {stage or 'on its cluster'}, submitted at {clock(entry.at)}; rlite status {name}")
            shown.append({"name": entry.name, "stage": stage, "submitted_at": entry.at, "run_folder": entry.run_folder})
    return Result({"jobs": shown})


def _show(name: str, record: JobRecord, handle: JobHandle | None) -> dict[str, Any]:
    """Print the text of `rlite status` for one job.

    Returns the same as values of JSON.
    """
    orphans, state = handle.orphans() if handle else [], record.state
    devices = handle.devices() if handle and not orphans and not state.has_ended else {}
    print(describe(name, record, devices))
    if orphans:
        print(f"  {len(orphans)} processes without a master, which `rlite stop {name}` ends")
    return {
        "name": name,
        "stage": state.stage,
        "trainer_restarts": state.restarts,
        "job_restarts": state.job_restarts,
        "report": None if record.report is None else asdict(record.report),
        "devices": devices,
        "num_orphans": len(orphans),
        "error": state.error,
        "events": [asdict(entry) for entry in record.log[-LAST_EVENTS:]],
    }


def logs(arguments: Sequence[str]) -> None:
    """Print the event log of a job and the output of its processes, by role."""
    flags = ["follow=true" if each == "--follow" else each for each in arguments]
    query = load(LogQuery, named(flags, ["name"]))
    if query.role.lower() not in ("", *LOGGED):
        raise ConfigError(f"role={query.role}: no role of a job; {did_you_mean(query.role, LOGGED)}")
    found = _find(query)
    output = JobOutput(found.entry.name, found.record.submission, query.role)
    if output.show(found.record.log, is_last=not query.follow) == 0 and query.role.lower() != EVENTS:
        print("no output of its processes on this machine: each node has the output of its own")
    if query.follow:
        found.wait(lambda record: output.show(record.log, is_last=record.state.has_ended))


def stop(arguments: Sequence[str]) -> None:
    """End a job and wait for its end. A program saves before."""
    query = load(StopQuery, named(arguments, ["name"]))
    found = _find(query, is_to_end=True)
    name, handle = found.entry.name, found.handle
    if handle is None or (found.record.state.has_ended and not handle.orphans()):
        print(f"job {name} has ended already: {found.record.state.stage}")
        return
    handle.stop(is_now=query.now)
    found.wait()
    if not found.is_held:
        handle.result()  # which ends the master
    print(f"job {name} has ended: {found.record.state.error or found.record.state.stage}")


def describe(name: str, record: JobRecord, devices: dict[str, list[str]]) -> str:
    """Return the text of `rlite status` for one job."""
    state = record.state
    lines = [f"{name}: {state.stage}, {state.restarts} restarts of the trainer, {state.job_restarts} of the job"]
    if record.report is not None:
        lines.append(f"  {record.report}")
    for role, held in devices.items():
        known = state.roles.get(role)
        lost = f", lost: {', '.join(map(str, known.lost))}" if known is not None and known.lost else ""
        lines.append(f"  {role}: {len(held)} workloads, {known.restarts if known else 0} restarts{lost}")
        lines.append(f"    {', '.join(held[:8])}{', ...' if len(held) > 8 else ''}")
    if state.error:
        lines.append(f"  error: {state.error}")
    return "\n".join([*lines, *(f"  {entry}" for entry in record.log[-LAST_EVENTS:])])


@dataclass
class _Found:
    """A job that a command has found."""

    entry: JobEntry
    record: JobRecord
    handle: JobHandle | None = None
    """None: no cluster is needed"""

    @property
    def is_held(self) -> bool:
        """True if another process holds the Ray of the job, and ends it with the job."""
        return self.handle is not None and self.entry.owner not in (None, Owner.of_this_process())

    def wait(self, act: Callable[[JobRecord], object] = lambda record: None) -> None:
        """Wait for the end of the job, and call `act` with its record now and then, and at the end."""
        if self.is_held:
            importlib.import_module("rlite.runtime.cluster.session").shutdown()  # that Ray would end this process, too
        while not self.record.state.has_ended:
            time.sleep(FOLLOW_S)
            if self.handle is None or self.is_held:
                self.record = _kept(self.entry) or _latest(self.entry) or self.record
            else:
                self.record = self.handle.record()
            act(self.record)


def _find(query: JobQuery, is_to_end: bool = False) -> _Found:
    """Return a job by name or run folder: an entry of a submission from here, or a job of the connected cluster."""
    if query.name is None:
        raise ConfigError("expected the name of a job, or the folder of its run")
    known = entries(query.name) if query.address is None else []
    entry = known[0] if known else JobEntry(query.name, "", query.address, query.store)
    if (record := _kept(entry)) is not None and record.state.has_ended:  # an earlier submission may run on
        entry = next((each for each in known if each.owner is not None and each.is_under_way), entry)
        record = _kept(entry)
    if record is not None and (record.state.has_ended or not is_to_end):
        return _Found(entry, record)
    connect(None, entry.address)
    handle = JobHandle(entry.name, entry.submission, entry.store)
    return _Found(entry, handle.record(), handle)


def _kept(entry: JobEntry) -> JobRecord | None:
    """Return the record of a job that needs no cluster: it has ended, or its Ray has, or its store was named."""
    record = _latest(entry)
    if not entry.submission or (record is not None and record.state.has_ended):
        return record
    if entry.owner is None or not entry.owner.is_gone:
        return None
    why = f"process {entry.owner.pid}, which held its Ray, has ended"
    return replace(record or JobRecord(entry.submission), state=JobState(stage="ERROR", error=why))


def _latest(entry: JobEntry) -> JobRecord | None:
    """Return the latest record of a job in its entry and in its store, if the store is a folder."""
    stores = [entry.records] if entry.submission else []
    if entry.store not in ("ray", "memory"):
        stores.append(FileStore(entry.store))
    found = [record for store in stores if (record := load_record(store, entry.name)) is not None]
    own = [record for record in found if entry.submission in ("", record.submission)]
    return max(own, key=lambda record: (record.state.has_ended, len(record.log)), default=None)
