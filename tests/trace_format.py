"""Check of a whole trace against the Trace Event Format."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
ROUNDING_US = 1e-3


def read_trace(path: Path) -> list[Event]:
    """The events of a trace that was closed, after they were checked: keys, units, names, nesting."""
    events = json.loads(path.read_text())
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    open_spans: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        assert event["ph"] in ("X", "b", "e", "i", "M"), event
        assert isinstance(event["name"], str), event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name"), event
            assert isinstance(event["args"]["name"], str), event
            continue
        assert event["ts"] >= 0, event
        assert ("process_name", event["pid"], 0) in named, event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            assert ("thread_name", event["pid"], event["tid"]) in named, event
            rows[event["pid"], event["tid"]].append(event)
        if event["ph"] == "b":
            open_spans[event["cat"], event["id"]].append(event)
        if event["ph"] == "e":
            begun = open_spans[event["cat"], event["id"]].pop()
            assert begun["name"] == event["name"], "asynchronous spans nest"
            assert begun["ts"] <= event["ts"]
    assert not any(open_spans.values()), "what begins ends"
    for spans in rows.values():
        check_nesting(spans)
    return events


def check_nesting(spans: list[Event]) -> None:
    """Check that of two spans in a row one holds the other, or they do not meet."""
    ends: list[float] = []
    for span in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        end = span["ts"] + span["dur"]
        while ends and ends[-1] <= span["ts"] + ROUNDING_US:
            ends.pop()
        assert not ends or end <= ends[-1] + ROUNDING_US, span
        ends.append(end)


def rows_of(events: list[Event]) -> dict[tuple[str, str], list[Event]]:
    """Complete spans by the names of their process and row, in the order of their beginning."""
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    rows: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        pid, tid = event["pid"], event["tid"]
        rows[names["process_name", pid, 0], names["thread_name", pid, tid]].append(event)
    return rows
