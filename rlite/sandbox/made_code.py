"""Detect code that is made at run time. This module imports only the standard library.

A function that runs code written by a model calls `exec` or `eval`, or imports a file that was just made. Python
raises an audit event before each of these actions.
"""

from __future__ import annotations

import dis
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

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
