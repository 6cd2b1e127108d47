"""Collect numbers at their source, under names that contain the scopes of the source.

    with stats_tracker.record_timing("train_step"), stats_tracker.scope("actor"):
        stats_tracker.denominator(tokens=mask)                    # bool mask
        stats_tracker.stat(denominator="tokens", entropy=entropy) # a tensor of the mask's shape
        stats_tracker.scalar(loss=loss, lr=lr)                    # the mean of all calls
        stats_tracker.count(lost=3)                               # the sum of all calls
    stats_tracker.export()
    # {"actor/tokens": 812.0, "actor/entropy/mean": ..., "actor/entropy/min": ..., "actor/entropy/max": ...,
    #  "actor/loss": ..., "actor/lr": ..., "timeperf/train_step": ...}

The functions work on one tracker of the process; make a `StatsTracker` for one of your own. Scopes and masks belong to
the thread or task that set them, the collected numbers to the tracker: any thread may record. Tensors stay on their
device until `export`, so recording does not wait for a GPU.

Statistics that a module's method records on the workers arrive, when the call returns, in the tracker of the calling
program, under the scopes of the call. Sums and counts are added over the data-parallel ranks, so every element has the
same weight for any split. Workers that duplicate work count once. A timing is the mean over ranks. With a trace under
way, timings are drawn in it, and so are the spans of this module (`rlite.observability.trace` writes them):

    with span("update"):                       # this thread is busy, or waits; spans nest
        ...
    with task("reward", item=3):               # one of many that run in turns on an event loop
        ...
    stage("group", 17, "waiting")              # an item passes through stages, in any thread
    stage("group", 17, "running")
    finish("group", 17, "consumed")

Without a trace, each of these calls costs a fraction of a microsecond.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlite.errors import ConfigError, UnknownOptionError, did_you_mean

MAX_SPANS = 256
"""timings of one recording that a trace can draw; all of them count"""


@dataclass
class _Statistic:
    """Totals over all calls so far: numbers, or tensors of one element on any device."""

    kind: Literal["a scalar", "a denominator or a count", "a stat"]
    total: Any = 0
    count: Any = 0
    """number of a scalar's calls, or of a stat's selected elements"""
    lowest: Any = math.inf
    lowest_negated: Any = math.inf
    """lowest of a stat's selected elements and of their negatives"""

    def add(self, other: _Statistic) -> None:
        self.total = self.total + other.total
        self.count = self.count + other.count
        self.lowest = _lower(self.lowest, other.lowest)
        self.lowest_negated = _lower(self.lowest_negated, other.lowest_negated)

    def export(self, key: str) -> dict[str, float]:
        total, count = float(self.total), int(self.count)
        if self.kind == "a denominator or a count":
            return {key: total}
        if self.kind == "a scalar":
            return {key: total / count}
        if not count:  # no element: there is no mean
            return {}
        lowest, highest = float(self.lowest), -float(self.lowest_negated)
        return {f"{key}/mean": total / count, f"{key}/min": lowest, f"{key}/max": highest}

    def __getstate__(self) -> dict[str, Any]:
        plain = {name: value if name == "kind" else float(value) for name, value in vars(self).items()}
        return plain | {"count": int(self.count)}


@dataclass
class Recording:
    """Statistics recorded `apart` from a tracker. They travel as plain numbers."""

    began: float = field(default_factory=time.perf_counter)
    stats: dict[str, _Statistic] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """timed blocks: name, and seconds from `began` to their start and their end"""


@dataclass(frozen=True)
class _Frame:
    """State of the current thread or task: its scopes' prefix, its masks, and its destination."""

    prefix: str = ""
    masks: Mapping[str, Any] = field(default_factory=dict)
    recording: Recording | None = None


class StatsTracker:
    """A set of named statistics. See the module's text."""

    def __init__(self) -> None:
        self._frame: ContextVar[_Frame] = ContextVar("frame", default=_Frame())  # noqa: B039  (never mutated)
        self._lock = threading.Lock()
        self._stats: dict[str, _Statistic] = {}

    @contextmanager
    def _inside(self, frame: _Frame) -> Iterator[None]:
        token = self._frame.set(frame)
        try:
            yield
        finally:
            self._frame.reset(token)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix keys that are recorded inside the block with `name/`; scopes nest.

        Yields:
            None.
        """
        frame = self._frame.get()
        with self._inside(replace(frame, prefix=f"{frame.prefix}{name}/")):
            yield

    @contextmanager
    def record_timing(self, key: str) -> Iterator[None]:
        """Record the block's wall-clock seconds under `timeperf/key`, as the mean of all calls, also of failed ones."""
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self._add(f"timeperf/{key}", _Statistic("a scalar", ended - started, 1))
            if (recording := self._frame.get().recording) is None:
                complete(key, started, ended)
            elif len(recording.spans) < MAX_SPANS:
                recording.spans.append((key, started - recording.began, ended - recording.began))

    def denominator(self, **masks: Any) -> None:
        """Announce bool masks by name for the `stat` calls that follow; exports how many elements each mask selects.

        Raises:
            ConfigError: a mask is not a bool tensor.
        """
        frame = self._frame.get()
        for key, mask in masks.items():
            if not hasattr(mask, "detach"):
                raise ConfigError(f"denominator {frame.prefix}{key} is {type(mask).__name__}; expected a bool tensor")
        detached = {key: mask.detach().bool() for key, mask in masks.items()}
        self._frame.set(replace(frame, masks={**frame.masks, **detached}))
        for key, mask in detached.items():
            self._add(key, _Statistic("a denominator or a count", mask.sum()))

    def stat(self, denominator: str, **values: Any) -> None:
        """Record tensors of the mask's shape; exports mean, min and max of the elements that the mask selects.

        Args:
            denominator: name of the mask.
            **values: tensors by key.

        Raises:
            UnknownOptionError: no mask of that name was announced here.
            ConfigError: a tensor has another shape than the mask.
        """
        frame = self._frame.get()
        if denominator not in frame.masks:
            remedy = did_you_mean(denominator, frame.masks) if frame.masks else "announce it first, by denominator(...)"
            raise UnknownOptionError(f"no denominator {denominator!r} here; {remedy}")
        mask = frame.masks[denominator]
        for key, value in values.items():
            if value.shape != mask.shape:
                shapes = f"{list(value.shape)}, its denominator {denominator!r} {list(mask.shape)}"
                raise ConfigError(f"stat {frame.prefix}{key} has shape {shapes}")
            self._add(key, _masked(value.detach().double(), mask))

    def scalar(self, **values: Any) -> None:
        """Record numbers or tensors of one element; exports each key's mean over all calls."""
        prefix = self._frame.get().prefix
        for key, value in values.items():
            self._add(key, _Statistic("a scalar", _number(f"{prefix}{key}", value), 1))

    def count(self, **numbers: int) -> None:
        """Record counts; exports each key's sum over all calls."""
        for key, number in numbers.items():
            self._add(key, _Statistic("a denominator or a count", number))

    @contextmanager
    def apart(self) -> Iterator[Recording]:
        """Redirect what this thread or task records inside the block into a recording, with scopes of its own.

        Yields:
            The recording, for `add`.
        """
        recording = Recording()
        with self._inside(_Frame(recording=recording)):
            yield recording

    def add(self, recording: Recording) -> None:
        """Add statistics that were recorded elsewhere, as if they had been recorded here."""
        for key, statistic in recording.stats.items():
            self._add(key, statistic)

    def export(self, reset: bool = True) -> dict[str, float]:
        """Return all statistics, sorted by key; `reset` clears them."""
        with self._lock:
            stats = self._stats
            if reset:
                self._stats = {}
            return {name: number for key in sorted(stats) for name, number in stats[key].export(key).items()}

    def _add(self, key: str, statistic: _Statistic) -> None:
        frame = self._frame.get()
        key = f"{frame.prefix}{key}"
        with self._lock:
            stats = self._stats if frame.recording is None else frame.recording.stats
            stat = stats.setdefault(key, _Statistic(statistic.kind))
            if stat.kind != statistic.kind:
                raise ConfigError(f"{key!r} is recorded in two ways, as {stat.kind} and as {statistic.kind}")
            stat.add(statistic)


def _masked(value: Any, mask: Any) -> _Statistic:
    """Return the totals of the elements that the mask selects."""
    if not mask.numel():
        return _Statistic("a stat")
    total, count = value.masked_fill(~mask, 0.0).sum(), mask.sum()
    lowest, highest = value.masked_fill(~mask, math.inf).min(), value.masked_fill(~mask, -math.inf).max()
    return _Statistic("a stat", total, count, lowest, -highest)


def _lower(one: Any, other: Any) -> Any:
    """Return the lower of two numbers or tensors. Tensors stay on their device."""
    if not hasattr(one, "detach"):
        one, other = other, one
    if hasattr(one, "detach"):
        return one.minimum(other) if hasattr(other, "detach") else one.clamp(max=other)
    return math.nan if math.isnan(one) or math.isnan(other) else min(one, other)


def _number(key: str, value: Any) -> Any:
    if hasattr(value, "detach"):  # a tensor; this module imports no torch
        if value.numel() != 1:
            raise ConfigError(f"scalar {key} has {value.numel()} elements: use stat, or reduce it first")
        return value.detach().double().reshape(())
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scalar {key}={value!r}: expected a number") from error


def by_kind(name: str, kinds: Counter[str]) -> dict[str, int]:
    """Return metrics that count events of a name, all of them and by kind."""
    return {f"num_{name}": kinds.total(), **{f"{name}/{kind}": count for kind, count in kinds.items()}}


_default = StatsTracker()

scope, record_timing, apart = _default.scope, _default.record_timing, _default.apart
denominator, stat, scalar, count = _default.denominator, _default.stat, _default.scalar, _default.count
export, add = _default.export, _default.add


class NoTracer:
    """Tracer that draws nothing; see `rlite.observability.trace.Tracer`."""

    def span(self, name: str, args: Any) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return _NOTHING

    def complete(self, *event: Any, **args: Any) -> None:
        """Do nothing."""

    task, stage = span, complete
    finish = instant = flush = close = complete


_NOTHING: AbstractContextManager[None] = nullcontext()
_tracer: Any = NoTracer()
"""the tracer of the trace under way"""


def tracer() -> Any:
    """Return the `rlite.observability.trace.Tracer` of the trace under way; else one that draws nothing."""
    return _tracer


def trace_by(tracer: Any) -> Any:
    """Draw spans by a tracer from now on."""
    global _tracer
    before, _tracer = _tracer, tracer
    return before


def is_traced() -> bool:
    """Return True while a trace is under way, also if the trace has ended early because it could not be written."""
    return not isinstance(_tracer, NoTracer)


def span(name: str, /, **args: Any) -> AbstractContextManager[None]:
    """Return a context that records the block's time on this thread's row; `args` are shown with it."""
    return _tracer.span(name, args)


def task(name: str, /, **args: Any) -> AbstractContextManager[None]:
    """Return a context that records the block's time on its own row, for blocks that wait on an event loop."""
    return _tracer.task(name, args)


def complete(name: str, started: float, ended: float, /, *place: Any, **args: Any) -> None:
    """Record a span that has ended; see `Tracer.complete`."""
    _tracer.complete(name, started, ended, *place, **args)


def stage(kind: str, number: int, name: str, /, **args: Any) -> None:
    """Move an item into a stage, out of its previous one; see `Tracer.stage`."""
    _tracer.stage(kind, number, name, **args)


def finish(kind: str, number: int, reason: str) -> None:
    """End an item and its current stage."""
    _tracer.finish(kind, number, reason)
