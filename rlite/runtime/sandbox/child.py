"""Serve calls inside a sandbox process. This program imports the standard library and little else: it starts fast.

The driver is trusted. It sends pickled chunks of calls, each after a length of 8 bytes. The process answers in frames
of `rlite.runtime.sandbox.wire`, [kind, number of the call, value]:

    READY                       once; the value names the protections that the kernel lacks
    STARTED                     for each call: its function and arguments are loaded
    TAINTED                     the call is about to run code that was made at run time, in this process
    PIECE                       one value of a generator
    VALUE, RAISED, MEMORY       the end of a call
    ENDED                       the fork that ran a call ended without an answer; the value is its exit code
    JUDGED                      after the last call of a chunk: whether state that calls share had to be restored

If a function runs code made at run time, its next calls run in forks of the process. A fork can answer only through a
pipe. The process passes one frame on. Then it kills the fork and everything that the fork started.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import re
import resource
import signal
import struct
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO

from rlite.errors import own_traceback
from rlite.runtime.sandbox import wire
from rlite.runtime.sandbox.confine import children, confine, end_descendants, number_in, part, restrict, silence
from rlite.runtime.sandbox.state import MadeCodeWatch, ProcessState

READY, STARTED, TAINTED, PIECE, JUDGED = "ready", "started", "tainted", "piece", "judged"
VALUE, RAISED, MEMORY, ENDED = "value", "raised", "memory", "ended"

CallMessage = tuple[int, bytes, bytes, int, bool, bool]
"""number, key of the function, pickled keyword arguments, raw bytes that the answer may have, whether to pass on what a
generator yields, whether to fork"""
Chunk = tuple[dict[bytes, bytes], int | None, list[CallMessage]]
"""functions that are new to the process, by key; bytes of memory that it may take; calls"""

LENGTH = struct.Struct("<Q")
MAX_TEXT = 4000
"""characters of a traceback that are reported"""
MAX_ANSWER = 1 << 20
"""raw bytes that an answer may have by default"""
BRAKE = 2
"""allocations fail at this multiple of the memory limit. The limit itself is watched, because a function can catch a
MemoryError and go on as if nothing had happened."""
MAX_FILES = 4096
"""files that a process with a memory limit may open: the driver looks at each of them when it watches the memory"""
_UNFORKABLE = ("torch", "jax", "tensorflow")
"""their pools of native threads do not survive a fork"""
_UNPRINTABLE = re.compile(r"[^\n\t\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]")


def same(value: Any) -> Any:
    """Return the value unchanged."""
    return value


def serve(driver: int, descriptor: int, is_silent: bool) -> None:
    """Answer calls from a socket until its other end is closed.

    Args:
        driver: process id of the program at the other end.
        descriptor: file descriptor of the socket.
        is_silent: discard standard output and standard error.
    """
    os.set_inheritable(descriptor, False)
    lacking = confine(driver)
    with os.fdopen(descriptor, "r+b", buffering=0) as channel:
        server = Server(channel, lacking)
        if is_silent:
            silence()
        while (length := _read_exactly(channel, LENGTH.size)) is not None:
            server.run(*pickle.loads(_read_exactly(channel, LENGTH.unpack(length)[0]) or b""))


class Server:
    """A server that runs calls one by one and restores the process state that they changed.

    Args:
        channel: the socket.
        lacking: protections of the process that the kernel lacks.
    """

    def __init__(self, channel: BinaryIO, lacking: str) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._runner = asyncio.Runner()
        self._blobs: dict[bytes, bytes] = {}
        self._functions: dict[bytes, tuple[Callable[..., Any], Callable[[Any], Any]]] = {}
        self._number, self._limit, self._is_stream = 0, MAX_ANSWER, False
        self._watch = MadeCodeWatch(lambda: self.say(TAINTED, None))
        os.register_at_fork(after_in_child=self._lose_channel)
        self._state = ProcessState()
        self.say(READY, lacking)

    def run(self, new: dict[bytes, bytes], memory_limit: int | None, calls: list[CallMessage]) -> None:
        """Run one chunk of calls.

        Args:
            new: pickled functions that the process does not hold yet, by key.
            memory_limit: resident bytes that the process may have; None for no limit.
            calls: messages of the calls, in order.
        """
        self._blobs.update(new)
        broken = self._load({key for _, key, *_ in calls} - self._functions.keys())
        _brake(memory_limit)
        self._state.adopt_limits()
        for self._number, key, arguments, self._limit, self._is_stream, in_fork in calls:
            self._watch.is_on = True
            try:
                if key in broken:
                    raise broken[key]
                keywords = pickle.loads(arguments)
            except BaseException as error:
                answer = _failure(error)
            else:
                self.say(STARTED, None)
                if in_fork and self._run_in_fork(key, keywords, memory_limit):
                    continue
                answer = self._answer(key, keywords, memory_limit)
            self._watch.is_on = False
            self._say_answer(answer)
        _brake(memory_limit)
        self._number = 0
        self.say(JUDGED, self._state.restore())  # what cannot be restored ends the process

    def _load(self, keys: set[bytes]) -> dict[bytes, BaseException]:
        """Load functions before the calls, so changes made by their imports stay.

        Returns:
            The exceptions of functions that failed to load, by key.
        """
        broken: dict[bytes, BaseException] = {}
        for key in keys:
            try:
                self._functions[key] = pickle.loads(self._blobs[key])
            except BaseException as error:
                broken[key] = error
        if keys:
            self._state = ProcessState()
        return broken

    def _answer(self, key: bytes, keywords: dict[str, Any], memory_limit: int | None) -> tuple[str, Any]:
        function, finish = self._functions[key]
        if memory_limit is not None:
            _brake(memory_limit)
        try:
            value = function(**keywords)
            if inspect.isawaitable(value):
                value = self._runner.run(_awaited(value))
            if self._is_stream:
                value = self._send_pieces(value)
            value = finish(value)
            if memory_limit is not None and (peak := _peak_memory()) > memory_limit:
                return MEMORY, f"it took {peak / 2**30:.2f} GiB"
            return VALUE, value
        except BaseException as error:  # SystemExit too: it is the function's, and the process serves on
            return _failure(error)

    def _send_pieces(self, generator: Any) -> Any:
        while True:
            try:
                self.say(PIECE, next(generator))
            except StopIteration as end:
                return end.value

    def _run_in_fork(self, key: bytes, keywords: dict[str, Any], memory_limit: int | None) -> bool:
        """Return whether a call could run in a fork, and run it if so.

        A process with several threads cannot fork safely.
        """
        if threading.active_count() > 1 or any(name in sys.modules for name in _UNFORKABLE):
            return False
        self._watch.is_on = False
        before = children(self._pid)
        reader, writer = os.pipe()
        with warnings.catch_warnings():  # newer versions warn of native threads
            warnings.simplefilter("ignore")
            fork = os.fork()
        if fork == 0:
            self._pid = os.getpid()
            part()
            os.dup2(writer, self._channel.fileno(), inheritable=False)  # `_lose_channel` has closed the socket
            os.close(writer)
            os.close(reader)
            self._runner = asyncio.Runner()
            self._say_answer(self._answer(key, keywords, memory_limit))
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            answer = _read_frame(pipe, self._limit)
        os.kill(fork, signal.SIGKILL)  # a fork that is ending keeps its exit code
        _, status = os.waitpid(fork, 0)
        end_descendants(lambda: before)
        if answer is None:
            self.say(ENDED, os.waitstatus_to_exitcode(status))
        else:
            self._send(answer)
        return True

    def _lose_channel(self) -> None:
        self._watch.is_on = False  # what a function forks itself cannot answer, and may do what it likes
        with contextlib.suppress(OSError):
            os.close(self._channel.fileno())
        restrict()

    def _say_answer(self, answer: tuple[str, Any]) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # the function forked, and its child has come back, too
        try:
            self.say(*answer)
        except Exception as error:  # the value has no form on the wire
            self.say(*_failure(error))

    def say(self, kind: str, value: Any) -> None:
        """Write one frame about the current call.

        Args:
            kind: kind of the frame, such as VALUE.
            value: the frame's value.

        Raises:
            WireError: the value has no form on the wire, or is too long.
        """
        self._send(wire.frame([kind, self._number, value], self._limit))

    def _send(self, frame: bytes) -> None:
        rest = memoryview(frame)
        while rest:
            rest = rest[self._channel.write(rest) :]


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _failure(error: BaseException) -> tuple[str, str]:
    """Return the answer to a call that raised."""
    _brake(None)  # else there may be no memory for the answer
    return (MEMORY, "an allocation failed") if isinstance(error, MemoryError) else (RAISED, describe(error))


def describe(error: BaseException) -> str:
    """Return the description of an exception: one line, with the traceback in the user's code below."""
    line, _, _ = text_of(error).strip().partition("\n")
    what = f"{type(error).__name__}: {line[:MAX_TEXT]}" if line else type(error).__name__
    return f"{what}\n{own_traceback(error)[-MAX_TEXT:]}"


def text_of(error: BaseException) -> str:
    """Return the text of an exception, or a substitute if the user's class fails to make the text."""
    try:
        return str(error)
    except Exception as failure:
        return f"<its text cannot be made: {type(failure).__name__}>"


def printable(text: str) -> str:
    """Return text from an untrusted process in a form that is safe for logs and terminals: short and printable."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode-escape").decode(), text[: 3 * MAX_TEXT])


def _read_exactly(channel: BinaryIO, length: int) -> bytes | None:
    parts = []
    while length:
        part = channel.read(min(length, 1 << 20))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _read_frame(pipe: BinaryIO, limit: int) -> bytes | None:
    """Return one frame unparsed, for the driver to check.

    Return None at the end of the pipe or if the frame is too long.
    """
    header = _read_exactly(pipe, wire.HEADER.size) or b"\xff" * wire.HEADER.size
    json_size, raw_size = wire.HEADER.unpack(header)
    is_short = json_size <= wire.MAX_JSON and raw_size <= limit
    body = _read_exactly(pipe, json_size + raw_size) if is_short else None
    return None if body is None else header + body


def _brake(memory_limit: int | None) -> None:
    """Make allocations fail far beyond the limit, limit the open files, and reset the measured peak."""
    if sys.platform != "linux":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = resource.RLIM_INFINITY if memory_limit is None else BRAKE * memory_limit
    if hard != resource.RLIM_INFINITY:
        soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    if memory_limit is not None:
        most = min(MAX_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with contextlib.suppress(OSError):  # some sandboxes have no such file; then the peak is that of all calls
            Path("/proc/self/clear_refs").write_text("5")


def _peak_memory() -> int:
    """Return the peak of resident bytes since the last `_brake`, or 0 if the system does not report it.

    The peak of getrusage would begin with the peak of the parent process.
    """
    return number_in("/proc/self/status", "VmHWM") * 1024
