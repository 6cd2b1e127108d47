"""Faults happen to processes by their role, and are bounded."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.injectors import FileSizeFault, HalfOpenFault, NoTarget, SignalFault, find, hold_half_open, inject

DRIVER = """
import sys, time
from rlite.runtime.sandbox.pool import Worker
sandbox = Worker.start((), is_silent=True)
sandbox.channel.recv(1)  # it is ready
print(sandbox.process.pid, flush=True)
for _ in range(60_000):
    time.sleep(0.01)
    try:
        with open(sys.argv[1], "w") as file:
            file.write("x" * 100)
    except OSError as error:
        sys.exit(f"stopped by {error}")
"""

FLOOD = """
import os
from benchmarks.injectors import FloodFault, flood_descriptors

read, write = os.pipe()
print(flood_descriptors(FloodFault(payload=b"x" * 1000, num_bytes=20_000, seconds=5.0)))
"""


@pytest.fixture
def driver(tmp_path: object) -> Iterator[subprocess.Popen[str]]:
    """A program that writes to a file all the time, with a child that runs code of others."""
    script = f"{tmp_path}/driver.py"
    with open(script, "w") as file:
        file.write(DRIVER)
    command = [sys.executable, script, f"{tmp_path}/written"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert program.stdout is not None
    child = psutil.Process(int(program.stdout.readline()))
    yield program
    for process in (program, child):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    program.communicate()


def test_a_signal_reaches_the_process_of_its_role(driver: subprocess.Popen[str]) -> None:
    (sandbox,) = find("sandbox", driver.pid)
    assert [process.pid for process in find("driver", driver.pid)] == [driver.pid]
    assert inject(SignalFault(role="sandbox", signal="SIGKILL", index=7), driver.pid) == sandbox
    while find("sandbox", driver.pid):
        time.sleep(0.01)
    with pytest.raises(NoTarget, match="SIGTERM sandbox"):
        inject(SignalFault(role="sandbox", signal="SIGTERM"), driver.pid)
    for role in ("agent", "rank", "worker", "control"):
        assert find(role, driver.pid) == []  # type: ignore[arg-type]
    inject(SignalFault(role="driver", signal="SIGTERM"), driver.pid)
    assert driver.wait(timeout=100) == -signal.SIGTERM


def test_a_stopped_process_goes_on_after_its_seconds(driver: subprocess.Popen[str]) -> None:
    target = inject(SignalFault(role="driver", signal="SIGSTOP", seconds=0.3), driver.pid)
    deadline = time.monotonic() + 100
    seen = set()
    while time.monotonic() < deadline and not (psutil.STATUS_STOPPED in seen and target.status() != "stopped"):
        seen.add(target.status())
    assert psutil.STATUS_STOPPED in seen
    assert target.status() != psutil.STATUS_STOPPED


def test_a_full_disk_is_an_error_of_the_writer(driver: subprocess.Popen[str]) -> None:
    inject(FileSizeFault(role="driver", num_bytes=10), driver.pid)
    assert driver.wait(timeout=100) == 1
    assert driver.stderr is not None
    assert "File too large" in driver.stderr.readline()


def test_floods_and_half_open_connections_are_bounded() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        fault = HalfOpenFault(port=server.getsockname()[1], count=20, seconds=0.2, greeting=b"GET / HT")
        assert hold_half_open(fault) == 20
    ran = subprocess.run([sys.executable, "-c", FLOOD], capture_output=True, text=True, timeout=200)
    assert 20_000 <= int(ran.stdout) < 22_000, ran.stderr
