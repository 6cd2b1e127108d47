"""Real worlds of processes for tests: sessions on Ray, and under torchrun with this process as rank 0."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

import rlite
from rlite.runtime.cluster.group import apply_on_processes
from rlite.runtime.cluster.guard import marked
from rlite.runtime.replicas.engine import Engine
from tests import forked_python

ROOT = Path(__file__).parents[2]
MARK = "RLITE_TEST_RUN"
"""environment variable that all processes of a test inherit"""
CALL = "import pickle, sys; work, arguments = pickle.load(sys.stdin.buffer); work(*arguments)"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**changes: str) -> dict[str, str]:
    """For a process that imports rlite and tests from this checkout, on one thread; torchrun's ranks are forks."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": forked_python.python()}
    return {**os.environ, **own, **changes}


@contextmanager
def ray_session(num_devices: int) -> Iterator[str]:
    """A session of the Ray launcher with so many CPU devices, and its mark; no process is left after it."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    rlite.init(device="cpu", num_devices=num_devices, launcher="ray", num_threads=1)
    yield mark
    rlite.shutdown()
    del os.environ[MARK]
    assert processes_with(MARK, mark) == []


def process_of(engine: Engine, rank: int) -> int:
    """Process id of a rank."""
    return apply_on_processes([(engine.group, rank, (), ())], os.getpid, [engine.group], "ask", 60)[0]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@contextmanager
def world(num_devices: int) -> Iterator[None]:
    """A session of the torchrun launcher with so many CPU devices."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_devices),
        "LOCAL_WORLD_SIZE": str(num_devices),
    }
    before = dict(os.environ)
    os.environ.update(environment(**common))
    try:
        with ranks(serve, [(rank, dict(os.environ)) for rank in range(1, num_devices)]):
            os.environ.update(RANK="0", LOCAL_RANK="0")
            rlite.init(device="cpu", launcher="torchrun", num_threads=1)
            yield
            rlite.shutdown()
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def ranks(work: Callable[..., None], arguments: Sequence[tuple]) -> Iterator[None]:
    """Processes that call `work`, each with its arguments; they have ended well after the block."""
    command, variables = [forked_python.python(), "-c", CALL], environment()
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, env=variables) for _ in arguments]
    try:
        for process, each in zip(processes, arguments, strict=True):
            assert process.stdin is not None
            with process.stdin as pipe:
                pickle.dump((work, each), pipe)
        yield
        for process in processes:
            assert process.wait(100) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()


def serve(rank: int, environment: dict[str, str]) -> None:
    """Serve as a rank until the driver leaves."""
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    gc.freeze()  # every release of an engine collects garbage, and would visit all modules
    rlite.init(device="cpu", launcher="torchrun")


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Living processes whose environment says so: all that a program started, and their children."""
    return marked(value, variable)


def program_of(process: subprocess.Popen) -> psutil.Process:
    """The program that a process of the executable `forked_python.python()` runs."""
    found = {each.pid: each for each in processes_with(forked_python.CLIENT, str(process.pid))}
    return next((each for each in found.values() if each.ppid() not in found), psutil.Process(process.pid))
