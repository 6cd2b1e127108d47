"""The standard output of commands: a reader that closes it, a locale without some characters, and JSON without text."""

from __future__ import annotations

import io
import os
import select
import shutil
import sys
from contextlib import suppress
from typing import Any, NamedTuple

LOST_READER = 141
"""exit status of a command whose standard output was closed by its reader, such as `head`: a shell's for SIGPIPE"""


class Result(NamedTuple):
    """The result of a command, which `--json` prints in place of its text."""

    value: Any
    """value of JSON"""
    status: int = 0
    """exit status of the process"""


def escape_unknown_characters() -> None:
    """Let this process write a character that its locale lacks as a backslash and its number, in place of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def columns(most: int) -> int:
    """Return the characters of a line: at most `most`, and those of the terminal if the output is one."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return min(most, shutil.get_terminal_size((most, 24)).columns) if is_terminal else most


def has_lost_reader() -> bool:
    """Return whether the standard output is a pipe whose reader has closed it."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # closed from the start, or a text in memory
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def flush() -> None:
    """Write everything that is buffered for the standard output."""
    if sys.stdout is not None:  # it may be closed since the start of the process
        sys.stdout.flush()


def finish() -> None:
    """Write what is buffered, or discard it if the reader is gone: Python would report it at the end of the process."""
    try:
        flush()
    except BrokenPipeError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
