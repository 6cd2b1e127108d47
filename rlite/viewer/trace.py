"""The trace of a run, read while it grows."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rlite import files
from rlite.observability.trace import earlier_traces
from rlite.viewer.lanes import Layout, layout
from rlite.wording import counted

TRACE = "trace.json"
MAX_EVENTS = 300_000
"""newest events that are shown; Perfetto opens the others"""
MAX_BYTES = 256 << 20
"""bytes of the newest events; a file may have far more, at little cost to its maker"""
NAMES = re.compile(rb'"ph": ?"M"')
"""lines that name lanes, at the beginning of a trace"""
BLOCK = 1000
"""lines that are parsed together"""
BRACKETS = (b"[", b"]", b"")
MAX_TIME = 1e16
"""microseconds: three hundred years"""


class TraceLog:
    """Reader of a trace that may be under way. It reads what was appended since.

    One thread may read it (`refresh`, `events`, `layout`) while another one looks at it (`look`, `problems`).

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self._file = files.GrowingFile(path)
        self._begin()

    def _begin(self) -> None:
        self._names: list[dict[str, Any]] = []
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._num_events = self._num_torn = 0
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
        before = self._file.num_read
        try:
            self._read()
        except FileNotFoundError:
            return False
        except OSError as error:
            self._file = files.GrowingFile(self.path)
            self._begin()
            self._failure = f"{TRACE}: cannot be read: {error.strerror or error}"
        has_news = self._file.num_read != before
        if has_news:
            self._layout = None
        return has_news

    @property
    def problems(self) -> list[str]:
        """Reasons why a part of the trace is not shown."""
        num_torn = self._num_torn + (1 if _event(self._file.rest) is None else 0)
        torn = f"{TRACE}: {counted(num_torn, 'line')} cannot be read" if num_torn else ""
        return [text for text in (self._failure, torn) if text]

    @property
    def earlier(self) -> list[str]:
        """Names of the files with the traces of earlier sessions of the run, the newest first."""
        return [path.name for path in earlier_traces(self.path) if path.exists()]

    @property
    def num_left_out(self) -> int:
        """Old events that are not shown."""
        return self._num_events - len(self._events)

    def events(self) -> list[dict[str, Any]]:
        """Return the names of the lanes and the newest events."""
        self.refresh()
        last = _event(self._file.rest)
        return [*self._names, *self._events, *([last] if last else [])]

    def layout(self) -> Layout:
        """Return the newest events as lanes. They are kept until the file changes."""
        self.refresh()
        if self._layout is None:
            self._layout = layout(self.events())
        return self._layout

    def _read(self) -> None:
        newest: deque[bytes] = deque()  # only these lines of a long trace are parsed
        num_lines = size = 0
        for line in self._file.new_lines(self._begin):
            if b'"M"' in line and NAMES.search(line):
                self._add(_event(line))
            elif line.strip() not in BRACKETS:
                newest.append(line)
                num_lines, size = num_lines + 1, size + len(line)
                while len(newest) > MAX_EVENTS or size > MAX_BYTES:
                    size -= len(newest.popleft())
        self._num_events += num_lines - len(newest)
        for event in _events(newest):
            self._add(event)

    def _add(self, event: dict[str, Any] | None) -> None:
        if event is None:
            self._num_torn += 1
        elif event and event["ph"] == "M":
            self._names.append(event)
        elif event:
            self._events.append(event)
            self._num_events += 1


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
    """Yield the event of each line, as `_event` does; none of the lines is empty."""
    left = iter(lines)
    while block := list(islice(left, BLOCK)):
        try:
            found = json.loads(b"[%s]" % b",".join(line.strip().rstrip(b",") for line in block))
        except (ValueError, RecursionError):
            found = []
        yield from map(_checked, found) if len(found) == len(block) else map(_event, block)


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line; an empty one for a line without an event, None if it cannot be read."""
    text = line.strip().rstrip(b",")
    if text in BRACKETS:
        return {}
    try:
        return _checked(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _checked(event: Any) -> dict[str, Any] | None:
    """Return an event if it has what lanes need: names and places, and times that are numbers; else None."""
    try:
        phase = str(event["ph"])
        made: dict[str, Any] = {
            "ph": phase,
            "name": str(event["name"]),
            "pid": int(event["pid"]),
            "tid": int(event["tid"]),
        }
        if phase == "M":
            return made | {"args": {"name": str(event["args"]["name"])}}
        made["ts"], made["dur"] = _microseconds(event["ts"]), _microseconds(event.get("dur", 0.0))
        if phase in ("b", "e"):
            made["id"], made["cat"] = str(event["id"]), str(event.get("cat", ""))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return None
    return made


def _microseconds(value: Any) -> float:
    if not math.isfinite(number := float(value)) or abs(number) > MAX_TIME:
        raise ValueError(f"{number} microseconds")
    return number
