"""Record of a job: its state and the log of events and decisions, as JSON in a store and as readable lines.

A training program reports its step, and errors that a restart would repeat, to the process that started it:

    control plane: environment(file, ...) ──> program: report_step(3, 100) ──> file ──> control plane: read(file)

The program finds the file's name in its environment. Without a watcher, a program reports nothing.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten

from pydantic import TypeAdapter, ValidationError

from rlite.errors import RliteError
from rlite.runtime.storage.texts import StateStore
from rlite.services.recovery.failover import JobState
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


_REPORT_JSON = TypeAdapter(TrainerReport)


def clock(at: float) -> str:
    """Return a Unix time in words."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def environment(file: Path, has_begun: bool) -> dict[str, str]:
    """Return the environment variables of a program that is to report."""
    return {FILE: str(file), BEGUN: str(int(has_begun))}


def report_step(step: int, total_steps: int) -> None:
    """Report that the run has finished a step, or begins after it."""
    _write(TrainerReport(step, total_steps, time.time()))


def report_final_error(error: Exception) -> None:
    """Report an error that every restart would repeat."""
    before = read(Path(os.environ[FILE])) if FILE in os.environ else None
    _write(replace(before or TrainerReport(), at=time.time(), final_error=f"{type(error).__name__}: {error}"))


def read(file: Path) -> TrainerReport | None:
    """Return the latest report, or None."""
    try:
        return _REPORT_JSON.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def _write(report: TrainerReport) -> None:
    if FILE not in os.environ:
        return
    path = Path(os.environ[FILE])
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):  # a full disk is no reason to end a run
        partial.write_bytes(_REPORT_JSON.dump_json(report))
        os.replace(partial, path)  # whole, and without an fsync per step: a crash of the machine may lose it


MAX_ENTRIES = 1000
"""entries of a log that are kept, the latest"""
MAX_ENDED = 20
"""records of ended jobs that are kept, the latest"""


@dataclass(frozen=True)
class LogEntry:
    """One event of a job."""

    at: float
    """seconds since the epoch"""
    stage: str
    """stage of the job after the event"""
    event: str
    decision: str = ""
    detail: str = ""
    """further lines, such as a stack"""

    def __str__(self) -> str:
        decision = f" -> {self.decision}" if self.decision else ""
        detail = "".join(f"\n    {line}" for line in self.detail.splitlines())
        return f"{clock(self.at)} {self.stage:8} {self.event}{decision}{detail}"


@dataclass(frozen=True)
class JobRecord:
    """Everything that is stored of a job's life."""

    submission: str = ""
    """id of the submission; a job that takes the name of an ended job has a new record"""
    state: JobState = field(default_factory=JobState)
    log: tuple[LogEntry, ...] = ()
    report: TrainerReport | None = None
    """latest report of a trainer that is started by module path"""

    def noted(self, entry: LogEntry) -> JobRecord:
        """Return the record with one more entry, at the end."""
        return replace(self, log=(*self.log, entry)[-MAX_ENTRIES:])


_JSON = TypeAdapter(JobRecord)


def save_record(store: StateStore, job: str, record: JobRecord) -> None:
    """Store a job's record."""
    store.save(job, _JSON.dump_json(record).decode())


def load_record(store: StateStore, job: str) -> JobRecord | None:
    """Return a job's record, or None if the store has none."""
    text = store.load(job)
    if text is None:
        return None
    try:
        return _JSON.validate_json(text)
    except ValidationError as error:
        reason = shorten(str(error), 200)
        raise RliteError(f"the stored state of job {job!r} cannot be read; remove it: {reason}") from error


def forget_old(store: StateStore) -> None:
    """Remove the records of ended jobs except the latest. A record that cannot be read may be of a running job."""
    ended: dict[str, float] = {}
    for name in store.names():
        with suppress(RliteError):
            record = load_record(store, name)
            if record is not None and record.state.has_ended:
                ended[name] = record.log[-1].at
    for name in sorted(ended, key=ended.__getitem__)[:-MAX_ENDED]:
        store.remove(name)
