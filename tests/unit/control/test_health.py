"""Stopped, hung and busy processes are distinguished, on given reports and on a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rlite.control.health import Judge, NodeAgent, Vital
from rlite.control.spec import HealthOptions
from rlite.services.recovery.failover import WorkloadId

A, B = WorkloadId("ACTOR", 0), WorkloadId("ACTOR", 1)
SLEEPING, STOPPED, RUNNING = psutil.STATUS_SLEEPING, psutil.STATUS_STOPPED, psutil.STATUS_RUNNING


@pytest.fixture
def judge() -> Judge:
    judge = Judge(HealthOptions(stopped_after=3.0, silent_after=8.0, hung_after=20.0))
    judge.watch(A, "n", 1)
    judge.watch(B, "n", 2)
    return judge


def test_a_process_that_is_stopped_for_some_seconds_is_found_once(judge: Judge) -> None:
    reports = [{1: Vital(STOPPED, 0.0), 2: Vital(SLEEPING, 0.0)}] * 5
    found = [finding for report in reports for finding in judge.observe("n", report, 1.0)]
    assert [(each.lives, each.pids, each.condition) for each in found] == [((A,), (1,), "stopped")]
    assert judge.pids() == {"n": [2]}


def test_a_process_that_goes_on_is_not_stopped(judge: Judge) -> None:
    for status in (STOPPED, STOPPED, SLEEPING, STOPPED, STOPPED):
        assert judge.observe("n", {1: Vital(status, 0.0)}, 1.0) == []


def test_a_node_without_heartbeats_is_one_finding_if_it_ever_reported(judge: Judge) -> None:
    assert [judge.observe("n", None, 1.0) for _ in range(30)] == [[]] * 30  # its agent starts
    judge.observe("n", {}, 1.0)
    found = [finding for _ in range(12) for finding in judge.observe("n", None, 1.0)]
    assert [(each.lives, each.condition) for each in found] == [((A, B), "stopped")]
    judge.watch(A, "n", 1)
    judge.restart("n")
    assert judge.observe("n", None, 100.0) == []


def test_a_late_worker_is_hung_only_if_it_does_not_compute(judge: Judge) -> None:
    judge.observe("n", {1: Vital(SLEEPING, 5.0), 2: Vital(SLEEPING, 5.0)}, 1.0)
    for second in range(30):  # nobody is late
        assert judge.observe("n", {1: Vital(SLEEPING, 5.0), 2: Vital(SLEEPING, 5.0)}, 1.0) == [], second
    judge.note_late(A, "train")
    judge.note_late(B, "train")
    found = []
    for second in range(40):
        busy = Vital(RUNNING if second % 2 else SLEEPING, 5.0 + second)
        found += judge.observe("n", {1: Vital(SLEEPING, 5.0 + 0.001 * second), 2: busy}, 1.0)
    assert [(each.lives, each.condition) for each in found] == [((A,), "hung")]
    assert judge.late() == [B]


def test_a_late_worker_that_answers_is_forgotten(judge: Judge) -> None:
    judge.note_late(A, "train")
    judge.note_late(A, "")
    for _ in range(30):
        assert judge.observe("n", {1: Vital(SLEEPING, 0.0)}, 1.0) == []
    judge.forget(lambda life: life == B)
    assert judge.pids() == {"n": [1]}


def test_an_agent_sees_a_stopped_process_and_kills_it() -> None:
    agent = NodeAgent()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while agent.look([process.pid])[process.pid].status != STOPPED and time.monotonic() < deadline:
            time.sleep(0.02)
        assert agent.look([process.pid])[process.pid].status == STOPPED
        agent.kill([process.pid, 2**22 - 1])
        assert process.wait(10) == -signal.SIGKILL
    assert agent.look([process.pid]) == {}


def test_the_cpu_time_of_a_process_includes_its_descendants() -> None:
    busy = "import time; [None for _ in iter(lambda: time.process_time() < 0.5, False)]; print(flush=True); input()"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {nested!r}])"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        own = psutil.Process(process.pid).cpu_times()
        assert NodeAgent().look([process.pid])[process.pid].cpu_s > own.user + own.system + 0.4
        process.communicate(b"\n")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show the states of threads")
def test_a_process_is_running_if_a_thread_beside_its_main_thread_is() -> None:
    # without Python's lock, for which the main thread would otherwise wake now and then
    compute = 'hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)'
    start = f"import hashlib, threading\nthreading.Thread(target=lambda: {compute}, daemon=True).start()"
    with subprocess.Popen([sys.executable, "-c", f"{start}\ninput()"], stdin=subprocess.PIPE) as process:
        main_thread, agent, deadline = psutil.Process(process.pid), NodeAgent(), time.monotonic() + 30
        while (main_thread.num_threads() < 2 or main_thread.status() != SLEEPING) and time.monotonic() < deadline:
            time.sleep(0.02)
        seen = main_thread.status(), agent.look([process.pid])[process.pid].status
        process.kill()  # before an assertion that fails, or the test would wait for it
    assert seen == (SLEEPING, RUNNING)


def test_a_look_at_many_processes_costs_little_more_than_at_one() -> None:
    agent = NodeAgent()
    others = [subprocess.Popen(["sleep", "100"]) for _ in range(40)]
    try:
        costs = []
        for pids in ([others[0].pid], [each.pid for each in others]):
            began = time.process_time()
            assert all(len(agent.look(pids)) == len(pids) for _ in range(5))
            costs.append(time.process_time() - began)
        assert costs[1] < 8 * costs[0]  # one pass over all processes for each of 40 would be 40 times
    finally:
        for each in others:
            each.kill()
            each.wait()


def test_an_agent_kills_a_stopped_master_and_no_other() -> None:
    agent = NodeAgent(stopped_after_s=1.0)
    sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
    with subprocess.Popen(sleep) as master, subprocess.Popen(sleep) as other:
        agent.look([], master.pid)
        time.sleep(2.0)
        assert master.poll() is None
        for process in (master, other):
            os.kill(process.pid, signal.SIGSTOP)
        assert master.wait(10) == -signal.SIGKILL
        assert psutil.Process(other.pid).status() == STOPPED
        other.kill()
