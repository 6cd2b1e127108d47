"""The trace of a run, read while it grows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

TRACE = "trace.json"
MAX_EVENTS = 300_000
"""events that are read; Perfetto opens the others"""
MAX_TIME = 1e16
"""microseconds: three hundred years"""


class TraceLog:
    """Reader of a trace that may be under way.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self._events: list[dict[str, Any]] = []
        self._stamp: tuple[int, int] | None = None

    def events(self) -> list[dict[str, Any]]:
        """Return the events, which are read again if the file has changed."""
        try:
            state = self.path.stat()
        except OSError:
            return []
        stamp = (state.st_mtime_ns, state.st_size)
        if stamp != self._stamp:
            try:
                self._events, self._stamp = self._read(), stamp
            except OSError as error:
                self._events, self.problems = [], [f"{TRACE}: cannot be read: {error.strerror or error}"]
        return self._events

    def _read(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        num_torn = 0
        with self.path.open("rb") as file:
            for line in file:
                text = line.strip().rstrip(b",")
                if text in (b"[", b"]", b""):
                    continue
                if len(events) >= MAX_EVENTS:
                    self.problems = [f"{TRACE}: the page shows its first {MAX_EVENTS:,} events"]
                    return events
                try:
                    events.append(_checked(json.loads(text)))
                except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
                    num_torn += 1
        self.problems = [f"{TRACE}: {num_torn} lines cannot be read"] if num_torn else []
        return events


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
