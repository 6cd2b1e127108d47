"""Code that is made at run time runs in a fork of its process. It imports the standard library alone.

A function that runs what a model has written calls `exec` or `eval`, or imports a file that was just made. Python tells
that before it happens. At this place the process forks: the fork goes on with the call, has only a pipe to answer by,
and ends with its answer; the process itself passes that answer on and unwinds the call. So no such code meets the calls
that come after, and functions without it pay nothing.

A process of several threads cannot fork safely. It says so, goes on with the call, and is to be replaced.
"""

from __future__ import annotations

import contextlib
import dis
import importlib.util
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import Any

from rlite.sandbox import wire
from rlite.sandbox.confine import children, end_descendants, part, restrict

STARTED, TAINTED, FORKED, ENDED = "started", "tainted", "forked", "ended"
"""what a process says of a call: its function and arguments are loaded; it runs such code itself; it has forked (the
fork's id); the fork has ended without an answer (its exit code)"""

_PLAIN_OPERATIONS = frozenset(
    re.findall(
        r"\w+",
        """
    CACHE RESUME NOP POP_TOP PUSH_NULL PRECALL KW_NAMES CALL CALL_KW LOAD_NAME LOAD_CONST LOAD_SMALL_INT
    BINARY_OP UNARY_NEGATIVE UNARY_POSITIVE UNARY_NOT UNARY_INVERT COMPARE_OP BUILD_TUPLE BUILD_LIST BUILD_SET
    BUILD_MAP LIST_EXTEND SET_UPDATE RETURN_VALUE RETURN_CONST NOT_TAKEN
    """,
    )
)
_IMPORTS = _PLAIN_OPERATIONS | {"IMPORT_NAME", "IMPORT_STAR", "CALL_INTRINSIC_1"}
"""SymPy begins each formula with `from sympy import *`"""
_POWERFUL_NAMES = frozenset(
    re.findall(
        r"\w+",
        """
    eval exec compile open __import__ getattr setattr delattr globals locals vars input breakpoint type object
    super memoryview exit quit help
    """,
    )
)
_UNFORKABLE = ("torch", "jax", "tensorflow")
"""their pools of native threads do not survive a fork"""
_IMPORTING = importlib._bootstrap._call_with_frames_removed.__code__  # type: ignore[attr-defined]
_BEGAN = time.time()
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class Moved(BaseException):
    """The call goes on in a fork: this process unwinds it, and what it returns or raises here is void."""


class Guard:
    """Moves a call of this process into a fork where it must be.

    Args:
        descriptor: that answers are written to; in the fork it is the pipe.
        write: writes (kind, number of the call, value) to it.
        answers: the kinds that end a call.
    """

    def __init__(self, descriptor: int, write: Callable[[str, int, Any, int], None], answers: Collection[str]) -> None:
        self.is_fork = False
        self.has_moved = False
        """the call that is or was watched"""
        self.has_started = False
        self._descriptor, self._write, self._answers = descriptor, write, answers
        self._is_watching = False
        self._number = self._limit = 0
        sys.addaudithook(self._audit)
        os.register_at_fork(after_in_child=self._lose_descriptor)

    def watch(self, number: int, limit: int) -> None:
        """Begin with a call, whose answer may have so many raw bytes."""
        self._number, self._limit = number, limit
        self.has_moved = self.has_started = False
        self._is_watching = True

    def say(self, kind: str, value: Any) -> None:
        """Write about the call. Raises: WireError if the value has no form, or is too long."""
        self._write(kind, self._number, value, self._limit)
        self.has_started |= kind == STARTED

    def stop(self) -> None:
        """Look away: what comes is not of the call."""
        self._is_watching = False

    def resume(self) -> None:
        """Look again."""
        self._is_watching = not self.is_fork

    def _lose_descriptor(self) -> None:
        self._is_watching = False  # what a function forks itself cannot answer, and may do what it likes
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        restrict()

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._is_watching or event not in ("exec", "function.__new__"):
            return
        if _is_known(args[0], sys._getframe(1)):
            return
        if self.has_moved:  # the function caught it and tries again
            raise Moved
        self._is_watching = False
        if threading.active_count() > 1 or any(name in sys.modules for name in _UNFORKABLE):
            self.say(TAINTED, None)
        else:
            self._fork()

    def _fork(self) -> None:
        before = children(os.getpid())
        timers = [signal.setitimer(timer, 0) for timer in _TIMERS]  # a function's own time-out goes with it
        reader, writer = os.pipe()
        with warnings.catch_warnings():  # newer versions warn of native threads
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            self.is_fork = True
            part()
            os.close(reader)
            os.dup2(writer, self._descriptor, inheritable=False)
            os.close(writer)
            for timer, value in zip(_TIMERS, timers, strict=True):
                signal.setitimer(timer, *value)
            return
        os.close(writer)
        self.has_moved, self._is_watching = True, True
        self.say(FORKED, child)
        self._end_fork(child, self._passed_on(reader), before)
        raise Moved

    def _passed_on(self, pipe: int) -> tuple[str, Any] | None:
        """Say that the fork has started; returns its answer, or None if it ended or wrote something else before."""
        reader = wire.Reader(self._limit)
        with contextlib.suppress(wire.WireError), os.fdopen(pipe, "rb", buffering=0) as file:
            while data := file.read(1 << 18):
                for message in reader.read(data):
                    match message:
                        case ["started", self._number, None] if not self.has_started:
                            self.say(STARTED, None)
                        case [str() as kind, self._number, value] if kind in self._answers:
                            return kind, value
                        case _:
                            return None
        return None

    def _end_fork(self, child: int, answer: tuple[str, Any] | None, before: set[int]) -> None:
        """End the fork with all that it has started, and hand its answer on."""
        os.kill(child, signal.SIGKILL)  # one that is ending keeps its exit code
        _, status = os.waitpid(child, 0)
        end_descendants(lambda: before)
        with contextlib.suppress(wire.WireError):  # longer in this form than in the fork's own
            if answer is not None:
                self.say(*answer)
                return
        self.say(ENDED, os.waitstatus_to_exitcode(status))


def _is_known(code: Any, caller: FrameType) -> bool:
    """Whether code cannot be what a call has made: it is plain, or was in a file before this process began."""
    if not isinstance(code, CodeType):
        return False
    frame: FrameType | None = caller
    if caller.f_code is _IMPORTING:
        return _is_old(code.co_filename)
    while frame is not None and frame.f_code is not _IMPORTING:
        frame = frame.f_back
    return frame is not None or _is_plain(code)  # a known module may make code while it is imported


def _is_old(path: str) -> bool:
    if path.startswith("<frozen"):
        return True
    try:
        return os.stat(path).st_ctime < _BEGAN
    except OSError:
        return False


def _is_plain(code: CodeType) -> bool:
    """Whether it is an expression of names, constants and calls alone, as algebra systems make them of formulas."""
    return (
        not code.co_freevars
        and _POWERFUL_NAMES.isdisjoint(code.co_names)
        and not any(isinstance(constant, CodeType) for constant in code.co_consts)
        and all(
            instruction.opname in (_IMPORTS if code.co_names == ("sympy",) else _PLAIN_OPERATIONS)
            for instruction in dis.get_instructions(code)
        )
    )
