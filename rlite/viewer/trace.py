"""The trace of a run, read while it grows."""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

from rlite import files
from rlite.viewer.lanes import Layout, layout
from rlite.wording import counted

TRACE = "trace.json"
MAX_EVENTS = 300_000
"""newest events that are shown; Perfetto opens the others"""
NAMES = re.compile(rb'"ph": ?"M"')
"""lines that name lanes, at the beginning of a trace"""
BRACKETS = (b"[", b"]", b"")
MAX_TIME = 1e16
"""microseconds: three hundred years"""


class TraceLog:
    """Reader of a trace that may be under way. It reads what was appended since.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self._begin(0)

    def _begin(self, inode: int) -> None:
        self._names: list[dict[str, Any]] = []
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._num_events = self._num_torn = self._offset = 0
        self._inode = inode
        self._unfinished = b""
        self._failure = ""
        self._layout: Layout | None = None

    def look(self) -> bool:
        """Return whether the file has changed since the last call. It is read when a page shows it."""
        stamp = files.stamp(self.path)
        has_changed, self._stamp = stamp != self._stamp, stamp
        return has_changed

    def refresh(self) -> bool:
        """Read the events that are new. A file that was replaced is read again.

        Returns:
            True if there are new events.
        """
        before = self._offset
        try:
            with self.path.open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._inode or state.st_size < self._offset:
                    self._begin(state.st_ino)
                file.seek(self._offset)
                self._read(file)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._begin(0)
            self._failure = f"{TRACE}: cannot be read: {error.strerror or error}"
        if self._offset != before:
            self._layout = None
        return self._offset != before

    @property
    def problems(self) -> list[str]:
        """Reasons why a part of the trace is not shown."""
        num_torn = self._num_torn + (1 if _event(self._unfinished) is None else 0)
        torn = f"{TRACE}: {counted(num_torn, 'line')} cannot be read" if num_torn else ""
        return [text for text in (self._failure, torn) if text]

    @property
    def num_left_out(self) -> int:
        """Old events that are not shown."""
        return self._num_events - len(self._events)

    def events(self) -> list[dict[str, Any]]:
        """Return the names of the lanes and the newest events."""
        self.refresh()
        last = _event(self._unfinished)
        return [*self._names, *self._events, *([last] if last else [])]

    def layout(self) -> Layout:
        """Return the newest events as lanes. They are kept until the file changes."""
        self.refresh()
        if self._layout is None:
            self._layout = layout(self.events())
        return self._layout

    def _read(self, file: BinaryIO) -> None:
        newest: deque[bytes] = deque(maxlen=MAX_EVENTS)  # of a long trace, only these are parsed
        num_lines = 0
        for line in file:
            self._offset += len(line)
            line, self._unfinished = self._unfinished + line, b""
            if not line.endswith(b"\n"):  # it is being written, or a crash cut it off
                self._unfinished = line
            elif NAMES.search(line):
                self._add(line)
            elif line.strip() not in BRACKETS:
                newest.append(line)
                num_lines += 1
        self._num_events += num_lines - len(newest)
        for line in newest:
            self._add(line)

    def _add(self, line: bytes) -> None:
        event = _event(line)
        if event is None:
            self._num_torn += 1
        elif event and event["ph"] == "M":
            self._names.append(event)
        elif event:
            self._events.append(event)
            self._num_events += 1


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line; an empty one for a line without an event, None if it cannot be read."""
    text = line.strip().rstrip(b",")
    if text in BRACKETS:
        return {}
    try:
        return _checked(json.loads(text))
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None


def _checked(event: Any) -> dict[str, Any]:
    """Return an event that has what lanes need: names and places, and times that are numbers."""
    made = {**event, "ph": str(event["ph"]), "name": str(event["name"])}
    made |= {"pid": int(event["pid"]), "tid": int(event["tid"])}
    if made["ph"] == "M":
        return made | {"args": {"name": str(event["args"]["name"])}}
    if made["ph"] in ("b", "e"):
        made["id"] = str(event["id"])
    return made | {"ts": _microseconds(event["ts"]), "dur": _microseconds(event.get("dur", 0.0))}


def _microseconds(value: Any) -> float:
    if not math.isfinite(number := float(value)) or abs(number) > MAX_TIME:
        raise ValueError(f"{number} microseconds")
    return number
