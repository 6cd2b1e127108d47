"""The processes of vLLM that a test has started."""

from __future__ import annotations

import os
import time

import psutil

from rlite.backends.vllm.process import session_members
from tests.integration.worlds import processes_with


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
