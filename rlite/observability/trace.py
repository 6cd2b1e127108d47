"""A trace of the pipeline, who waited for whom, in the Trace Event Format that Perfetto and chrome://tracing open.

    trace.start("runs/ppo/trace.json")
    with trace.span("update"):                       # this thread is busy, or waits; spans nest
        ...
    with trace.task("reward", item=3):               # one of many that run in turns on an event loop
        ...
    trace.stage("group", 17, "waiting")              # an item passes through stages, in any thread
    trace.stage("group", 17, "running")
    trace.finish("group", 17, "consumed")
    trace.stop()

A process has at most one trace. Without a trace, each of these calls costs a fraction of a microsecond. Events are
buffered briefly and written in pieces: memory stays bounded, and the file of a killed process can be opened. A trace
that cannot be written, such as on a full disk, ends with a warning, and the program goes on. `start` keeps an earlier
trace of the same path: the newest of them is trace.1.json. Times are those of `time.perf_counter`, written in
microseconds since `start`.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from rlite.errors import why_not_written, writing
from rlite.observability.stats_tracker import NoTracer, complete, finish, span, stage, task, trace_by, tracer
from rlite.observability.stats_tracker import is_traced as is_on

logger = logging.getLogger(__name__)
MAX_EVENTS = 2_000_000
"""largest number of events in a trace; about 300 MB of JSON"""
HELD_EVENTS = 4096
"""events that are buffered between two writes"""
MAX_EARLIER = 9
"""earlier traces that are kept"""
THREADS, TASKS = "driver", "in flight"
"""names in the trace of two groups of rows: the threads of this process, and the tasks of event loops"""

Track = tuple[str, str]
"""a named row of a named process"""
Row = tuple[int, int]
"""the numbers of a process and of a row in it"""
Key = tuple[str, int]
"""kind and number of spans that belong to no thread"""
Inner = Sequence[tuple[str, float, float]]
"""spans inside another one: name, start and end"""


class Tracer:
    """One trace, from its first event to `close`. Any thread may add to it.

    If the file cannot be written, one warning is logged, and later events are dropped.

    `path`: where it is written; an older file is kept, see `set_aside`. `max_events`: largest number of events; later
    events are counted, and the last event has their number.
    """

    def __init__(self, path: str | Path, max_events: int = MAX_EVENTS) -> None:
        self.path = Path(path)
        self.num_dropped = 0
        self._max_events = max_events
        self._num_events = 0
        self._held: list[dict[str, Any]] = []
        self._ids = itertools.count(1)
        self._rows: dict[Track, Row] = {}
        self._processes: dict[str, int] = {}
        self._ends: dict[Track, float] = {}
        self._open: dict[Key, list[str]] = {}
        self._lock = threading.RLock()
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            set_aside(self.path)
            self._file = self.path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._began = time.perf_counter()

    def complete(
        self, name: str, started: float, ended: float, track: Track | None = None, inner: Inner = (), /, **args: Any
    ) -> None:
        """Record an event with start and end in `perf_counter` seconds, unless it started before the trace.

        `track`: (process, row); default: this thread's row.
        """
        if started < self._began:
            return
        with self._lock:
            if track is not None:
                started = max(started, self._ends.get(track, started))
                self._ends[track] = ended = max(started, ended)
            row = self._row(track)
            self._add("X", name, started, row, args, dur=(ended - started) * 1e6)
            for label, start, end in inner:
                start, end = max(start, started), min(end, ended)
                self._add("X", label, start, row, {}, dur=max(end - start, 0.0) * 1e6)

    def span(self, name: str, args: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return a context that records the block's time on this thread's row."""
        started = time.perf_counter()
        return _ending(lambda **raised: self.complete(name, started, time.perf_counter(), **{**args, **raised}))

    def task(self, name: str, args: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return a context that records the block's time on its own row."""
        with self._lock:
            key = (name, next(self._ids))
            self._begin(key, name, args)
        return _ending(functools.partial(self.end, key))

    def instant(self, name: str, /, **args: Any) -> None:
        """Record an event of this moment, drawn across all rows; `args` are shown with it."""
        with self._lock:
            self._add("i", name, time.perf_counter(), self._row(None), args, s="g")

    def end(self, key: Key, **args: Any) -> None:
        """End a task, or an item and its current stage; `args` are shown at the end."""
        with self._lock:
            self._leave(key, 0, args)

    def stage(self, kind: str, number: int, name: str, /, **args: Any) -> None:
        """Move an item into a stage, out of its previous one. The first stage begins the item's own span."""
        key = (kind, number)
        with self._lock:
            self._leave(key, 1)
            if key not in self._open:
                self._begin(key, f"{kind} {number}")
            if key in self._open:
                self._begin(key, name, args)

    def finish(self, kind: str, number: int, reason: str) -> None:
        """End an item and its current stage."""
        self.end((kind, number), reason=reason)

    def flush(self) -> None:
        """Write the events recorded so far."""
        with self._lock:
            held, self._held = self._held, []
            if held and not self._file.closed:
                with self._writing():
                    self._file.writelines(f"{json.dumps(event, default=str)},\n" for event in held)
                    self._file.flush()

    def close(self) -> None:
        """End open spans and close the file."""
        with self._lock:
            if self._file.closed:
                return
            for key in list(self._open):
                self.end(key, reason="the trace ended")
            self._max_events = self._num_events + 1
            self.instant("the trace ends", num_dropped=self.num_dropped)
            self.flush()
            if not self.is_closed:
                with self._writing():
                    # the last event must not be followed by a comma
                    self._file.seek(self._file.tell() - 2)
                    self._file.truncate()
                    self._file.write("\n]\n")
                    self._file.close()

    @property
    def is_closed(self) -> bool:
        """True after `close`, and after the file could not be written."""
        return self._file.closed

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """End the trace with a warning if the file cannot be written inside the block."""
        try:
            yield
        except OSError as error:
            message = f"{self.path}: the trace ends here, because it could not be written: {why_not_written(error)}. "
            logger.warning("%sThe program goes on without a trace; free space before the next one", message)
            self._open.clear()
            with suppress(OSError):  # what is left in the buffer fails once more
                self._file.close()

    def _begin(self, key: Key, name: str, args: Mapping[str, Any] = {}) -> None:
        """Begin a span inside the open spans of its key, unless the trace is full."""
        if self._asynchronous("b", key, name, args):
            self._open.setdefault(key, []).append(name)

    def _leave(self, key: Key, depth: int, args: Mapping[str, Any] = {}) -> None:
        """End the open spans of a key but the outermost `depth`; `args` are shown at the end of the outermost span."""
        spans = self._open.pop(key, [])
        while len(spans) > depth:
            name = spans.pop()
            self._asynchronous("e", key, name, {} if spans else args)
        if spans:
            self._open[key] = spans

    def _asynchronous(self, phase: str, key: Key, name: str, args: Mapping[str, Any]) -> bool:
        kind, number = key  # category and id tell asynchronous events apart; they have no row
        row = (self._process(TASKS), 0)
        return self._add(phase, name, time.perf_counter(), row, args, cat=kind, id=f"{kind}-{number}")

    def _add(self, phase: str, name: str, at: float, row: Row, args: Mapping[str, Any], **fields: Any) -> bool:
        """Add an event.

        Returns False if the trace is full or closed. The end of a kept span is always kept in an open trace.
        """
        if self.is_closed or (self._num_events >= self._max_events and phase != "e"):
            self.num_dropped += 1
            return False
        self._num_events += 1
        process, thread = row
        event = {"ph": phase, "name": name, "ts": (at - self._began) * 1e6, "pid": process, "tid": thread, **fields}
        if args:
            event["args"] = dict(args)
        self._hold(event)
        return True

    def _hold(self, event: dict[str, Any]) -> None:
        self._held.append(event)
        if len(self._held) >= HELD_EVENTS:
            self.flush()

    def _row(self, track: Track | None) -> Row:
        """Return process and thread number of a row, which is named at first use."""
        if track is None:
            thread = threading.current_thread()
            track = (THREADS, thread.name if thread is not threading.main_thread() else "the program")
        if track not in self._rows:
            process = self._process(track[0])
            row = sum(other == process for other, _ in self._rows.values()) + 1
            self._rows[track] = process, row
            self._hold({"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": track[1]}})
        return self._rows[track]

    def _process(self, name: str) -> int:
        if name not in self._processes:
            number = self._processes[name] = len(self._processes) + 1
            label = f"{name} (process {os.getpid()})" if name == THREADS else name
            self._hold({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": label}})
        return self._processes[name]


def earlier_traces(path: Path) -> list[Path]:
    """Return the paths of earlier traces, the newest first: of trace.json trace.1.json, trace.2.json, ..."""
    return [path.with_name(f"{path.stem}.{number}{path.suffix}") for number in range(1, MAX_EARLIER + 1)]


def set_aside(path: Path) -> None:
    """Rename a trace to the first earlier one, and each earlier one to the next. The oldest of too many is deleted.

    A process that follows the trace still has its file: the next trace is a new one.

    `path`: path of the trace; nothing happens if it is no file, such as a device.
    """
    if not path.is_file():
        return
    names = [path, *earlier_traces(path)]
    num_held = next((place for place, name in enumerate(names) if not name.exists()), len(names))
    if num_held == len(names):
        logger.warning("%s is deleted: %d later traces are kept", names[-1], MAX_EARLIER)
    for place in reversed(range(min(num_held, MAX_EARLIER))):
        names[place].replace(names[place + 1])


@contextmanager
def _ending(end: Callable[..., None]) -> Iterator[None]:
    """Call `end` after the block, with the name of the error that the block raised."""
    raised: dict[str, str] = {}
    try:
        yield
    except BaseException as error:
        raised["raised"] = type(error).__name__
        raise
    finally:
        end(**raised)


def start(path: str | Path, max_events: int = MAX_EVENTS) -> None:
    """Begin a trace; a trace under way ends."""
    stop()
    trace_by(Tracer(path, max_events))


@atexit.register
def stop() -> None:
    """End the trace, if there is one, and close its file."""
    trace_by(NoTracer()).close()


def instant(name: str, /, **args: Any) -> None:
    """Record an event of this moment, drawn across all rows; `args` are shown with it."""
    tracer().instant(name, **args)


def flush() -> None:
    """Write the events recorded so far."""
    tracer().flush()


__all__ = ["Tracer", "complete", "finish", "flush", "instant", "is_on", "span", "stage", "start", "stop", "task"]
