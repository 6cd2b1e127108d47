"""The worker's handle of the process that runs vLLM's asynchronous engine.

vLLM runs in a process of its own, so that the program's main module is never imported again by vLLM's children, the
environment holds for one replica, and all of vLLM ends with one signal. Messages are pickled tuples on a socket pair:

    worker -> server    (number of the call or None, method, args, kwargs)
    server -> worker    ("reply", number, value, error)    ("tokens", chunks)    ("died", reason)

The server ends itself and all processes that vLLM started when the socket closes, also after SIGKILL of the worker.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socketpair
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil

from rlite.backends.vllm.server import Server, is_no_tracker
from rlite.errors import REBUILD, ConfigError, WorkerDied
from rlite.types import TokenChunk

P = ParamSpec("P")
T = TypeVar("T")
CALL_S = 600.0
"""time limit in seconds for an answer of the server"""
CAUSE = re.compile(
    r"^(?:\(.*?\) )?(?:ERROR [\d:. -]*(?:\[[^\]]*\])? ?)?(?P<error>[\w.]*(?:Error|Exception|Exit)): (?P<text>.+)$"
)
"""a line of vLLM's log that ends a traceback"""
ECHOES = ("Engine core initialization failed", "WorkerProc initialization failed", "has ended", "EOFError")
"""words of errors that follow the cause of a failed start"""


class EngineProcess:
    """One running vLLM engine. The constructor returns when the engine is ready.

    `timeout_s`: seconds for the start.
    """

    def __init__(self, name: str, settings: tuple, environment: Mapping[str, str], timeout_s: float) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="rlite-vllm-")
        self._changed = threading.Condition()
        self._chunks: list[TokenChunk] = []
        self._replies: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        self._death: str | None = None
        self._is_closing = False
        self._log = Path(self._folder.name) / "log"
        ours, theirs = socketpair(AF_UNIX, SOCK_STREAM)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        # vLLM makes its sockets in VLLM_RPC_BASE_PATH
        variables = {**os.environ, **environment, "PYTHONPATH": path, "VLLM_RPC_BASE_PATH": self._folder.name}
        command = [sys.executable, "-m", "rlite.backends.vllm.server", str(theirs.fileno())]
        with theirs, self._log.open("wb") as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._process = subprocess.Popen(
                command, env=variables, pass_fds=[theirs.fileno()], start_new_session=True, **streams
            )
        self._connection = Connection(ours.detach())
        self._end = weakref.finalize(self, end_session, self._process, self._connection, self._folder)
        listening: dict[str, Any] = {"args": (weakref.ref(self), self._connection), "name": f"vLLM of {name}"}
        threading.Thread(target=_listen, daemon=True, **listening).start()
        try:
            found: tuple[int, int] = self._call(timeout_s, Server.start.__name__, settings, {})
            self.cache_bytes, self.max_model_len = found
        except BaseException as error:
            told = self._start_failure(str(error))
            self.close()
            if isinstance(error, Exception):  # of any kind: vLLM's own, or the end of its process
                raise ConfigError(told) from None
            raise

    @property
    def folder(self) -> Path:
        """A folder that ends with the process."""
        return Path(self._folder.name)

    def call(self, method: Callable[Concatenate[Server, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a coroutine method of the server."""
        return self._call(CALL_S, method.__name__, args, kwargs)

    def cast(self, method: Callable[Concatenate[Server, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a method of the server without waiting for it."""
        self._send(None, method.__name__, args, kwargs)

    def _call(self, timeout_s: float, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        reply: Future[Any] = Future()
        with self._changed:
            self._replies[number] = reply
        self._send(number, method, *arguments)
        try:
            return reply.result(timeout=timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{self.name}: vLLM did not answer {method!r} within {timeout_s:g} s") from None
        finally:
            with self._changed:
                self._replies.pop(number, None)

    def take_chunks(self, wait_s: float = 0.0) -> list[TokenChunk]:
        """Return the tokens that have arrived.

        `wait_s`: seconds to wait for the first tokens.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._chunks or self._death, timeout=wait_s)
            chunks, self._chunks = self._chunks, []
            if not chunks and self._death is not None:
                raise self._as_error()
        return chunks

    def close(self) -> None:
        """End the server and every process that vLLM has started."""
        self._is_closing = True
        self._end()

    def _send(self, *message: Any) -> None:
        try:
            with self._sending:
                if self._death is not None:
                    raise self._as_error()
                self._connection.send(message)
        except (OSError, ValueError):
            with self._changed:  # the reader says who died
                self._changed.wait_for(lambda: self._death is not None, timeout=10)
            self._note_death("its connection closed")
            raise self._as_error() from None

    def _receive(self, message: tuple[Any, ...]) -> None:
        with self._changed:
            match message:
                case "tokens", chunks:
                    self._chunks += chunks
                    self._changed.notify_all()
                case "reply", number, value, None if number in self._replies:
                    self._replies[number].set_result(value)
                case "reply", number, _, error if number in self._replies:
                    self._replies[number].set_exception(RuntimeError(error))
                case "died", reason:
                    self._note_death(reason)

    def _lost(self) -> None:
        """Note that the connection has ended."""
        if self._is_closing:
            return self._note_death("it was closed")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        ended = "closed its connection" if code is None else f"ended with exit code {code}"
        if code and code < 0:
            ended = f"was killed by {signal.Signals(-code).name}"
        self._note_death(f"vLLM's server, process {self._process.pid}, {ended}")

    def _note_death(self, reason: str) -> None:
        with self._changed:
            if self._death is None:
                self._death = reason
            replies, self._replies = list(self._replies.values()), {}
            self._changed.notify_all()
        for reply in replies:
            if not reply.done():
                reply.set_exception(self._as_error())

    def _as_error(self) -> WorkerDied:
        return WorkerDied(f"{self.name} can no longer generate: {self._death}. {REBUILD}")

    def _start_failure(self, reason: str) -> str:
        cause = root_cause(self._log.read_text(errors="replace")) if any(echo in reason for echo in ECHOES) else None
        return f"vLLM could not start on {self.name}: {cause or reason}"


def root_cause(log: str) -> str | None:
    """Return the error that ended vLLM's start, from its log; None if the log holds none.

    vLLM raises "Engine core initialization failed" in one process after another raised the cause.
    """
    for line in log.splitlines():
        if (match := CAUSE.match(line)) is not None and not any(echo in line for echo in ECHOES):
            return f"{match['error'].rpartition('.')[2]}: {match['text']}"
    return None


def end_session(
    process: subprocess.Popen[bytes], connection: Connection, folder: tempfile.TemporaryDirectory[str]
) -> None:
    """End every process of the server's session, and remove its files.

    vLLM's resource tracker is left to end by itself: it removes shared memory that killed processes leave behind.
    """
    for _ in range(50):
        members = session_members(process.pid)
        for member in members:
            with contextlib.suppress(psutil.Error):
                member.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
        if process.returncode is not None and not members:
            break
    with contextlib.suppress(OSError):  # last: only the server's end wakes the thread that listens
        connection.close()
    folder.cleanup()


def session_members(session: int) -> list[psutil.Process]:
    """Return the living processes of a session, but for the resource tracker."""
    found = []
    for member in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):  # it has ended
            is_alive = os.getsid(member.pid) == session and member.status() != psutil.STATUS_ZOMBIE
            if is_alive and is_no_tracker(member):
                found.append(member)
    return found


def _listen(owner: weakref.ref[EngineProcess], connection: Connection) -> None:
    """Pass messages to the owner until the connection ends or the owner is gone."""
    while True:
        try:
            message = connection.recv()
        except (OSError, EOFError, TypeError):  # the last if another thread closes it
            break
        if (process := owner()) is None:
            return
        process._receive(message)
        del process
    if (process := owner()) is not None:
        process._lost()
