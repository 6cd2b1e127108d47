"""Real worlds of processes for tests, started in a moment: this process is rank 0, as under torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

import rlite

ROOT = Path(__file__).parents[2]
# modules are hidden from the garbage collector: every release of an engine collects, and would visit all of them
SERVE = """
import gc, rlite
import rlite.engine.embedded.worker, rlite.engine.fsdp2.worker
gc.freeze()
rlite.init(device="cpu", launcher="torchrun")
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**changes: str) -> dict[str, str]:
    """For a process that imports rlite and tests from this checkout, on one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}


@contextmanager
def world(num_devices: int) -> Iterator[list[subprocess.Popen]]:
    """A session of the torchrun launcher with so many CPU devices; yields the processes of ranks 1, 2, ..."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_devices),
        "LOCAL_WORLD_SIZE": str(num_devices),
    }
    peers = [
        subprocess.Popen([sys.executable, "-c", SERVE], env=environment(**common, RANK=str(rank), LOCAL_RANK=str(rank)))
        for rank in range(1, num_devices)
    ]
    before = dict(os.environ)
    os.environ.update(common, RANK="0", LOCAL_RANK="0")
    try:
        rlite.init(device="cpu", launcher="torchrun", num_threads=1)
        yield peers
        rlite.shutdown()
        for peer in peers:
            assert peer.wait(timeout=30) == 0
    finally:
        for name in [*common, "RANK", "LOCAL_RANK"]:
            os.environ.pop(name)
        os.environ.update(before)
        for peer in peers:
            if peer.poll() is None:
                peer.kill()
                peer.wait()


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Living processes whose environment says so: all that a program started, and their children."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(variable) == value:
                found.append(process)
        except psutil.Error:
            continue
    return found
