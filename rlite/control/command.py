"""The commands `rlite launch`, `status`, `logs` and `stop`."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from rlite.arguments import named
from rlite.config import Natural, Options, load
from rlite.control.job import JobHandle, JobResult, check_ray, connect, job_of
from rlite.control.spec import JobSpec
from rlite.errors import ConfigError, RliteError
from rlite.recovery.record import JobRecord, load_record

JOB_SERVERS = ("http://", "https://")
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
    """A job on a running cluster."""

    help_arguments: ClassVar[str] = "[NAME]"
    help_example: ClassVar[str] = "NAME"

    name: str | None = None
    """name of the job; status without it shows all jobs"""
    address: str | None = None
    """address of the Ray cluster"""


class NamedJobQuery(JobQuery):
    """One job on a running cluster."""

    help_arguments: ClassVar[str] = "NAME"


def launch(arguments: Sequence[str]) -> None:
    """Run the job of a yaml file: `rlite launch job.yaml [key=value ...]`.

    Raises:
        RliteError: the job did not succeed.
    """
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
    if not result.succeeded:
        raise RliteError(f"job {config.name} failed: {result.error}")


def _submit(config: LaunchConfig, files: Sequence[str], rest: Sequence[str]) -> None:
    """Let the job server of a cluster run this command, on its head node and with a copy of this folder.

    Raises:
        ConfigError: Ray is not installed, or a file is not in this folder.
    """
    check_ray()
    folder = Path.cwd()
    if outside := [file for file in files if not Path(file).resolve().is_relative_to(folder)]:
        raise ConfigError(
            f"{', '.join(outside)}: not in {folder}, which is the folder that the cluster receives a copy of. "
            "Start `rlite launch` in the folder of the job"
        )
    inner = [str(Path(file).resolve().relative_to(folder)) for file in files]
    inner += [each for each in rest if not each.startswith(("address=", "wait="))]
    server = importlib.import_module("rlite.cluster.ray.submission").JobServer(config.address)
    submission = server.submit(shlex.join(["python", "-m", "rlite.cli", "launch", *inner]), folder, {}, config.name)
    if not config.wait:
        print(f"job {config.name} is submitted; follow it with: ray job logs {submission} --follow")
        return
    server.follow(submission)


def status(arguments: Sequence[str]) -> None:
    """Print stage, roles, devices, restarts and latest events of a job, or of all jobs that the cluster knows."""
    name = _query(arguments, needs_name=False)
    for each in [name] if name else _store().names():
        print(describe(each, _record(each), _devices(each)))


def logs(arguments: Sequence[str]) -> None:
    """Print the event log of a job."""
    name = _query(arguments)
    for entry in _record(name).log:
        print(entry)


def stop(arguments: Sequence[str]) -> None:
    """End a job and wait for its end."""
    name = _query(arguments)
    handle = JobHandle(name)
    handle.stop()
    handle.result(timeout=60.0)
    print(f"job {name} has ended")


def describe(name: str, record: JobRecord, devices: dict[str, list[str]]) -> str:
    """Return the text of `rlite status` for one job.

    Args:
        name: name of the job.
        record: its record.
        devices: devices of its workloads, by role.
    """
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


def _query(arguments: Sequence[str], needs_name: bool = True) -> str:
    query = load(JobQuery, named(arguments, ["name"]))
    if needs_name and query.name is None:
        raise ConfigError("expected the name of a job")
    connect(None, query.address)
    return query.name or ""


def _store() -> Any:
    return importlib.import_module("rlite.cluster.ray.fleet").RayStore()


def _is_running(name: str) -> bool:
    return "master" in importlib.import_module("rlite.cluster.ray.fleet").Fleet(name).names()


def _devices(name: str) -> dict[str, list[str]]:
    return JobHandle(name).devices() if _is_running(name) else {}


def _record(name: str) -> JobRecord:
    """Return the record of a job, from its master or, after its end, from Ray's key-value store.

    Raises:
        RliteError: there is no such job.
    """
    record = JobHandle(name).record() if _is_running(name) else load_record(_store(), name)
    if record is None:
        raise RliteError(f"no job {name!r} on this cluster, and no record of one in Ray's key-value store")
    return record
