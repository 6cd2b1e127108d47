"""`rlite tinker`, and programs of the client, as processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.tinker.client import FOLDER, NEWEST

ROOT, TOKEN = Path(__file__).parents[2], "tml-0123456789abcdef0123"


def environment(*packages: str, **further: str) -> dict[str, str]:
    """Variables of a process that finds this checkout, and folders of packages outside of the environment."""
    path = os.pathsep.join(map(str, (ROOT, *(FOLDER / name for name in packages))))
    own = {"PYTHONPATH": path, "RLITE_TINKER_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0"}
    return {**os.environ, **own, **further}


def of_client(port: int) -> dict[str, str]:
    """Variables with the address of a server and its token."""
    return {"TINKER_BASE_URL": f"http://127.0.0.1:{port}", "TINKER_API_KEY": TOKEN}


@contextmanager
def server(
    model: Path, folder: Path, port: int, *further: str, deterministic: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """A server on a port, killed at the end."""
    own = {"folder": folder, "port": port, "deterministic": deterministic, "max_models": 60, "max_served": 60}
    arguments = [*(f"{name}={value}" for name, value in own.items()), *further]
    command = [sys.executable, "-m", "rlite.cli", "tinker", "--model", str(model), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(NEWEST))
    try:
        assert process.stdout is not None
        assert any("Ctrl-C" in line for line in process.stdout), "it has ended"
        yield process
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port that was free a moment ago, for servers that follow each other on it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
