"""Injectors: they make faults happen to processes of this machine, bounded in time, number and bytes."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Literal

import psutil

from rlite.errors import RliteError

Role = Literal["driver", "agent", "rank", "worker", "control", "sandbox"]
"""driver: the program. agent: torchrun's. rank: a process of torchrun's. worker: a process of Ray's with our workers.
control: Ray's control service (GCS). sandbox: a process that runs rewards or environments."""


def find(role: Role, root: int) -> list[psutil.Process]:
    """Return the living processes of a role in the process tree of the run, in order of their ids.

    Args:
        role: the role to look for.
        root: process id of the run's first process.
    """
    try:
        first = psutil.Process(root)
        tree = [first, *first.children(recursive=True)]
    except psutil.Error:
        return []
    found = [process for process in tree if _has_role(process, role, first)]
    return sorted(found, key=lambda process: process.pid)


def _has_role(process: psutil.Process, role: Role, first: psutil.Process) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        command = process.cmdline()
        is_launched = "torch.distributed.run" in first.cmdline()
        is_child = process.ppid() == first.pid
        match role:
            case "agent":
                return is_launched and process == first
            case "rank":
                return is_launched and is_child and "RANK" in process.environ()
            case "driver":
                return process.environ().get("RANK") == "0" and is_child if is_launched else process == first
            case "worker":
                return process.name().startswith("ray::RayHost") or command[:1] == ["ray::RayHost"]
            case "control":
                return process.name().startswith("gcs_server")
            case "sandbox":
                # forked by its keeper, which has the same command line
                keeper = process.parent() if command[1:2] == ["-c"] else None
                return keeper is not None and keeper.cmdline() == command and "multiprocessing" not in "".join(command)
    except psutil.Error:  # it ended just now
        return False


FIRST_DESCRIPTOR, LAST_DESCRIPTOR = 3, 4096
SignalName = Literal["SIGKILL", "SIGTERM", "SIGSTOP"]


@dataclass(frozen=True, kw_only=True)
class SignalFault:
    """A signal sent to a process."""

    role: Role
    signal: SignalName
    index: int = 0
    """number of the process in the role, modulo the number of processes"""
    seconds: float = 1.0
    """seconds between SIGSTOP and SIGCONT"""

    @property
    def ends_run(self) -> bool:
        """Return True if the fault ends the run, which is then resumed. Otherwise the run continues by itself."""
        return self.role != "sandbox" and self.signal != "SIGSTOP"

    def __str__(self) -> str:
        return f"{self.signal} {self.role}"


@dataclass(frozen=True, kw_only=True)
class FileSizeFault:
    """A limit on the size of every file that a process writes from now on, as on a full disk."""

    role: Role
    num_bytes: int = 0
    index: int = 0

    ends_run = True

    def __str__(self) -> str:
        return f"full disk {self.role}"


@dataclass(frozen=True, kw_only=True)
class HalfOpenFault:
    """Connections to a port that are held open after a part of a request, or after nothing."""

    port: int
    host: str = "127.0.0.1"
    count: int = 1500
    seconds: float = 5.0
    greeting: bytes = b""


@dataclass(frozen=True, kw_only=True)
class FloodFault:
    """Bytes written to every descriptor that the calling process may write to, except the standard ones."""

    payload: bytes
    num_bytes: int = 64 << 20
    """at most, over all descriptors"""
    seconds: float = 2.0


ProcessFault = SignalFault | FileSizeFault


class NoTarget(RliteError):
    """No process has the fault's role at this moment."""


def inject(fault: ProcessFault, root: int) -> psutil.Process:
    """Make the fault happen to a process of the run.

    SIGSTOP is followed by SIGCONT after the fault's seconds, from another thread.

    Args:
        fault: the fault.
        root: process id of the run's first process.

    Returns:
        The process that was hit.

    Raises:
        NoTarget: there is no such process.
    """
    targets = find(fault.role, root)
    if not targets:
        raise NoTarget(f"{fault}: the run of process {root} has no {fault.role} now")
    target = targets[fault.index % len(targets)]
    try:
        _perform(fault, target)
    except psutil.NoSuchProcess as error:
        raise NoTarget(f"{fault}: {error}") from error
    return target


def hold_half_open(fault: HalfOpenFault) -> int:
    """Open the connections, hold them and close them.

    Returns:
        How many the kernel accepted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, fault.count + 64), hard), hard))
    ends = time.monotonic() + fault.seconds
    with ExitStack() as opened:
        count = 0
        while count < fault.count and time.monotonic() < ends:
            try:
                line = opened.enter_context(socket.create_connection((fault.host, fault.port), timeout=1.0))
                line.sendall(fault.greeting)
            except OSError:  # refused, or cut off: what a victim may do
                break
            count += 1
        time.sleep(max(ends - time.monotonic(), 0))
    return count


def flood_descriptors(fault: FloodFault) -> int:
    """Write to every descriptor of this process beyond the standard ones.

    Returns:
        How many bytes were taken.
    """
    ends, left = time.monotonic() + fault.seconds, fault.num_bytes
    writable = [number for number in range(FIRST_DESCRIPTOR, LAST_DESCRIPTOR) if _is_open(number)]
    for number in writable:
        os.set_blocking(number, False)
    while writable and left > 0 and time.monotonic() < ends:
        for number in list(writable):
            try:
                left -= os.write(number, fault.payload)
            except BlockingIOError:
                with suppress(OSError, ValueError):
                    select.select([], [number], [], 0.01)
            except OSError:
                writable.remove(number)
    return fault.num_bytes - left


def _perform(fault: ProcessFault, target: psutil.Process) -> None:
    if isinstance(fault, FileSizeFault):
        target.rlimit(psutil.RLIMIT_FSIZE, (fault.num_bytes, fault.num_bytes))
        return
    target.send_signal(signal.Signals[fault.signal])
    if fault.signal == "SIGSTOP":
        timer = threading.Timer(fault.seconds, _resume, (target,))
        timer.daemon = True
        timer.start()


def _resume(target: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        target.resume()


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
