"""Record of a job: its state and the log of events and decisions, as JSON in a store and as readable lines."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from textwrap import shorten

from pydantic import TypeAdapter, ValidationError

from rlite.errors import RliteError
from rlite.runtime.storage.texts import StateStore
from rlite.services.recovery.failover import JobState
from rlite.services.recovery.reporting import TrainerReport, clock

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
    """Store a job's record.

    Args:
        store: the store.
        job: name of the job.
        record: its record.
    """
    store.save(job, _JSON.dump_json(record).decode())


def load_record(store: StateStore, job: str) -> JobRecord | None:
    """Return a job's record, or None if the store has none.

    Raises:
        RliteError: the record cannot be read.
    """
    text = store.load(job)
    if text is None:
        return None
    try:
        return _JSON.validate_json(text)
    except ValidationError as error:
        raise RliteError(
            f"the stored state of job {job!r} cannot be read; remove it: {shorten(str(error), 200)}"
        ) from error


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
