"""The processes of vLLM that a test has started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from rlite.backends.vllm.process import session_members
from tests.integration.worlds import processes_with

KEY = "a-key"
"""key of `user_server`"""


@contextmanager
def user_server(path: Path, *options: str) -> Iterator[str]:
    """The address of a server that a user starts by vLLM's own program; it may not answer yet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--max-model-len", "256", "--dtype", "float32"]
    command += ["--enforce-eager", "--max-num-seqs", "8", *options]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_API_KEY": KEY}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def servers(mark: str, value: str) -> list[int]:
    """Process ids of vLLM's servers that inherited an environment variable."""
    found = []
    for process in processes_with(mark, value):
        try:
            # a server leads its session; what it has just forked has the same command line
            if "rlite.backends.vllm.server" in process.cmdline() and os.getsid(process.pid) == process.pid:
                found.append(process.pid)
        except (psutil.Error, ProcessLookupError):
            continue
    return sorted(found)


def engine_core_of(server: int) -> int:
    """Process id of the process under a server that computes, if the replica has one device."""
    (found,) = [
        child.pid
        for child in psutil.Process(server).children(recursive=True)
        if "EngineCore" in " ".join(child.cmdline())
    ]
    return found


def wait_until_gone(server: int, seconds: float) -> list[psutil.Process]:
    """The processes of a server's session that live on after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := session_members(server)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
