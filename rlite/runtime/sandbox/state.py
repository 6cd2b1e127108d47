"""Restore process state that calls share, after each call. This module imports only the standard library.

Detect code that is made at run time. This module imports only the standard library.

A function that runs code written by a model calls `exec` or `eval`, or imports a file that was just made. Python
raises an audit event before each of these actions.
"""

from __future__ import annotations

import dis
import gc
import importlib.util
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from rlite.runtime.sandbox.confine import children, end_descendants

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

        Returns:
            Whether anything had changed.

        Raises:
            OSError: a setting cannot be restored, or the started processes fork faster than they can be killed.
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

    Returns:
        Whether anything was restored.
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
    if path.startswith("<frozen"):
        return True
    try:
        return os.stat(path).st_ctime < _BEGAN
    except OSError:
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
