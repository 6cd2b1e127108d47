"""Keep a process between the driver and a sandbox process, to end all processes that user code leaves behind.

User code may start processes that start others and end, faster than they can be listed. Where Landlock scopes signals
(Linux 6.12), the keeper's kill(-1) reaches exactly its descendants, all at once: the kernel lets none of them fork
meanwhile. Elsewhere the keeper lists and kills them until none is left. It does so when the sandbox process ends, when
the driver asks for it by SIGTERM, and when the driver ends, for any reason. User code cannot signal the keeper.

This module imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys

from rlite.runtime.sandbox.confine import end_descendants, follow_parent, restrict

_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def keep(driver: int, descriptor: int) -> None:
    """Return in a new child, the sandbox process. This process becomes its keeper, and ends as the child ends.

    On systems other than Linux, return without a keeper.

    Args:
        driver: process id of the parent.
        descriptor: file descriptor that only the child holds.
    """
    if sys.platform != "linux":
        return
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    follow_parent(signal.SIGTERM)
    if os.getppid() != driver:  # it ended before it could be followed
        os._exit(1)
    is_scoped = restrict() and _is_refused(driver)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        os.setpgid(0, 0)  # signals to its own group do not reach the keeper
        return
    os.close(descriptor)
    _wait_for_end(child)
    _end_as(_end_all(child, is_scoped))


def _is_refused(pid: int) -> bool:
    """Return whether this process may not signal another one of the same user."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    return False


def _wait_for_end(child: int) -> None:
    """Return when the child has ended, without reaping it, or when this process shall end it."""
    while signal.sigwait(_SIGNALS) == signal.SIGCHLD:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return


def _end_all(child: int, is_scoped: bool) -> int:
    """Kill all descendants of this process.

    Args:
        child: process id of the child whose exit code is wanted.
        is_scoped: this process can signal only its descendants.

    Returns:
        The exit code of the child.
    """
    os.kill(-1 if is_scoped else child, signal.SIGKILL)  # an ended child keeps its exit code
    _, status = os.waitpid(child, 0)
    if not is_scoped:
        end_descendants()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    return os.waitstatus_to_exitcode(status)


def _end_as(exit_code: int) -> None:
    """End this process with the exit code of another."""
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if exit_code != -signal.SIGKILL:  # which has no handler
            signal.signal(-exit_code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-exit_code})
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)
