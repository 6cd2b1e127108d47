"""The trace of a run, read while it grows.

Lanes of a trace: who was busy, who waited, and how much was in flight. No files here.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlite import files
from rlite.observability.trace import earlier_traces
from rlite.wording import counted

Event = Mapping[str, Any]
Span = tuple[float, float, str, int]
"""start and end in seconds, name, and depth: the number of spans around it"""
PIXELS = 1500
"""spans of a window that are narrower than this share of it are drawn together"""
BINS = 300
"""number of bins in a lane of concurrent work"""
TOP = 12
"""names in the table of times"""
WAITS = re.compile("wait|held|idle")
"""names of spans in which nothing is done"""


@dataclass
class Lane:
    """A row of the trace, whose spans nest."""

    process: str
    name: str
    spans: list[Span] = field(default_factory=list)
    """in the order of their starts"""

    def cut(self, window: Window) -> list[Span]:
        """Return the spans that overlap a window."""
        first = bisect_left(self._reach, window.start)
        past = bisect_right(self.spans, window.end, lo=first, key=itemgetter(0))
        return [span for span in self.spans[first:past] if span[1] >= window.start]

    @cached_property
    def _reach(self) -> list[float]:
        """The latest end among the spans up to each one."""
        return list(accumulate((span[1] for span in self.spans), max))


class Window(NamedTuple):
    """A part of a trace, in seconds."""

    start: float
    end: float

    def within(self, start: float, end: float) -> float:
        """Return the seconds of a span that lie in the window."""
        return max(0.0, min(end, self.end) - max(start, self.start))

    @property
    def length(self) -> float:
        """Seconds of the window, at least a microsecond."""
        return max(self.end - self.start, 1e-6)


@dataclass(frozen=True)
class Layout:
    """A trace as lanes, from which every window is cut."""

    lanes: Sequence[Lane] = ()
    flights: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """spans of work in flight by kind and stage"""

    @cached_property
    def whole(self) -> Window:
        """The window from the start of the first span to the end of the last."""
        times = [span[:2] for lane in self.lanes for span in lane.spans]
        times += chain.from_iterable(self.flights.values())
        return Window(min((start for start, _ in times), default=0.0), max((end for _, end in times), default=0.0))


def layout(events: Sequence[Event]) -> Layout:
    """Return the lanes of a trace."""
    return Layout(lanes_of(events), flights_of(events))


def timeline(trace: Layout, start: float | None = None, end: float | None = None) -> dict[str, Any]:
    """Return what a window of a trace shows.

    Args:
        trace: lanes of the trace.
        start: begin of the window in seconds; None is the trace's.
        end: end of the window in seconds; None is the trace's.

    Returns:
        The window, lanes of spans, lanes of concurrent work, and the names that took the most time.
    """
    first, last = trace.whole
    window = Window(first if start is None else start, last if end is None else end)
    lanes = [_drawn(lane, window) for lane in trace.lanes]
    flights = [_concurrency(name, spans, window) for name, spans in sorted(trace.flights.items())]
    shown = {"lanes": lanes, "flights": flights, "times": _times(trace.lanes, window)}
    return {**window._asdict(), "first": first, "last": last, **shown}


def lanes_of(events: Iterable[Event]) -> list[Lane]:
    """Return the rows of a trace that have spans, by process and row."""
    names: dict[tuple[Any, ...], str] = {}
    rows: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            names[event["name"], event["pid"], event["tid"]] = str(event["args"]["name"])
        elif event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    return [
        Lane(
            names.get(("process_name", pid, 0), f"process {pid}"),
            names.get(("thread_name", pid, tid), f"row {tid}"),
            list(_nested(rows[pid, tid])),
        )
        for pid, tid in sorted(rows)
    ]


def flights_of(events: Iterable[Event]) -> dict[str, list[tuple[float, float]]]:
    """Return the spans of work in flight by kind and stage, such as "group: running"."""
    begun: dict[Any, list[tuple[str, float]]] = defaultdict(list)
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    last = 0.0
    for event in events:
        if event["ph"] == "M":
            continue
        last = max(last, event.get("ts", 0.0) / 1e6)
        if event["ph"] == "b":
            begun[event["id"]].append((_stage(event), event["ts"] / 1e6))
        elif event["ph"] == "e" and begun[event["id"]]:
            stage, start = begun[event["id"]].pop()
            found[stage].append((start, event["ts"] / 1e6))
    for spans in begun.values():  # the trace goes on, or was cut off
        for stage, start in spans:
            found[stage].append((start, last))
    return dict(found)


def _stage(event: Event) -> str:
    kind, name = str(event.get("cat", "")), str(event["name"])
    return kind if not kind or name == kind or name.startswith(f"{kind} ") else f"{kind}: {name}"


def _nested(events: Iterable[Event]) -> Iterator[Span]:
    ends: list[float] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start = event["ts"] / 1e6
        end = start + event["dur"] / 1e6
        while ends and ends[-1] <= start + 1e-9:
            ends.pop()
        yield start, end, str(event["name"]), len(ends)
        ends.append(end)


def _drawn(lane: Lane, window: Window) -> dict[str, Any]:
    """Return a lane with its spans in a window; narrow neighbours of one depth become one span without a name."""
    narrow = window.length / PIXELS
    spans: list[list[Any]] = []
    newest: dict[int, list[Any]] = {}
    for start, end, name, depth in lane.cut(window):
        before = newest.get(depth)
        if before and end - start < narrow and before[2] is None and start - before[1] < narrow:
            before[1], before[4] = max(before[1], end), before[4] + 1
            continue
        drawn = [start, end, name if end - start >= narrow else None, depth, 1, name]
        newest[depth] = drawn
        spans.append(drawn)
    kept = [
        [round(start, 6), round(end, 6), label or (name if number == 1 else f"{number} short spans"), depth]
        for start, end, label, depth, number, name in spans
    ]
    return {"process": lane.process, "name": lane.name, "busy": _busy(lane, window) / window.length, "spans": kept}


def _most_at_once(spans: Iterable[tuple[float, float]], window: Window) -> int:
    """Return how many spans are open at most at one time of a window."""
    inside = [span for span in spans if span[1] >= window.start and span[0] <= window.end]
    changes = sorted([*((start, 1) for start, _ in inside), *((end, -1) for _, end in inside)])
    return max(accumulate(change for _, change in changes), default=0)


def _busy(lane: Lane, window: Window) -> float:
    """Return the seconds of a lane in which a span is open that does not wait, and no span inside of it waits."""
    total, outermost = 0.0, None
    for start, end, name, depth in lane.cut(window):
        if outermost is not None and depth > outermost:
            continue  # inside of a wait
        outermost = depth if WAITS.search(name) else None
        if depth == 0 and outermost is None:
            total += window.within(start, end)
        elif depth > 0 and outermost is not None:
            total -= window.within(start, end)
    return total


def _own_seconds(lane: Lane, window: Window) -> Iterator[tuple[str, float, float]]:
    """Return name and seconds of each span of a lane, with and without the spans inside of it."""
    spans = lane.cut(window)
    seconds = [window.within(start, end) for start, end, _, _ in spans]
    own = list(seconds)
    around: list[int] = []  # indices of the open spans
    for index, (_, _, _, depth) in enumerate(spans):
        del around[depth:]
        if around:
            own[around[-1]] -= seconds[index]
        around.append(index)
    return zip((name for _, _, name, _ in spans), seconds, own, strict=True)


def _concurrency(name: str, spans: Sequence[tuple[float, float]], window: Window) -> dict[str, Any]:
    """Return how many spans are open in each bin of a window, on average."""
    edges = np.linspace(0.0, window.length, BINS + 1)
    times = np.array(spans, float).reshape(-1, 2) - window.start
    begun, ended = (_seconds_since(column, edges) for column in np.clip(times, 0.0, window.length).T)
    counts = (np.diff(begun - ended) * BINS / window.length).round(3)
    return {"name": name, "counts": counts.tolist(), "most": _most_at_once(spans, window), "number": len(spans)}


def _seconds_since(times: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return for each edge the sum of the seconds that have passed since each earlier time."""
    ordered = np.sort(times)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    passed = np.searchsorted(ordered, edges)
    return passed * edges - sums[passed]


def _times(lanes: Iterable[Lane], window: Window) -> list[dict[str, Any]]:
    """Return the names that took the most time of each process, with and without the time of spans inside of them."""
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for lane in lanes:
        for name, whole, own in _own_seconds(lane, window):
            seconds[lane.process, name].append((own, whole))
    totals = [(sum(own for own, _ in each), sum(whole for _, whole in each), key) for key, each in seconds.items()]
    return [
        {
            "process": key[0],
            "name": key[1],
            "seconds": whole,
            "own": own,
            "count": len(seconds[key]),
            "share": own / window.length,
        }
        for own, whole, key in sorted(totals, reverse=True)[:TOP]
    ]


TRACE = "trace.json"
MAX_EVENTS = 300_000
"""newest events that are shown; Perfetto opens the others"""
MAX_BYTES = 256 << 20
"""bytes of the newest events; a file may have far more, at little cost to its maker"""
NAMES = re.compile(rb'"ph": ?"M"')
"""lines that name lanes, at the beginning of a trace"""
BRACKETS = (b"[", b"]", b"")
BLOCK = 1000
"""lines that are parsed together"""
MAX_TIME = 1e16
"""microseconds: three hundred years"""


class TraceLog:
    """Reader of a trace that may be under way. It reads what was appended since.

    One thread may read it (`refresh`, `events`, `layout`) while another one looks at `problems`.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = files.GrowingFile(path)
        self._begin()

    def _begin(self) -> None:
        self._names: list[dict[str, Any]] = []
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._num_events = self._num_torn = 0
        self._failure = ""
        self._layout: Layout | None = None

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
    """Return what lanes need of an event: names and places as texts, times as numbers; None if it lacks them."""
    try:
        phase, name, pid, tid = str(event["ph"]), str(event["name"]), int(event["pid"]), int(event["tid"])
        made: dict[str, Any] = {"ph": phase, "name": name, "pid": pid, "tid": tid}
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
