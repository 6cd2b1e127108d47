"""Where metrics go. A sink is `log(step, metrics)` and `close()`.

`open_sinks` builds them by name; each optional one lives in its own module with its own imports, so that a run that
does not ask for it never loads it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlite.errors import ConfigError, UnknownOptionError, did_you_mean, writing


class MetricSink(Protocol):
    """Keeps metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step; steps do not go backwards."""

    def close(self) -> None:
        """Write out what is held; nothing is logged afterwards."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Which run the metrics belong to."""

    directory: Path
    """files are written under it"""
    project: str = "rlite"
    name: str = "run"
    config: Mapping[str, Any] = field(default_factory=dict)
    """the resolved config, shown beside the metrics where the sink can"""
    resume_after: int | None = None
    """the last step to keep of what an earlier attempt logged, for exact resume; None appends"""


class JsonlSink:
    """One JSON object per step: `{"step": 3, "loss": 0.25, ...}`, on disk when `log` returns.

    JSON has no nan and no infinity: they are written as the strings "nan", "inf" and "-inf".
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._drop_torn_line()
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line. Raises: ConfigError for a metric named `step`; StorageError."""
        if "step" in metrics:
            raise ConfigError("a metric cannot be named 'step': that key holds the step's number")
        row = {"step": step, **{key: _jsonable(value) for key, value in metrics.items()}}
        with writing(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, which an exact resume is going to write again."""
        self._file.close()
        drop_later_lines(self.path, step)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _drop_torn_line(self) -> None:
        """A process that was killed while it wrote leaves half a line; appending to it would spoil the next one too."""
        if not self.path.exists():
            return
        written = self.path.read_bytes()
        whole = written.rfind(b"\n") + 1
        if whole < len(written):
            os.truncate(self.path, whole)


class MetricSinks:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self.sinks = tuple(sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log to each."""
        for sink in self.sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        """Close each, also when another one fails."""
        with contextlib.ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(sink.close)


def open_jsonl(run: Run) -> MetricSink:
    """`DIRECTORY/metrics.jsonl`."""
    sink = JsonlSink(run.directory / "metrics.jsonl")
    if run.resume_after is not None:
        sink.truncate_after(run.resume_after)
    return sink


@dataclass(frozen=True)
class _Entry:
    module: str
    opener: str
    extra: str | None = None


_REGISTRY = {
    "jsonl": _Entry(__name__, "open_jsonl"),
    "tensorboard": _Entry("rlite.observability.sinks_tensorboard", "open_tensorboard", "tensorboard"),
    "wandb": _Entry("rlite.observability.sinks_wandb", "open_wandb", "wandb"),
    "trackio": _Entry("rlite.observability.sinks_trackio", "open_trackio", "trackio"),
}


def open_sinks(names: Sequence[str], run: Run) -> MetricSinks:
    """Open sinks by name: `jsonl`, `tensorboard`, `wandb`, `trackio`.

    Raises: UnknownOptionError for another name; ConfigError naming the extra to install for an absent package. Then
    none stays open.
    """
    for name in names:
        if name not in _REGISTRY:
            raise UnknownOptionError(f"unknown metric sink {name!r}; {did_you_mean(name, _REGISTRY)}")
    openers = [_opener(name) for name in names]
    with contextlib.ExitStack() as stack:
        sinks = []
        for opener in openers:
            sinks.append(opener(run))
            stack.callback(sinks[-1].close)
        stack.pop_all()
    return MetricSinks(sinks)


def _opener(name: str) -> Any:
    entry = _REGISTRY[name]
    try:
        return getattr(importlib.import_module(entry.module), entry.opener)
    except ModuleNotFoundError as error:
        if entry.extra is None or (error.name or "").partition(".")[0] != entry.extra:
            raise
        raise ConfigError(
            f"metric sink {name!r} needs the package {entry.extra}: pip install 'rlite[{entry.extra}]'"
        ) from error


def drop_later_lines(path: Path, step: int) -> None:
    """Rewrite a JSONL file without the lines of later steps, and without what a kill or a full disk left of others."""
    with path.open("rb") as file:
        kept = [line for line in file if (found := _step_of(line)) is not None and found <= step]
    partial = path.with_name(f"{path.name}.partial")  # a kill in here must not lose them
    with writing(path):
        partial.write_bytes(b"".join(kept))
        os.replace(partial, path)


def _step_of(line: bytes) -> int | None:
    """The step of a whole line; None for half of one, which may end inside a character."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, LookupError, TypeError):
        return None


def _jsonable(value: float) -> float | int | str:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)
