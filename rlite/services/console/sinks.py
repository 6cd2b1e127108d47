"""Sinks: places that keep a run's metrics. A sink has `log(step, metrics)` and `close()`.

`open_sinks` makes sinks by name. The package of a sink is imported when a run asks for the sink.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlite import files
from rlite.errors import ConfigError, UnknownOptionError, did_you_mean, writing
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
    entity: str | None = None
    """user or team of wandb"""
    group: str | None = None
    tags: Sequence[str] = ()
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


class JsonlSink:
    """One JSON object per step: `{"step": 3, "loss": 0.25, ...}`, on disk when `log` returns.

    JSON has no nan and no infinity: they are written as the strings "nan", "inf" and "-inf". Half a line that a killed
    process left is dropped, and so are lines of later steps that an exact resume writes again.
    """

    def __init__(self, run: Run) -> None:
        self.path = run.directory / "metrics.jsonl"
        run.directory.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            drop_later_lines(self.path, math.inf if run.resume_after is None else run.resume_after)
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        if "step" in metrics:
            raise ConfigError("a metric cannot be named 'step': that key holds the step's number")
        row = {"step": step, **{key: _jsonable(value) for key, value in metrics.items()}}
        with writing(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def drop_later_lines(path: Path, step: float) -> None:
    """Rewrite a JSONL file without the lines of later steps and without lines that cannot be read."""
    with writing(path):
        with files.reading(path) as file:
            kept = [line for line in file if (found := step_of(line)) is not None and found <= step]
        files.replace(path, b"".join(kept))  # a kill in here must not lose them


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the lines of a metrics.jsonl. Each has its `step`; lines that cannot be read are left out.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    rows = []
    with files.reading(path) as file:
        for line in file:
            if step_of(line) is not None:
                with contextlib.suppress(ValueError, TypeError, OverflowError):
                    rows.append({name: _number(value) for name, value in json.loads(line).items()})
    return rows


def step_of(line: bytes) -> int | None:
    """Return the step of a whole line; None for a torn line, which may end inside a character, or another text."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if type(step) is int else None


def _number(value: Any) -> float:
    """Return a value of a line; the strings "nan", "inf" and "-inf" as numbers."""
    number = float(value)
    return value if type(value) is int else number


def _jsonable(value: float) -> float | int | str:
    number = _number(value)
    return number if math.isfinite(number) else str(number)


class TensorBoardSink:
    """Scalars in `DIRECTORY/tensorboard`; events of later steps that an earlier attempt logged are hidden."""

    def __init__(self, run: Run, tensorboard: Any) -> None:
        purge_step = None if run.resume_after is None else run.resume_after + 1
        self._writer = tensorboard.SummaryWriter(str(run.directory / "tensorboard"), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event per metric."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, float(value), step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbSink:
    """One wandb run, with its files under `DIRECTORY`.

    Without a network set `WANDB_MODE=offline` and upload later with `wandb sync`.
    A resumed run goes on with the wandb run that the directory logged to before; wandb ignores steps that it has.
    """

    def __init__(self, run: Run, wandb: Any) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        id_file = run.directory / "wandb_run_id"
        run_id = id_file.read_text() if run.resume_after is not None and id_file.exists() else None
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            entity=run.entity,
            group=run.group,
            tags=list(run.tags),
            dir=str(run.directory),
            config=dict(run.config),
            id=run_id,
            resume="allow" if run_id else None,
        )
        id_file.write_text(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step, which is also logged as the metric `step`."""
        self._run.log({"step": step, **{key: float(value) for key, value in metrics.items()}}, step=step)

    def close(self) -> None:
        """Finish the run, after everything that is buffered is written or sent."""
        self._run.finish()


class TrackioSink:
    """One trackio run of the local-first tracker of Hugging Face, in its own directory (`TRACKIO_DIR`).

    A resumed run goes on with the trackio run that its directory logged to before. Another run whose name is taken gets
    a name of its own.
    """

    def __init__(self, run: Run, trackio: Any) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        name_file = run.directory / "trackio_run_name"
        is_resumed, name = run.resume_after is not None and run.resume_after >= 0, run.name
        if is_resumed and name_file.exists():
            name = name_file.read_text()
        elif not is_resumed and _is_taken(run, trackio):
            name = f"{name}-{uuid.uuid4().hex[:6]}"
        resume = "allow" if is_resumed else "never"
        named = {"project": run.project, "name": name, "group": run.group}
        self._run = trackio.init(**named, config=dict(run.config), resume=resume, embed=False)
        name_file.write_text(name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a step."""
        self._run.log({key: float(value) for key, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Finish the run, after everything that is buffered is written."""
        self._run.finish()


def _is_taken(run: Run, trackio: Any) -> bool:
    """Return whether the project has a run of this name."""
    try:
        return run.name in {known.name for known in trackio.Api().runs(run.project)}
    except ValueError:  # there is no such project yet
        return False


def open_sinks(names: Sequence[str], run: Run) -> MetricSinks:
    """Open sinks by name: `jsonl`, `tensorboard`, `wandb`, `trackio`. If one fails, none stays open.

    Returns the sinks as one.
    """
    for name in names:
        if name not in SINKS:
            raise UnknownOptionError(f"unknown metric sink {name!r}; {did_you_mean(name, SINKS)}")
    openers = [_opener(name) for name in names]
    with contextlib.ExitStack() as stack:
        sinks = []
        for opener in openers:
            sinks.append(opener(run))
            stack.callback(sinks[-1].close)
        stack.pop_all()
    return MetricSinks(sinks)


_PACKAGES: dict[str, tuple[Callable[[Run, Any], MetricSink], str]] = {
    "tensorboard": (TensorBoardSink, "torch.utils.tensorboard"),
    "wandb": (WandbSink, "wandb"),
    "trackio": (TrackioSink, "trackio"),
}


def _opener(name: str) -> Callable[[Run], MetricSink]:
    """Return the class of a sink, with the package that it needs."""
    if name == "jsonl":
        return JsonlSink
    sink_class, package = _PACKAGES[name]
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        raise ConfigError(missing_sink(name)) from error
    return lambda run: sink_class(run, module)
