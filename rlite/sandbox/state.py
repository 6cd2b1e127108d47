"""What calls share in a process beside its memory, put back after each. It imports the standard library alone."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any

from rlite.sandbox.confine import children, end_descendants

_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


def _set_environment(saved: dict[str, str]) -> None:
    for name in os.environ.keys() - saved.keys():
        del os.environ[name]
    os.environ.update(saved)


def _set_path(saved: list[str]) -> None:
    sys.path[:] = saved


def _set_signals(saved: list[Any]) -> None:
    for number, handler in zip(_SIGNALS, saved, strict=True):
        if signal.getsignal(number) is not handler and handler is not None:
            signal.signal(number, handler)


def _set_timers(saved: list[tuple[float, float]]) -> None:
    for timer, value in zip(_TIMERS, saved, strict=True):
        signal.setitimer(timer, *value)


def _set_limits(saved: list[tuple[int, int]]) -> None:
    for limit, value in zip(_LIMITS, saved, strict=True):
        if resource.getrlimit(limit) != value:
            resource.setrlimit(limit, value)


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "limits": (lambda: [resource.getrlimit(limit) for limit in _LIMITS], _set_limits),
    "timers": (lambda: [signal.getitimer(timer) for timer in _TIMERS], _set_timers),
    "signal handlers": (lambda: [signal.getsignal(number) for number in _SIGNALS], _set_signals),
    "blocked signals": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda saved: signal.pthread_sigmask(signal.SIG_SETMASK, saved),
    ),
    "environment": (lambda: dict(os.environ), _set_environment),
    "working directory": (os.getcwd, os.chdir),
    "umask": (_umask, os.umask),
    "import path": (lambda: list(sys.path), _set_path),
    "recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "switch interval": (sys.getswitchinterval, sys.setswitchinterval),
    "tracing": (sys.gettrace, sys.settrace),
    "profiling": (sys.getprofile, sys.setprofile),
    "garbage collection": (gc.isenabled, lambda saved: gc.enable() if saved else gc.disable()),
    "priority": (lambda: os.getpriority(os.PRIO_PROCESS, 0), lambda saved: os.setpriority(os.PRIO_PROCESS, 0, saved)),
}


_HOLDERS = {"Popen": "pid", "PtyProcess": "pid", "ResourceTracker": "_pid", "ForkServer": "_forkserver_pid"}
"""classes of the standard library, joblib and pexpect that stand for a process, with the name of its number"""


class ProcessState:
    """Settings of the process, and the functions, classes and modules that names of modules stand for.

    `restore` puts back what has changed. Other values of modules are left as they are: caches and counters, which
    functions may keep.

    Args:
        functions: whose names are watched, beside those of modules.
    """

    def __init__(self, functions: Iterable[Any]) -> None:
        self._settings = {name: get() for name, (get, _) in _SETTINGS.items()}
        self._names: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._num_modules = 0
        self._kept: set[int] = set()
        self._watch_modules()
        for function in functions:
            self._watch_function(function)

    def adopt_limits(self) -> None:
        """Take the limits as they are for those to restore."""
        self._settings["limits"] = _SETTINGS["limits"][0]()

    def restore(self) -> str | None:
        """Put back what has changed. Returns what was, None if nothing; or raises what putting it back raised."""
        if not end_descendants(self._keep_children):
            raise OSError("processes that it has started fork faster than they can be ended")
        changed = [name for name in _SETTINGS if self._has_restored(name)]
        for names, saved in list(self._names.values()):
            if not _are_same(names, saved):
                changed += _restored(names, saved)
        self._watch_modules()
        return ", ".join(changed) or None

    def _keep_children(self) -> set[int]:
        """Return the children that an object still stands for: functions may keep helpers, such as a pool."""
        if not children(os.getpid()) <= self._kept:
            held = ((one, _HOLDERS.get(type(one).__name__)) for one in gc.get_objects())
            left = subprocess._active  # type: ignore[attr-defined]  # those whose object has gone
            numbers = (getattr(one, name, None) for one, name in held if name and one not in left)
            self._kept = {number for number in numbers if isinstance(number, int)}
        return self._kept

    def _has_restored(self, setting: str) -> bool:
        get, put = _SETTINGS[setting]
        saved = self._settings[setting]
        if get() == saved:
            return False
        put(saved)
        if get() != saved:
            raise OSError(f"{setting} cannot be put back")
        return True

    def _watch_modules(self) -> None:
        if len(sys.modules) == self._num_modules:
            return
        self._num_modules = len(sys.modules)
        for name, module in list(sys.modules.items()):
            # those of packages are too many to look through
            if ("." not in name or name.startswith("rlite.")) and isinstance(module, ModuleType):
                self._watch(module.__dict__)

    def _watch_function(self, function: Any, depth: int = 4) -> None:
        """Watch the names that a function reads; one that was pickled has a copy of those of its module."""
        if isinstance(function, FunctionType):
            self._watch(function.__globals__)
        elif depth and isinstance(function, (list, tuple)):
            for one in function:
                self._watch_function(one, depth - 1)
        elif depth and callable(function) and not isinstance(function, type):
            held = [*getattr(function, "__dict__", {}).values()]
            self._watch_function(
                [*held, getattr(function, "func", None), getattr(function, "__func__", None)], depth - 1
            )

    def _watch(self, names: dict[str, Any]) -> None:
        if id(names) not in self._names:
            self._names[id(names)] = (names, dict(names))


def _are_same(names: dict[str, Any], saved: dict[str, Any]) -> bool:
    try:
        return bool(names == saved)  # at C's speed, by identity first
    except Exception:  # values whose comparison raises
        return False


def _restored(names: dict[str, Any], saved: dict[str, Any]) -> Iterable[str]:
    """Put functions, classes and modules back; take over the rest. Returns the names that were put back."""
    gone = object()
    wrong = {
        name: value
        for name, value in saved.items()
        if (callable(value) or isinstance(value, ModuleType)) and names.get(name, gone) is not value
    }
    names.update(wrong)
    saved.clear()
    saved.update(names)
    where = names.get("__name__", "a module")
    return [f"{where}.{name}" for name in wrong]
