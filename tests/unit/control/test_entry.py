"""Output of a job is printed once, under the names of its processes, and to its last byte."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlite.cli import main
from rlite.control import command
from rlite.control.entry import KEPT, JobEntry, JobOutput, entries, folder_of, keep_record, save_entry
from rlite.errors import ConfigError
from rlite.runtime.owner import Owner
from rlite.services.recovery.failover import JobState
from rlite.services.recovery.record import JobRecord, LogEntry

EVENTS = [LogEntry(1.0, "INIT", "submitted"), LogEntry(2.0, "RUNNING", "workers are up")]
SUBMISSION = "a" * 32


@pytest.fixture(autouse=True)
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the output of a job."""
    monkeypatch.setenv("RLITE_JOBS", str(tmp_path / "jobs"))
    folder = folder_of("job", SUBMISSION) / "output"
    folder.mkdir(parents=True)
    return folder


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_lines_without_an_end_are_printed_at_the_end_alone(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = output / "TRAINER-0.7.out"
    file.write_text(":job_id:01\nstep 1\nstep")
    shown = JobOutput("job", SUBMISSION, "trainer")
    assert shown.show((), is_last=False) == 1
    assert printed(capsys) == ["== TRAINER-0.7.out ==", "step 1"]
    with file.open("a") as more:
        more.write(" 2")
    assert [shown.show((), is_last) for is_last in (False, True, True)] == [0, 1, 0]
    assert printed(capsys) == ["step 2"]


@pytest.mark.parametrize(("role", "has_events"), [("", True), ("events", True), ("EVENTS", True), ("trainer", False)])
def test_each_event_is_printed_once(
    output: Path, capsys: pytest.CaptureFixture[str], role: str, has_events: bool
) -> None:
    (output / "TRAINER-0.7.out").write_text("step 1\n")
    shown = JobOutput("job", SUBMISSION, role)
    shown.show(EVENTS[:1], is_last=False)
    shown.show(EVENTS, is_last=False)
    lines = printed(capsys)
    assert [line for line in lines if "submitted" in line or "workers" in line] == has_events * [*map(str, EVENTS)]
    assert ("step 1" in lines) == (role in ("", "trainer"))
    if role == "":
        assert lines[-2:] == ["== events ==", str(EVENTS[1])], "the events go on after the output"


@pytest.mark.parametrize("role", ["trainers", "event", "rank-0"])
def test_an_unknown_role_is_refused(role: str) -> None:
    with pytest.raises(ConfigError, match=f"role={role}: no role of a job; "):
        command.logs(["job", f"role={role}"])


def test_events_of_a_job_whose_ray_is_gone_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = replace(Owner.of_this_process(), started=1.0)
    save_entry(JobEntry("job", SUBMISSION, "127.0.0.1:1", owner=gone))
    keep_record("job", JobRecord(SUBMISSION, JobState(stage="RUNNING"), tuple(EVENTS)))
    command.logs(["job", "role=events", "--follow"])
    assert printed(capsys) == [*map(str, EVENTS)]
    command.status(["job"])
    assert printed(capsys)[0].startswith("job: ERROR")
    monkeypatch.setattr(sys, "argv", ["rlite", "status", "job", "--json"])
    main()
    [job] = json.loads(capsys.readouterr().out)["jobs"]
    assert (job["name"], job["stage"], job["devices"]) == ("job", "ERROR", {})
    assert [event["event"] for event in job["events"]] == [event.event for event in EVENTS[-5:]]


def test_old_entries_go_unless_their_jobs_run(output: Path) -> None:
    us = Owner.of_this_process()
    jobs = {"running": ("RUNNING", us), "ended": ("FINISHED", us), "lost": ("RUNNING", replace(us, started=1.0))}
    for name, (stage, owner) in jobs.items():
        save_entry(JobEntry(name, SUBMISSION, "127.0.0.1:1", owner=owner, at=1.0))
        keep_record(name, JobRecord(SUBMISSION, JobState(stage=stage), tuple(EVENTS)))
    for number in range(KEPT):
        save_entry(JobEntry(f"new-{number}", SUBMISSION, None))
    assert [entry.name for entry in entries() if not entry.name.startswith("new")] == ["running"]


def test_a_job_that_runs_is_found_before_a_later_one_that_has_failed(tmp_path: Path) -> None:
    us, folder = Owner.of_this_process(), str(tmp_path / "run")
    for number, stage in enumerate(("RUNNING", "ERROR")):
        entry = JobEntry("job", str(number) * 32, "127.0.0.1:1", run_folder=folder, owner=us, at=float(number))
        save_entry(entry)
        keep_record("job", JobRecord(entry.submission, JobState(stage=stage), tuple(EVENTS)))
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at address='127\.0\.0\.1:1'"):
        command.stop([folder])
