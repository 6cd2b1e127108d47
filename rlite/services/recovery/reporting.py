"""Reports of a training program to the process that started it: its step, and errors that a restart would repeat.

    control plane: environment(file, ...) ──> program: report_step(3, 100) ──> file ──> control plane: read(file)

The program finds the file's name in its environment. Without a watcher, a program reports nothing.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlite.trainer.run.interruption import BEGUN

FILE = "RLITE_REPORT_FILE"


@dataclass(frozen=True)
class TrainerReport:
    """Latest report of a program."""

    step: int = 0
    """finished steps"""
    total_steps: int = 0
    at: float = 0.0
    """seconds since the epoch"""
    final_error: str = ""
    """type and message of an error that a restart would repeat, such as a wrong option"""

    def __str__(self) -> str:
        return f"step {self.step} of {self.total_steps}, reported at {clock(self.at)}"


_JSON = TypeAdapter(TrainerReport)


def clock(at: float) -> str:
    """Return a Unix time in words."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def environment(file: Path, has_begun: bool) -> dict[str, str]:
    """Return the environment variables of a program that is to report.

    Args:
        file: the file to report to.
        has_begun: an earlier start of the program had begun its run, so this start continues it.
    """
    return {FILE: str(file), BEGUN: str(int(has_begun))}


def report_step(step: int, total_steps: int) -> None:
    """Report that the run has finished a step, or begins after it.

    Args:
        step: finished steps.
        total_steps: steps of the whole run.
    """
    _write(TrainerReport(step, total_steps, time.time()))


def report_final_error(error: Exception) -> None:
    """Report an error that every restart would repeat."""
    before = read(Path(os.environ[FILE])) if FILE in os.environ else None
    _write(replace(before or TrainerReport(), at=time.time(), final_error=f"{type(error).__name__}: {error}"))


def read(file: Path) -> TrainerReport | None:
    """Return the latest report, or None."""
    try:
        return _JSON.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def _write(report: TrainerReport) -> None:
    if FILE not in os.environ:
        return
    path = Path(os.environ[FILE])
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):  # a full disk is no reason to end a run
        partial.write_bytes(_JSON.dump_json(report))
        os.replace(partial, path)  # whole, and without an fsync per step: a crash of the machine may lose it
