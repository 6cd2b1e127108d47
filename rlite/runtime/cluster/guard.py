"""Clean-up of processes that a program leaves running. A companion process watches the driver, even through SIGKILL.

A mark, which children inherit, identifies the processes. It stands in the environment and, on Linux, in a resource
limit that the kernel no longer enforces. A program that sets its title may overwrite the environment, as Ray's agents
do. This file runs as a program of its own. It imports nothing but psutil, so that the companion starts quickly and
stays small.

Other programs use SIGTERM as a notice: a process announces its end and continues for a grace period, in which its work
can move.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil

MARK = "RLITE_OWNED_BY"
POLL_S = 0.25
SETTLE_S = 60.0
"""seconds after the driver's death in which the companion still looks for new processes"""
_MAX_LOCKS = 10
"""RLIMIT_LOCKS: since Linux 2.4.25 it limits nothing"""
_KEEP = """"$@" & trap 'kill -KILL $!' TERM; wait; wait"""
"""shell program that starts a command as its child, and kills and reaps the child at SIGTERM"""


class Guard:
    """Owner of every process that starts inside `marking()`. They end with this process, or at `close()`.

    A shell stands between this process and the companion: a program that kills its children before it ends, as a Ray
    worker does, does not reach the companion.
    """

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        companion = [sys.executable, os.path.abspath(__file__), self._mark, str(os.getpid())]
        command = ["/bin/sh", "-c", _KEEP, "rlite-guard", *companion]
        # not marked itself: if this process belongs to another guard, the companion must outlive it to end what is left
        unmarked = {name: value for name, value in os.environ.items() if name != MARK}
        with _max_locks(resource.RLIM_INFINITY):
            # a session of its own: an interrupt from the terminal is for the driver alone
            self._shell = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=unmarked)

    @property
    def mark(self) -> dict[str, str]:
        """Environment variable of the processes that this guard owns."""
        return {MARK: self._mark}

    def end(self) -> None:
        """Kill every marked process."""
        reap(self._mark)

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Mark processes that start inside the block, and their children at any time.

        Yields:
            None.
        """
        os.environ[MARK] = self._mark
        try:
            with _max_locks(_number_of(self._mark)):
                yield
        finally:
            os.environ.pop(MARK, None)

    def close(self, patience_s: float = 5.0) -> None:
        """Wait for marked processes to end, kill the rest, and end the companion."""
        psutil.wait_procs(marked(self._mark), timeout=patience_s)
        reap(self._mark)
        self._shell.terminate()
        self._shell.wait()


def own_children() -> None:
    """Let all programs that this process starts from now on end with it, even if it is killed."""
    _owning.enter_context(Guard().marking())


_owning = ExitStack()


def marked(mark: str, variable: str = MARK) -> list[psutil.Process]:
    """Return living processes with this mark, except the caller.

    `variable`: environment variable that holds the mark. Only a guard's own variable has a limit beside it.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it ended just now, or belongs to another user
            is_marked = _started_with(process, variable, mark) or (
                variable == MARK and sys.platform == "linux" and process.rlimit(_MAX_LOCKS)[0] == _number_of(mark)
            )
            if is_marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _started_with(process: psutil.Process, variable: str, value: str) -> bool:
    if sys.platform != "linux":
        return process.environ().get(variable) == value
    # a title may overwrite the first variables, where psutil ends its search
    with open(f"/proc/{process.pid}/environ", "rb") as environment:
        return f"{variable}={value}".encode() in environment.read().split(b"\0")


def _number_of(mark: str) -> int:
    return int.from_bytes(hashlib.blake2b(mark.encode(), digest_size=7).digest())


def _max_locks(limit: int) -> ExitStack:
    """Return the context in which the limit is set, which children inherit.

    Only Linux has it. A lower hard limit or a sandbox may refuse it: then the environment alone marks.
    """
    stack = ExitStack()
    if sys.platform == "linux":
        with suppress(ValueError, OSError):
            before = resource.getrlimit(_MAX_LOCKS)
            resource.setrlimit(_MAX_LOCKS, (limit, before[1]))
            stack.callback(resource.setrlimit, _MAX_LOCKS, before)
    return stack


def reap(mark: str, variable: str = MARK) -> None:
    """Kill until no process with this mark in an environment variable is left."""
    deadline = time.monotonic() + SETTLE_S
    while (found := marked(mark, variable)) and time.monotonic() < deadline:
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=POLL_S)


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, even by SIGKILL (Linux only).

    A parent that has already ended is not noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_at_sigterm() -> None:
    """Restore SIGTERM's default action: the kernel ends the process at once, even if its threads are busy.

    A Python handler would run in the main thread only, and only when that thread returns to Python. This works from any
    thread.
    """
    ctypes.CDLL(None).signal(signal.SIGTERM, 0)  # SIG_DFL


def watch(mark: str, driver: int) -> None:
    """Wait for the death of the driver, which started before this process, then kill everything it left."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(driver)
        is_driver = process.create_time() <= psutil.Process().create_time()  # otherwise another one has its number
        while is_driver and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(POLL_S)
    reap(mark)


class TerminationNotice:
    """Waits for SIGTERM in a thread. The process ends when the grace period is over, even if it is busy.

    The signal's number arrives through a pipe that the C handler writes to. It is seen even while the main thread is in
    native code. Create it in the main thread.

    `grace_s`: seconds from the signal to the end of the process.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.is_given = threading.Event()
        self._pipe, write = os.pipe()
        os.set_blocking(write, False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=end_at_sigterm)  # a forked child is not who was meant
        threading.Thread(target=self._listen, name="rlite-termination", daemon=True).start()

    def _listen(self) -> None:
        while os.read(self._pipe, 1) != bytes([signal.SIGTERM]):
            continue
        self.is_given.set()
        threading.Event().wait(self._grace_s)
        end_at_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)


def ranks_of(agent: int) -> list[int]:
    """Return the process ids of the ranks that torchrun has started; none if the process is not torchrun's agent."""
    found = []
    with suppress(psutil.Error):  # the agent has ended just now
        process = psutil.Process(agent)
        for each in process.children() if "torch.distributed.run" in process.cmdline() else ():
            with suppress(psutil.Error):  # this rank has
                if each.status() != psutil.STATUS_ZOMBIE and "RANK" in each.environ():
                    found.append(each.pid)
    return found


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]))
