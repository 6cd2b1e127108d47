"""Keep a server: start it, and end all its processes when it ends or when the process that asked for it has gone.

`python keeper.py COMMAND...` holds the reading end of a pipe as its standard input. The pipe closes when the process
that asked for the server closes it or ends, even by SIGKILL. The keeper ends with the server's exit code. It imports
only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 10.0
"""seconds between SIGTERM and SIGKILL"""
PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> int:
    """Run a command in a process group of its own, until it ends or standard input closes.

    Returns the exit code of the command; for one that a signal ended, 128 plus the signal's number, as in a shell.
    """
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_keeper)
    threading.Thread(target=end_with_input, args=(server,), daemon=True).start()
    exit_code = server.wait()
    signal_group(server, signal.SIGKILL)  # processes that it left behind
    return exit_code if exit_code >= 0 else 128 - exit_code


def end_with_keeper() -> None:
    """Let the kernel end this new process when the keeper ends, even by SIGKILL. Works on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_input(server: subprocess.Popen[bytes]) -> None:
    """Wait until standard input closes, then end the server."""
    while os.read(0, 1):  # not sys.stdin, whose lock would block the interpreter's end
        pass
    signal_group(server, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    signal_group(server, signal.SIGKILL)


def signal_group(server: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the processes that the server's group still has."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
