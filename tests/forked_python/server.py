"""Server that forks Python programs from one process, which has imported what they need: `server.py FOLDER OWNER`.

It ends with the process OWNER.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import os
import resource
import runpy
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

# what programs, tests and ray import; not ray, which reads its settings from the environment when it is imported
PRELOADED = (
    "aiohttp.web",
    "datasets",
    "google.protobuf.json_format",
    "hypothesis.extra.numpy",
    "jsonschema",
    "matplotlib.pyplot",
    "msgpack",
    "numpy",
    "openai",
    "peft",
    "pdb",
    "pytest",
    "requests",
    "torch.distributed.run",
    "uvloop",
    "rlite.runtime.cluster.torchrun",
    "rlite.backends.embedded.worker",
    "rlite.backends.fsdp2.worker",
    "rlite.trainer.ppo",
    "rlite.trainer.sft",
    "tests.integration.modules",
    "tests.integration.worlds",
)

MAX_LOCKS = 10
"""RLIMIT_LOCKS, by which a guard marks its processes"""


class Server:
    """Forks a process for each connection, and sends the process's id and how it ended."""

    def __init__(self, folder: str, owner: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.path.join(folder, "socket"))
        self._listener.listen(64)
        self._owner = os.pidfd_open(owner)
        self._clients: dict[int, tuple[int, socket.socket]] = {}
        """by the descriptor of the process: its id and its client"""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._owner, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any] | None:
        """Serve until the owner ends and return nothing; in each forked process, return the request."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    if request := self._accept():
                        return request
                elif key.fileobj == self._owner:
                    return None
                elif key.fd in self._clients:
                    self._report(key.fd)
                elif key.fd in self._selector.get_map():  # the client was killed
                    self._selector.unregister(key.fd)
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(key.data, signal.SIGKILL)

    def _accept(self) -> dict[str, Any] | None:
        client, _ = self._listener.accept()
        head, files, _, _ = socket.recv_fds(client, 4, 3)
        try:
            (length,) = struct.unpack("=i", head)
            request = json.loads(client.recv(length, socket.MSG_WAITALL).decode(errors="surrogateescape"))
            if (pid := os.fork()) == 0:
                for number, file in enumerate(files):
                    os.dup2(file, number)
                # the server's own streams know files that may be of another kind
                sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
                sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
                self._leave(client)
                return request
            self._follow(pid, client)
        except (ValueError, struct.error):  # the client was killed
            client.close()
        finally:
            for file in files:
                os.close(file)
        return None

    def _leave(self, client: socket.socket) -> None:
        """Close in a forked process what belongs to the server."""
        self._selector.close()
        self._listener.close()
        os.close(self._owner)
        for process, (_, other) in self._clients.items():
            os.close(process)
            other.close()
        client.close()

    def _follow(self, pid: int, client: socket.socket) -> None:
        process = os.pidfd_open(pid)
        self._clients[process] = (pid, client)
        with suppress(OSError):
            client.sendall(struct.pack("=i", pid))
        self._selector.register(process, selectors.EVENT_READ)
        self._selector.register(client, selectors.EVENT_READ, process)

    def _report(self, process: int) -> None:
        pid, client = self._clients.pop(process)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(process)
        os.close(process)
        if client.fileno() in self._selector.get_map():
            self._selector.unregister(client)
        with suppress(OSError):
            client.sendall(struct.pack("=i", status))
        client.close()


def take_environment(environment: dict[str, str]) -> None:
    """Set the environment, also in /proc, where others look for marks in it."""
    os.environ.clear()
    os.environ.update(environment)
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc_pid_stat(5)
    if len(block) > end - start:
        raise SystemExit(f"no room for an environment of {len(block)} bytes")
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


def run(argv: list[str]) -> None:
    """Run `python *argv`."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [entry for entry in entries if entry and entry not in sys.path]
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    while argv[0].startswith("-") and argv[0] not in ("-m", "-c"):
        argv = argv[1:]  # such as -u
    if argv[:2] == ["-m", "torch.distributed.run"] and os.environ.get("RLITE_TEST_RANKS") == "children":
        subprocess_handler.Popen = Rank  # type: ignore[attr-defined]
    if argv[0].endswith("/ray/_private/workers/setup_worker.py"):
        os.execvp = functools.partial(go_on, os.execvp)
    if argv[0] == "-m":
        sys.modules.pop(argv[1], None)  # it runs as __main__
        sys.argv = ["-m", *argv[2:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
    elif argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        sys.path.insert(0, "")
        exec(compile(argv[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
        main.__file__ = argv[0]
        with open(argv[0], "rb") as file:
            code = compile(file.read(), argv[0], "exec")
        exec(code, vars(main))


def end(error: BaseException | None) -> None:
    """End as Python does, but leave the modules to the system: to tear them down would first copy their memory."""
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif error is not None:
        status = 1
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()  # objects of the program alone
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status & 0xFF)


def go_on(execvp: Callable[[str, Sequence[str]], None], file: str, args: Sequence[str]) -> None:
    """Run the program that Ray's set-up of a worker executes, in the process that has imported Ray already."""
    os.execvp = execvp  # type: ignore[assignment]
    word, executable, *argv = shlex.split(args[-1])
    if (word, executable) == ("exec", os.path.join(os.environ["RLITE_TEST_FORKED_PYTHON"], "python")):
        run_to_end(argv, dict(os.environ))
    execvp(file, args)


class Rank(subprocess.Popen):
    """Rank of torchrun that is a fork of its agent, and so its child, as a rank is that the agent starts."""

    def __init__(self, args: Sequence[str], env: dict[str, str], **options: Any) -> None:
        super().__init__(args, env=env, preexec_fn=functools.partial(self._run, args[1:], env), **options)

    def _run(self, argv: list[str], environment: dict[str, str]) -> None:
        """Do in the new process what the executable would do."""
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        atexit._clear()  # of the agent
        run_to_end(list(argv), environment)


def run_to_end(argv: list[str], environment: dict[str, str]) -> None:
    """Run `python *argv` in this environment, and end the process."""
    take_environment(environment)
    sys.modules["numpy"].random.seed()  # Python's own generator does it itself
    try:
        run(argv)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        end(error)
    end(None)


def main(folder: str, owner: int) -> None:
    os.setsid()
    sys.path.pop(0)  # of this file, which programs do not see
    for name in PRELOADED:
        if importlib.util.find_spec(name.partition(".")[0]):  # an environment may have not all of them
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    if request := Server(folder, owner).serve():
        os.setpgrp()
        resource.setrlimit(MAX_LOCKS, (request["mark"], resource.getrlimit(MAX_LOCKS)[1]))
        os.chdir(request["folder"])
        run_to_end(request["argv"], request["environment"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
