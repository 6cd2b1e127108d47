"""Metrics as JSON lines: `DIRECTORY/metrics.jsonl`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlite import files
from rlite.errors import ConfigError, writing
from rlite.services.console.sinks.base import Run


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
        """Append one line.

        Raises:
            ConfigError: a metric is named `step`.
            StorageError: the line could not be written.
        """
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
                with suppress(ValueError, TypeError, OverflowError):
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
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)
