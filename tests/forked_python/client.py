"""The `python` that tests start: it lets the server run the program, passes signals on, and ends as the program ends.

It imports little, so that it starts in a moment. The program has this process's arguments, environment, folder and
open files, but a process id of its own. Where this process is killed, the server kills the program.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
START_S = 120.0
MAX_LOCKS = 10
"""RLIMIT_LOCKS, by which a guard marks its processes"""


def connect(folder: str) -> socket.socket:
    """Connect to the server, which is started if this is the first program."""
    server = socket.socket(socket.AF_UNIX)
    with open(os.path.join(folder, "lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(OSError):
            server.connect(os.path.join(folder, "socket"))
            return server
        with open(os.path.join(folder, "log"), "ab") as log:
            mark = resource.getrlimit(MAX_LOCKS)
            resource.setrlimit(MAX_LOCKS, (resource.RLIM_INFINITY, mark[1]))  # no guard owns the server
            subprocess.Popen([os.path.join(folder, "start")], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            resource.setrlimit(MAX_LOCKS, mark)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with suppress(OSError):
                server.connect(os.path.join(folder, "socket"))
                return server
            time.sleep(0.02)
    raise SystemExit(f"the server of Python programs does not start: {folder}/log")


def main(folder: str) -> None:
    with connect(folder) as server:
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        environment = {**os.environ, "RLITE_TEST_CLIENT": str(os.getpid())}
        mark = resource.getrlimit(MAX_LOCKS)[0]
        request = {"argv": sys.argv[1:], "environment": environment, "mark": mark, "folder": os.getcwd()}
        data = json.dumps(request).encode(errors="surrogateescape")
        socket.send_fds(server, [struct.pack("=i", len(data))], [0, 1, 2])
        server.sendall(data)
        (pid,) = struct.unpack("=i", receive(server))
        for number in FORWARDED:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        (status,) = struct.unpack("=i", receive(server))
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def receive(server: socket.socket) -> bytes:
    data = server.recv(4, socket.MSG_WAITALL)
    if len(data) < 4:
        raise SystemExit("the server of Python programs has ended")
    return data


if __name__ == "__main__":
    main(os.path.dirname(os.path.abspath(__file__)))
