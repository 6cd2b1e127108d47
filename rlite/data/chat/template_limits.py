"""Limits of a chat template, which is a program of a stranger: seconds of a processor, and characters of its text.

A template runs in the caller's thread. A thread of this module looks at the clocks of the renderings that are slow, and
raises an exception in theirs.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jinja2 import Environment

SECONDS = 1.0
"""seconds of a processor for one conversation; a thousand messages take a tenth of one"""
MAX_CHARACTERS = 2**26
MAX_INTEGER = 10**6
INTERVAL_S = 0.05
"""seconds between two looks at the clocks"""


class TemplateLimit(ValueError):
    """A chat template exceeds a limit."""


class _Stop(BaseException):
    """Raised in a thread whose template has had its time; no template and no library catches it."""


_lock = threading.Lock()
_under_way: dict[int, float] = {}
"""seconds at which each thread's rendering is stopped; one that was stopped is no longer here"""
_begun = threading.Event()
_watch: list[threading.Thread] = []


def limited(render: Callable[[], Any]) -> Any:
    """Return the result of a rendering.

    Raises:
        TemplateLimit: it takes too long, or its text is too long.
    """
    thread = threading.get_ident()
    try:
        try:
            with _lock:
                _under_way[thread] = _seconds_of(thread) + SECONDS
                _start_watching()
            _begun.set()
            result = render()
        finally:
            with _lock:
                is_stopped = _under_way.pop(thread, None) is None
            if is_stopped and not isinstance(sys.exc_info()[1], _Stop):
                time.sleep(1)  # the exception is on its way and ends this
    except _Stop:
        raise TemplateLimit(f"it takes more than {SECONDS:g} s") from None
    if isinstance(result, str) and len(result) > MAX_CHARACTERS:
        raise TemplateLimit(f"it writes {len(result)} characters, expected at most {MAX_CHARACTERS}")
    return result


def check_constants(template: str) -> None:
    """Refuse numbers that no conversation needs: an operation on them cannot be interrupted.

    Raises:
        TemplateLimit: the template has a power, or a large number.
    """
    before = ""
    for _, kind, text in Environment().lex(template):
        if (kind == "integer" and int(text.replace("_", ""), 0) > MAX_INTEGER) or (text == "**" and before not in "(,"):
            raise TemplateLimit(f"its chat template computes with powers or with numbers above {MAX_INTEGER}")
        before = before if kind == "whitespace" else text


def _seconds_of(thread: int) -> float:
    """Return the seconds of a processor that a thread has had; of the clock, where the system does not tell."""
    return time.monotonic() if sys.platform == "darwin" else time.clock_gettime(time.pthread_getcpuclockid(thread))


def _start_watching() -> None:
    if not _watch or not _watch[0].is_alive():  # a fork has no thread
        _watch[:] = [threading.Thread(target=_stop_slow_renderings, name="limits of chat templates", daemon=True)]
        _watch[0].start()


def _stop_slow_renderings() -> None:
    while True:
        _begun.wait()
        time.sleep(INTERVAL_S)
        with _lock:
            if not _under_way:
                _begun.clear()
            for thread, end in list(_under_way.items()):
                if _seconds_of(thread) > end:
                    del _under_way[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Stop))
