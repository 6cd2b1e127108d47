"""Jobs of the control plane on a real Ray: every process is killed, stopped or hung once, and the job finishes."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table

import rlite
from rlite.control import JobHandle, JobResult, RLJobBuilder, command
from rlite.errors import ConfigError, PlacementError, RliteError
from rlite.runtime.cluster.ray.fleet import Fleet, RayStore, Service, drop_plan, keep_plan
from rlite.services.recovery.failover import JobState
from rlite.services.recovery.record import MAX_ENDED, JobRecord, LogEntry, load_record, save_record
from tests.integration.control_program import Actor, Rollout, Trainer

pytestmark = pytest.mark.slow
START_S = 240.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all tests, started by the first job."""
    yield
    rlite.shutdown()


def builder(out: Path, rollouts: str | None = None, **config: Any) -> RLJobBuilder:
    job = RLJobBuilder().device_per_node(2).device_type("CPU").trainer(Trainer).config({"out": str(out), **config})
    job = job.actor(Actor).total(2).per_node(2).end().options(backoff=0.1, health={"hung_after": 2.0})
    if rollouts is None:
        return job
    rollout = job.rollout(Rollout).total(2).per_node(2).on_failure(rollouts)  # type: ignore[arg-type]
    return rollout.end().with_collocation_all()


def wait_for(is_there: Callable[[], Any]) -> None:
    deadline = time.monotonic() + START_S
    while not is_there():
        assert time.monotonic() < deadline, f"it did not happen in time:\n{histories()}"
        time.sleep(0.05)


def histories() -> str:
    """Histories of all jobs, for the message of a failed test."""
    jobs = [(name, load_record(RayStore(), name)) for name in RayStore().names()] if ray.is_initialized() else []
    return "\n".join(f"{name}: {entry}" for name, record in jobs if record for entry in record.log)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def taken(port: int) -> Iterator[None]:
    """Hold a port as soon as it is free."""
    with socket.socket() as holder:

        def hold() -> bool:
            with suppress(OSError):
                holder.bind(("", port))
            return holder.getsockname()[1] == port

        wait_for(hold)
        yield


class Run:
    """A submitted job and what it noted."""

    def __init__(self, job: RLJobBuilder, out: Path, name: str, address: str | None = None) -> None:
        self.out = out
        handle = job.build().submit(job_name=name, blocking=False, job_max_restart=3, address=address)
        assert isinstance(handle, JobHandle)
        self.handle = handle

    def pids(self, run: int = 1) -> dict[str, Any]:
        wait_for(lambda: len(self._lines()) >= run)
        return json.loads(self._lines()[run - 1])

    def _lines(self) -> list[str]:
        path = self.out / "runs"
        return path.read_text().splitlines() if path.exists() else []

    def finish(self) -> JobResult:
        (self.out / "go").write_text("")
        result = self.handle.result(timeout=START_S)
        assert Fleet(self.handle.name).names() == []
        return result


def test_a_killed_master_takes_its_running_job_over(tmp_path: Path) -> None:
    run = Run(builder(tmp_path), tmp_path, "master")
    pids = run.pids()
    master = ray.get(Service("master").actor.host_look.remote()).pid
    os.kill(master, signal.SIGKILL)
    wait_for(lambda: "take the job over" in str(run.handle.record().log[-1]))
    result = run.finish()
    assert result.succeeded, result
    assert result.restarts == 0
    wait_for(lambda: not any(map(is_alive, [*pids["actors"], pids["trainer"]])))
    assert json.loads((tmp_path / "steps").read_text())[0] > 1


@pytest.mark.nightly
def test_a_stopped_master_is_killed_and_its_successor_takes_the_job_over(tmp_path: Path) -> None:
    run = Run(builder(tmp_path), tmp_path, "stopped-master")
    run.pids()
    time.sleep(3.0)  # the agent of its node has been asked
    os.kill(ray.get(Service("stopped-master").actor.host_look.remote()).pid, signal.SIGSTOP)
    wait_for(lambda: "take the job over" in str(run.handle.record().log[-1]))
    result = run.finish()
    assert (result.succeeded, result.restarts) == (True, 0), result


@pytest.mark.nightly
def test_a_trainer_that_is_stopped_as_soon_as_it_begins_is_restarted(tmp_path: Path) -> None:
    run = Run(builder(tmp_path, recoverable=True, stop=True), tmp_path, "stopped-trainer")
    run.pids()
    result = run.finish()
    assert (result.succeeded, result.restarts) == (True, 1), result
    assert "trainer failed: stopped" in "\n".join(map(str, result.events))


@pytest.mark.nightly
def test_a_node_without_heartbeats_gets_another_agent(tmp_path: Path) -> None:
    run = Run(builder(tmp_path).options(health={"silent_after": 4.0}), tmp_path, "silent")
    victim = run.pids()["actors"][0]
    time.sleep(3.0)  # the agent has reported
    (name,) = [name for name in Fleet("silent").names() if name.startswith("agent-")]
    agent = ray.get(ray.get_actor(f"silent/{name}", "rlite").host_look.remote()).pid
    os.kill(agent, signal.SIGSTOP)
    wait_for(lambda: "no heartbeat for" in str(run.handle.record().log))
    assert run.pids(2)["actors"][0] != victim
    wait_for(lambda: not is_alive(agent))
    result = run.finish()
    assert (result.succeeded, result.restarts) == (True, 1), result


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_killed_rollout_is_replaced_while_the_trainer_goes_on(tmp_path: Path, rank: int) -> None:
    run = Run(builder(tmp_path, rollouts="workload"), tmp_path, f"rollout-{rank}")
    before = run.pids()
    os.kill(before["rollouts"][rank], signal.SIGKILL)
    wait_for((tmp_path / "whole").exists)
    after = json.loads((tmp_path / "whole").read_text())
    assert after["rollouts"][1 - rank] == before["rollouts"][1 - rank]
    assert after["rollouts"][rank] != before["rollouts"][rank]
    assert after["rendezvous"] == before["rendezvous"]
    result = run.finish()
    assert result.succeeded, result
    assert result.restarts == 0


@pytest.mark.nightly
def test_the_role_restarts_if_the_port_of_its_killed_rank_0_is_taken(tmp_path: Path) -> None:
    run = Run(builder(tmp_path, rollouts="workload"), tmp_path, "taken")
    before = run.pids()
    ((_, port), _) = before["rendezvous"]
    os.kill(before["rollouts"][0], signal.SIGKILL)
    with taken(port):
        wait_for((tmp_path / "whole").exists)
    after = json.loads((tmp_path / "whole").read_text())
    assert set(after["rollouts"]).isdisjoint(before["rollouts"])
    assert after["rendezvous"][0] == after["rendezvous"][1] != before["rendezvous"][0]
    result = run.finish()
    assert (result.succeeded, result.restarts) == (True, 0), result
    log = "\n".join(map(str, result.events))
    assert f"the peers of ROLLOUT expect rank 0 at 127.0.0.1:{port}" in log
    assert "restart role ROLLOUT with a new rendezvous" in log


@pytest.mark.nightly
def test_a_stopped_actor_restarts_the_job(tmp_path: Path) -> None:
    run = Run(builder(tmp_path), tmp_path, "stopped")
    victim = run.pids()["actors"][1]
    time.sleep(2.0)  # the agent reports
    os.kill(victim, signal.SIGSTOP)
    wait_for(lambda: any("state T" in str(entry) for entry in run.handle.record().log))
    assert run.pids(2)["actors"][1] != victim
    result = run.finish()
    assert result.succeeded, result
    assert result.restarts == 1
    wait_for(lambda: not is_alive(victim))


def test_a_killed_trainer_that_is_recoverable_restarts_alone(tmp_path: Path) -> None:
    run = Run(builder(tmp_path, recoverable=True), tmp_path, "trainer")
    before = run.pids()
    os.kill(before["trainer"], signal.SIGKILL)
    after = run.pids(2)
    assert after["actors"] == before["actors"]
    assert after["trainer"] != before["trainer"]
    result = run.finish()
    assert result.succeeded, result
    assert result.restarts == 1


@pytest.mark.nightly
def test_a_trainer_calls_workloads_that_were_replaced_while_it_was_made(tmp_path: Path) -> None:
    run = Run(builder(tmp_path, rollouts="workload", recoverable=True), tmp_path, "made")
    before = run.pids()
    (tmp_path / "hold").write_text("")
    os.kill(before["trainer"], signal.SIGKILL)
    wait_for((tmp_path / "held").exists)
    os.kill(before["rollouts"][1], signal.SIGKILL)
    wait_for(lambda: "workloads are ready (ticket 2)" in str(run.handle.record().log))
    (tmp_path / "hold").unlink()
    assert run.pids(2)["rollouts"][1] != before["rollouts"][1]
    result = run.finish()
    assert (result.succeeded, result.restarts) == (True, 1), result


@pytest.mark.nightly
def test_a_late_worker_is_hung_if_it_sleeps_and_busy_if_it_computes(tmp_path: Path) -> None:
    for late, restarts in (("hang", 1), ("compute", 0)):
        out = tmp_path / late
        out.mkdir()
        run = Run(builder(out, late=late), out, late)
        run.pids(1 + restarts)
        wait_for((out / "timed-out").exists)
        time.sleep(0.0 if restarts else 4.0)
        result = run.finish()
        assert result.succeeded, result
        assert result.restarts == restarts
        log = "\n".join(map(str, result.events))
        assert f"ACTOR rank 0 is late: {late} (limit 0.5 s)" in log
        assert f"in {late}" in log  # its stack
        assert ("ACTOR rank 0 hung" in log) == bool(restarts)


@pytest.mark.nightly
def test_a_constructor_that_raises_ends_the_job_with_its_error(tmp_path: Path) -> None:
    result = builder(tmp_path, refuse=True).build().submit(job_name="refused")
    assert isinstance(result, JobResult)
    assert not result.succeeded
    assert "ValueError: no such model" in result.error
    assert Fleet("refused").names() == []


def test_impossible_jobs_are_refused_before_anything_starts(tmp_path: Path) -> None:
    job = RLJobBuilder().device_per_node(64).device_type("CPU").trainer(Trainer).actor(Actor).total(64).per_node(64)
    with pytest.raises(PlacementError, match="needs 64 devices"):
        job.end().build().submit(job_name="large")
    assert Fleet("large").names() == []
    run = Run(builder(tmp_path), tmp_path, "twice")
    with pytest.raises(ConfigError, match="a job of this name runs"):
        builder(tmp_path).build().submit(job_name="twice")
    run.handle.stop()
    result = run.handle.result(timeout=START_S)
    assert (result.succeeded, result.is_stopped, result.error) == (False, True, "stopped on request")


@pytest.mark.nightly
def test_a_job_that_is_stopped_while_it_is_made_leaves_nothing(tmp_path: Path) -> None:
    for number in range(3):
        run = Run(builder(tmp_path), tmp_path, f"short-{number}")
        time.sleep(0.24 * number)
        run.handle.stop()
        assert not run.handle.result(timeout=START_S).succeeded
    time.sleep(2.0)  # a creation under way would end
    held = [each["name"] for each in placement_group_table().values() if each["state"] != "REMOVED"]
    assert held == []
    assert [name for number in range(3) for name in Fleet(f"short-{number}").names()] == []


def test_the_commands_launch_show_and_stop_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "tests.integration.control_program"
    (tmp_path / "job.yaml").write_text(
        f"device_per_node: 2\ndevice_type: CPU\ntrainer: {program}:Trainer\nconfig: {{out: {tmp_path}}}\n"
        f"actor: {{workload: '{program}:Actor', total: 2, per_node: 2}}\n"
    )
    ended = JobRecord(state=JobState(stage="FINISHED"), log=(LogEntry(0.0, "FINISHED", "long ago"),))
    save_record(RayStore(), "long-ago", ended)
    for number in range(MAX_ENDED):
        save_record(RayStore(), f"ended-{number}", replace(ended, log=(LogEntry(1.0, "FINISHED", "done"),)))
    command.launch([str(tmp_path / "job.yaml"), "wait=false", "name=cli", "store=ray"])
    assert "long-ago" not in RayStore().names()
    assert "rlite status cli" in capsys.readouterr().out
    wait_for((tmp_path / "runs").exists)
    command.status(["cli"])
    shown = capsys.readouterr().out
    assert "cli: RUNNING, 0 restarts" in shown
    assert "ACTOR: 2 workloads, 0 restarts" in shown
    command.stop(["cli"])
    command.logs(["cli"])
    assert "stopped on request -> end the job" in capsys.readouterr().out
    with pytest.raises(RliteError, match="no job 'clj'"):
        command.logs(["clj"])
    command.status(["cli"])
    assert "cli: STOPPED, 0 restarts" in capsys.readouterr().out


# -- one name, several submissions; masters that cannot go on -------------------------------------------------------


@pytest.mark.nightly
def test_of_two_submissions_at_once_one_is_refused_and_the_others_job_runs(tmp_path: Path) -> None:
    runs: dict[str, Run | Exception] = {}

    def submit(which: str) -> None:
        try:
            (tmp_path / which).mkdir()
            runs[which] = Run(builder(tmp_path / which), tmp_path / which, "raced")
        except ConfigError as error:
            runs[which] = error

    threads = [threading.Thread(target=submit, args=(which,)) for which in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (refused,) = [each for each in runs.values() if isinstance(each, ConfigError)]
    assert "job_name='raced': a job of this name runs on the cluster" in str(refused)
    (winner,) = [each for each in runs.values() if isinstance(each, Run)]
    assert winner.finish().succeeded
    assert [path.parent for path in tmp_path.glob("*/runs")] == [winner.out]


def kill_master(name: str) -> None:
    os.kill(ray.get(Service(name).actor.host_look.remote()).pid, signal.SIGKILL)


UNREADABLE: dict[str, Callable[[str], object]] = {
    "damaged": lambda name: RayStore().save(name, "{"),
    "of another submission": lambda name: save_record(RayStore(), name, JobRecord("other", JobState("RUNNING"))),
    "without a plan": lambda name: drop_plan(name, load_record(RayStore(), name).submission),  # type: ignore[union-attr]
}


@pytest.mark.nightly
@pytest.mark.parametrize("what", UNREADABLE)
def test_a_master_that_cannot_read_its_state_ends_its_job(tmp_path: Path, what: str) -> None:
    name = what.replace(" ", "-")
    run = Run(builder(tmp_path), tmp_path, name)
    pids = run.pids()
    UNREADABLE[what](name)
    kill_master(name)
    result = run.handle.result(timeout=START_S)
    assert not result.succeeded
    assert result.error.startswith("the master cannot read its state: RliteError: ")
    wait_for(lambda: not any(map(is_alive, [*pids["actors"], pids["trainer"]])))
    assert Fleet(name).names() == []
    assert not (tmp_path / "steps").exists()


@pytest.mark.nightly
def test_a_plan_of_another_submission_does_not_reach_a_restarted_master(tmp_path: Path) -> None:
    run = Run(builder(tmp_path), tmp_path, "planned")
    run.pids()
    other = builder(tmp_path / "other").build().plan("planned", 0)
    keep_plan("planned", other.submission, other)
    kill_master("planned")
    assert run.finish().succeeded
    assert not (tmp_path / "other").exists()


def test_a_record_that_cannot_be_read_is_refused_at_submission(tmp_path: Path) -> None:
    RayStore().save("stale", "{")
    with pytest.raises(RliteError, match="the stored state of job 'stale' cannot be read; remove it"):
        builder(tmp_path).build().submit(job_name="stale")
    assert Fleet("stale").names() == []
    RayStore().remove("stale")


@pytest.mark.nightly
def test_an_unfinished_record_that_is_replaced_is_noted(tmp_path: Path) -> None:
    save_record(RayStore(), "again", JobRecord("lost", JobState("RUNNING")))
    result = Run(builder(tmp_path), tmp_path, "again").finish()
    assert "the record of an earlier submission is replaced, which had not ended (RUNNING)" in str(result.events[0])


@pytest.mark.nightly
def test_processes_without_a_master_are_shown_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(builder(tmp_path), tmp_path, "orphans")
    pids = run.pids()
    ray.kill(Service("orphans").actor)
    wait_for(lambda: "master" not in Fleet("orphans").names())
    with pytest.raises(ConfigError, match="or has left processes there"):
        builder(tmp_path).build().submit(job_name="orphans")
    command.status(["orphans"])
    assert "processes without a master, which `rlite stop orphans` ends" in capsys.readouterr().out
    command.stop(["orphans"])
    assert "stopped on request; its master was gone" in capsys.readouterr().out
    wait_for(lambda: not any(map(is_alive, [*pids["actors"], pids["trainer"]])))
    assert Fleet("orphans").names() == []


@pytest.mark.nightly
def test_programs_that_a_workload_starts_end_with_it(tmp_path: Path) -> None:
    run = Run(builder(tmp_path, rollouts="workload", spawns=True), tmp_path, "spawning")
    pids = run.pids()
    children = [int(path.name) for path in (tmp_path / "children").iterdir()]
    assert len(children) == 4
    owned = {psutil.Process(pid).ppid(): pid for pid in children}
    os.kill(pids["rollouts"][0], signal.SIGKILL)
    wait_for(lambda: not is_alive(owned[pids["rollouts"][0]]))
    assert is_alive(owned[pids["rollouts"][1]])
    assert run.finish().succeeded
    wait_for(lambda: not any(map(is_alive, children)))


@pytest.mark.nightly
def test_a_job_in_a_folder_is_stopped_and_read_by_its_folder_and_without_a_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(builder(tmp_path).options(store=str(tmp_path / "jobs")), tmp_path, "kept").pids()
    with monkeypatch.context() as another_user:
        another_user.setenv("RLITE_JOBS", str(tmp_path / "elsewhere"))
        in_folder = ["kept", f"store={tmp_path / 'jobs'}"]
        command.stop(in_folder)
        assert "job kept has ended: stopped on request" in capsys.readouterr().out
        command.logs(in_folder)
        assert "stopped on request -> end the job" in capsys.readouterr().out
    command.status(["kept"])
    assert "kept: STOPPED, 0 restarts" in capsys.readouterr().out
