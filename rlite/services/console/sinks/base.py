"""Sinks of metrics. A sink has `log(step, metrics)` and `close()`.

`open_sinks` makes sinks by name. Each optional sink lives in its own module with its own imports, so a run that does
not use it never loads it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlite.errors import ConfigError, UnknownOptionError, did_you_mean
from rlite.trainer.options import SINKS, missing_sink


class MetricSink(Protocol):
    """A place that keeps metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step; steps never decrease."""

    def close(self) -> None:
        """Write everything that is buffered; nothing is logged afterwards."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run that the metrics belong to."""

    directory: Path
    """files are written under it"""
    project: str = "rlite"
    name: str = "run"
    config: Mapping[str, Any] = field(default_factory=dict)
    """the resolved config, shown beside the metrics where the sink can"""
    resume_after: int | None = None
    """the last step to keep of what an earlier attempt logged, for exact resume; None appends"""


class MetricSinks:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self.sinks = tuple(sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log to each sink."""
        for sink in self.sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        """Close each sink, even if another one fails."""
        with contextlib.ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(sink.close)


def open_sinks(names: Sequence[str], run: Run) -> MetricSinks:
    """Open sinks by name: `jsonl`, `tensorboard`, `wandb`, `trackio`. If one fails, none stays open.

    Returns:
        The sinks as one.

    Raises:
        UnknownOptionError: a name is unknown.
        ConfigError: a package is missing; the message names the extra to install.
    """
    for name in names:
        if name not in SINKS:
            raise UnknownOptionError(f"unknown metric sink {name!r}; {did_you_mean(name, SINKS)}")
    classes = [_class_of(name) for name in names]
    with contextlib.ExitStack() as stack:
        sinks = []
        for sink_class in classes:
            sinks.append(sink_class(run))
            stack.callback(sinks[-1].close)
        stack.pop_all()
    return MetricSinks(sinks)


def _class_of(name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"rlite.services.console.sinks.{name}"), SINKS[name])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        raise ConfigError(missing_sink(name)) from error
