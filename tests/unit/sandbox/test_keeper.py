"""Nothing of a sandbox process stays behind, however it or its driver ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.integration.worlds import processes_with

ROOT = Path(__file__).resolve().parents[3]
MARK = "PYTHONRLITETEST"
"""an environment variable that passes into a sandbox process"""
SOON_S = 20.0
PROGRAM = """
import asyncio, sys
import cloudpickle
from rlite.rollout import RewardFunction
from rlite.rollout.failures import RewardError
from tests import hostile_rewards

cloudpickle.register_pickle_by_value(hostile_rewards)

async def outcomes(attack, timeout, is_foreign):
    reward = RewardFunction(hostile_rewards.attack, timeout=timeout, num_processes=2)
    print("started", flush=True)
    for _ in range(3):
        try:
            await reward.run(name=attack, marker="", is_foreign=is_foreign)
        except RewardError as error:
            print(error.outcome, flush=True)

asyncio.run(outcomes(sys.argv[1], float(sys.argv[2]), sys.argv[3] == "foreign"))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux adopts orphans")


def start(mark: str, *arguments: str, program: str = PROGRAM) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    env = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def left_after(mark: str) -> list[str]:
    late = time.monotonic() + SOON_S
    while (left := processes_with(MARK, mark)) and time.monotonic() < late:
        time.sleep(0.2)
    for process in left:
        process.kill()
    return [repr(process) for process in left]


@pytest.mark.parametrize("origin", [pytest.param("own", marks=pytest.mark.nightly), "foreign"])
def test_a_chain_of_forks_ends_with_its_call(origin: str) -> None:
    mark = uuid.uuid4().hex
    driver = start(mark, "endless_forks", "1", origin)
    out, _ = driver.communicate(timeout=90)
    assert out.split() == ["started", "timeout", "timeout", "timeout"]
    assert left_after(mark) == []


@pytest.mark.parametrize("death", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_a_chain_of_forks_ends_with_its_driver(death: signal.Signals) -> None:
    mark = uuid.uuid4().hex
    driver = start(mark, "endless_forks", "60", "own")
    assert driver.stdout is not None
    assert driver.stdout.readline() == "started\n"
    late = time.monotonic() + 60
    while len(processes_with(MARK, mark)) < 10 and time.monotonic() < late:
        time.sleep(0.05)
    assert len(processes_with(MARK, mark)) >= 10, "the attack runs"
    driver.send_signal(death)
    driver.communicate(timeout=20)
    assert left_after(mark) == []


def test_a_keeper_whose_signals_are_not_confined_ends_what_it_finds() -> None:
    mark = uuid.uuid4().hex
    unconfined = (
        "import os, sys, time, signal\n"
        "from rlite.runtime.sandbox import confine\n"
        "confine.restrict = lambda: False\n"
        "driver = os.getppid()\n"
        "reader, writer = os.pipe()\n"
        "confine.keep(driver, writer)\n"
        "for _ in range(30):\n"
        "    if os.fork() != 0:\n"
        "        time.sleep(3600) if _ else os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    os.setsid()\n"
        "time.sleep(3600)\n"
    )
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        kept = start(mark, program=unconfined)
        kept.communicate(timeout=30)
        assert kept.returncode == -signal.SIGSEGV, "the keeper ends as the sandbox process did"
        assert left_after(mark) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
