"""Serve calls inside a sandbox process. This program imports the standard library and little else: it starts fast.

The driver is trusted. It sends pickled chunks of calls. The process answers in frames of `rlite.runtime.sandbox.wire`,
[kind, number of the call, value]:

    READY                       once; the value names the protections that the kernel lacks
    STARTED                     for each call: its function and arguments are loaded
    TAINTED                     the call is about to run code that was made at run time, in this process
    PIECE                       one value of a generator
    VALUE, RAISED, MEMORY       the end of a call
    ENDED                       the fork that ran a call ended without an answer; the value is its exit code
    JUDGED                      after the last call of a chunk: whether state that calls share had to be restored

If a function runs code made at run time, its next calls run in forks of the process. A fork can answer only through a
pipe. The process passes one frame on. Then it kills the fork and everything that the fork started.

After each call the process restores the state that calls share.

A function that runs code written by a model calls `exec` or `eval`, or imports a file that was just made. Python
raises an audit event before each of these actions.
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import gc
import importlib.util
import inspect
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, BinaryIO

from rlite.errors import own_traceback
from rlite.runtime.sandbox import wire
from rlite.runtime.sandbox.confine import (
    children,
    confine,
    end_descendants,
    follow_parent,
    has_children,
    number_in,
    restrict,
    silence,
)
from rlite.runtime.sandbox.prints import PrintStream

_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


def _set_environment(saved: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(saved)


Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""functions that read and write a setting"""


def _of_each(numbers: Sequence[int], get: Callable[[int], Any], put: Callable[[int, Any], Any]) -> Setting:
    def put_all(saved: list[Any]) -> None:
        for number, value in zip(numbers, saved, strict=True):
            if value is not None and get(number) != value:
                put(number, value)

    return lambda: [get(number) for number in numbers], put_all


_SETTINGS: list[Setting] = [
    _of_each(_LIMITS, resource.getrlimit, resource.setrlimit),
    _of_each(_TIMERS, signal.getitimer, lambda timer, value: signal.setitimer(timer, *value)),
    _of_each(_SIGNALS, signal.getsignal, signal.signal),
    (lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()), lambda old: signal.pthread_sigmask(signal.SIG_SETMASK, old)),
    (lambda: dict(os.environ), _set_environment),
    (os.getcwd, os.chdir),
    (_umask, os.umask),
    (lambda: list(sys.path), lambda old: sys.path.__setitem__(slice(None), old)),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.getswitchinterval, sys.setswitchinterval),
    (sys.gettrace, sys.settrace),
    (sys.getprofile, sys.setprofile),
    (gc.isenabled, lambda is_enabled: gc.enable() if is_enabled else gc.disable()),
    (lambda: os.getpriority(os.PRIO_PROCESS, 0), lambda old: os.setpriority(os.PRIO_PROCESS, 0, old)),
]
if hasattr(os, "sched_setaffinity"):
    _SETTINGS.append((lambda: os.sched_getaffinity(0), lambda old: os.sched_setaffinity(0, old)))

_HOLDERS = {"Popen": "pid", "PtyProcess": "pid", "ResourceTracker": "_pid", "ForkServer": "_forkserver_pid"}
"""classes of the standard library, joblib and pexpect that stand for a process, with the attribute of its number"""


class ProcessState:
    """Settings of the process, and the functions, classes and modules that module attributes refer to.

    `restore` restores changed settings and attributes. Other attributes of modules stay changed, because functions may
    keep caches and counters. Programs that a call left running are killed, unless an object still represents them.
    """

    def __init__(self) -> None:
        self._settings = [get() for get, _ in _SETTINGS]
        self._names: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._num_modules = 0
        self._kept: set[int] = set()
        self._watch_modules()
        for one in gc.get_objects():  # a function that was pickled by value has a copy of the names of its module
            if isinstance(one, FunctionType) and not _is_of_module(one.__globals__):
                self._watch(one.__globals__)

    def adopt_limits(self) -> None:
        """Save the current resource limits as the limits to restore."""
        self._settings[0] = _SETTINGS[0][0]()

    def restore(self) -> bool:
        """Restore what has changed.

        Returns whether anything had changed.
        """
        if not end_descendants(self._keep_children):
            raise OSError("processes that it has started fork faster than they can be ended")
        has_changed = False
        for (get, put), saved in zip(_SETTINGS, self._settings, strict=True):
            if get() != saved:
                has_changed = True
                put(saved)
                if get() != saved:
                    raise OSError("a setting cannot be restored")
        for names, saved in list(self._names.values()):
            has_changed |= not _are_same(names, saved) and _restore_names(names, saved)
        self._watch_modules()
        return has_changed

    def _keep_children(self) -> set[int]:
        """Return the children that an object still represents. Functions may keep child processes, such as a pool."""
        if not children(os.getpid()) <= self._kept:
            held = ((one, _HOLDERS.get(type(one).__name__)) for one in gc.get_objects())
            left = subprocess._active  # type: ignore[attr-defined]  # those whose object has gone
            numbers = (getattr(one, name, None) for one, name in held if name and one not in left)
            self._kept = {number for number in numbers if isinstance(number, int)}
        return self._kept

    def _watch_modules(self) -> None:
        if len(sys.modules) == self._num_modules:
            return
        self._num_modules = len(sys.modules)
        for name, module in list(sys.modules.items()):
            # those of packages are too many to look through
            if ("." not in name or name.startswith("rlite.")) and isinstance(module, ModuleType):
                self._watch(module.__dict__)

    def _watch(self, names: dict[str, Any]) -> None:
        if id(names) not in self._names:
            self._names[id(names)] = (names, dict(names))


def _is_of_module(names: dict[str, Any]) -> bool:
    return getattr(sys.modules.get(names.get("__name__", "")), "__dict__", None) is names


def _are_same(names: dict[str, Any], saved: dict[str, Any]) -> bool:
    try:
        return bool(names == saved)  # at C's speed, by identity first
    except Exception:  # values whose comparison raises
        return False


def _restore_names(names: dict[str, Any], saved: dict[str, Any]) -> bool:
    """Restore functions, classes and modules, and adopt other values.

    Returns whether anything was restored.
    """
    gone = object()
    wrong = {
        name: value
        for name, value in saved.items()
        if (callable(value) or isinstance(value, ModuleType)) and names.get(name, gone) is not value
    }
    names.update(wrong)
    saved.clear()
    saved.update(names)
    return bool(wrong)


_PLAIN_OPERATIONS = re.compile(
    r"CACHE|RESUME|NOP|POP_TOP|PUSH_NULL|PRECALL|KW_NAMES|CALL|CALL_KW|LOAD_(NAME|CONST|SMALL_INT)|BINARY_OP|UNARY_\w+|"
    r"COMPARE_OP|BUILD_(TUPLE|LIST|SET|MAP)|LIST_EXTEND|SET_UPDATE|RETURN_(VALUE|CONST)|NOT_TAKEN"
)
_SYMPY_IMPORTS = re.compile(_PLAIN_OPERATIONS.pattern + r"|IMPORT_NAME|IMPORT_STAR|CALL_INTRINSIC_1")
"""SymPy begins each formula with `from sympy import *`"""
_POWERFUL_NAMES = re.compile(
    r"eval|exec|compile|open|__import__|[gs]etattr|delattr|globals|locals|vars|input|breakpoint|type|object|super|"
    r"memoryview|exit|quit|help"
)
_IMPORTING = importlib._bootstrap._call_with_frames_removed.__code__  # type: ignore[attr-defined]
_BEGAN = time.time()


class MadeCodeWatch:
    """A watch that calls `report` once per watched call, before the first run of code that the call made."""

    def __init__(self, report: Callable[[], None]) -> None:
        self.is_on = False
        self._report = report
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_on and event in ("exec", "function.__new__") and not _is_known(args[0], sys._getframe(1)):
            self.is_on = False
            self._report()


def _is_known(code: Any, caller: FrameType) -> bool:
    """Return whether a call cannot have made this code.

    Such code is plain, or was in a file before this process began.
    """
    if not isinstance(code, CodeType):
        return False
    frame: FrameType | None = caller
    if caller.f_code is _IMPORTING:
        return _is_old(code.co_filename)
    while frame is not None and frame.f_code is not _IMPORTING:
        frame = frame.f_back
    return frame is not None or _is_plain(code)  # a known module may make code while it is imported


def _is_old(path: str) -> bool:
    with contextlib.suppress(OSError):
        return path.startswith("<frozen") or os.stat(path).st_ctime < _BEGAN
    return False


def _is_plain(code: CodeType) -> bool:
    """Return whether code is one expression of names, constants and calls.

    Algebra systems make such code from formulas.
    """
    allowed = _SYMPY_IMPORTS if code.co_names == ("sympy",) else _PLAIN_OPERATIONS
    return (
        not code.co_freevars
        and not any(map(_POWERFUL_NAMES.fullmatch, code.co_names))
        and not any(isinstance(constant, CodeType) for constant in code.co_consts)
        and all(allowed.fullmatch(instruction.opname) for instruction in dis.get_instructions(code))
    )


READY, STARTED, TAINTED, PIECE, JUDGED = "ready", "started", "tainted", "piece", "judged"
VALUE, RAISED, MEMORY, ENDED = "value", "raised", "memory", "ended"

CallMessage = tuple[int, bytes, bytes, int, bool, bool]
"""number, key of the function, pickled keyword arguments, raw bytes that the answer may have, whether to pass on what a
generator yields, whether to fork"""
Chunk = tuple[dict[bytes, bytes], int | None, list[CallMessage]]
"""functions that are new to the process, by key; bytes of memory that it may take; calls"""

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


def serve(driver: int, descriptor: int, prints: int, is_silent: bool) -> None:
    """Answer calls from a socket until its other end is closed."""
    os.set_inheritable(descriptor, False)
    lacking = confine(driver)
    with os.fdopen(descriptor, "r+b", buffering=0) as channel, open(descriptor, "rb", closefd=False) as chunks:
        stream = PrintStream(prints)
        server = Server(channel, lacking, stream)
        if is_silent:
            silence()
            stream.install()
        with contextlib.suppress(EOFError):  # the driver has closed its end
            while True:
                server.run(*pickle.load(chunks))


class Server:
    """A server that runs calls one by one and restores the process state that they changed."""

    def __init__(self, channel: BinaryIO, lacking: str, prints: PrintStream) -> None:
        self._channel, self._prints = channel, prints
        self._pid = self._apart = os.getpid()
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

        `memory_limit`: resident bytes that the process may have; None for no limit.
        """
        self._blobs.update(new)
        self._prints.begin(calls[0][0], is_first=True)  # what imports print is of the first call
        broken = self._load({key for _, key, *_ in calls} - self._functions.keys())
        _brake(memory_limit)
        self._state.adopt_limits()
        for self._number, key, arguments, self._limit, self._is_stream, in_fork in calls:
            self._prints.begin(self._number)
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

        Returns the exceptions of functions that failed to load, by key.
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
            # since `_brake`; the peak of getrusage would begin with the peak of the parent process
            if memory_limit is not None and (peak := number_in("/proc/self/status", "VmHWM") * 1024) > memory_limit:
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
        before = children(self._pid) if has_children() else set()
        reader, writer = os.pipe()
        with warnings.catch_warnings():  # newer versions warn of native threads
            warnings.simplefilter("ignore")
            fork = os.fork()
        if fork == 0:
            self._pid = os.getpid()
            if self._apart != self._pid:  # what fails after a fork is otherwise ignored
                os._exit(1)
            follow_parent(signal.SIGKILL)
            os.dup2(writer, self._channel.fileno(), inheritable=False)  # `_lose_channel` has closed the socket
            os.close(writer)
            os.close(reader)
            self._runner = asyncio.Runner()
            self._say_answer(self._answer(key, keywords, memory_limit))
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
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
        self._apart = os.getpid()

    def _say_answer(self, answer: tuple[str, Any]) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # the function forked, and its child has come back, too
        try:
            self.say(*answer)
        except Exception as error:  # the value has no form on the wire
            self.say(*_failure(error))

    def say(self, kind: str, value: Any) -> None:
        """Write one frame about the current call."""
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


def _read_frame(pipe: BinaryIO, limit: int) -> bytes | None:
    """Return one frame unparsed, for the driver to check.

    Return None at the end of the pipe or if the frame is too long.
    """
    header = pipe.read(wire.HEADER.size)
    json_size, raw_size = wire.HEADER.unpack(header.ljust(wire.HEADER.size, b"\xff"))
    if json_size > wire.MAX_JSON or raw_size > limit:
        return None
    body = pipe.read(json_size + raw_size)
    return header + body if len(body) == json_size + raw_size else None


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
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
