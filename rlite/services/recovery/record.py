"""Record of a job: its state and the log of events and decisions, as JSON in a store and as readable lines.

Stores of a job's state: text by name. Each `save` is complete or has not happened.

Limit restarts per time span. A pure decision: the time is an argument.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Protocol

from pydantic import TypeAdapter, ValidationError

from rlite import files
from rlite.errors import ConfigError, RliteError, writing
from rlite.services.recovery.failover import JobState
from rlite.services.recovery.reporting import TrainerReport, clock


class StateStore(Protocol):
    """Store of texts that survive the writing process, as far as the implementation documents."""

    def load(self, name: str) -> str | None:
        """Return the text saved last under a name, or None."""

    def save(self, name: str, text: str) -> None:
        """Replace the text of a name."""

    def remove(self, name: str) -> None:
        """Forget the text of a name, if there is one."""

    def names(self) -> list[str]:
        """Return all names that have a text."""


class MemoryStore:
    """Texts in this process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def load(self, name: str) -> str | None:
        """Return the text saved last under a name, or None."""
        return self._texts.get(name)

    def save(self, name: str, text: str) -> None:
        """Replace the text of a name."""
        self._texts[name] = text

    def remove(self, name: str) -> None:
        """Forget the text of a name, if there is one."""
        self._texts.pop(name, None)

    def names(self) -> list[str]:
        """Return all names that have a text."""
        return sorted(self._texts)


class FileStore:
    """Texts in files of one folder that only their owner can read. A text survives a crash of the machine."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def load(self, name: str) -> str | None:
        """Return the text saved last under a name, or None."""
        try:
            return self._path(name).read_text()
        except FileNotFoundError:
            return None

    def save(self, name: str, text: str) -> None:
        """Replace the text of a name.

        Raises:
            StorageError: the file cannot be written.
        """
        path = self._path(name)
        with writing(path):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.replace(path, text.encode(), mode=0o600)

    def remove(self, name: str) -> None:
        """Forget the text of a name, if there is one."""
        self._path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return all names that have a text."""
        return sorted(path.stem for path in self._folder.glob("*.json"))

    def _path(self, name: str) -> Path:
        check_name(name)
        return self._folder / f"{name}.json"


def check_name(name: str) -> None:
    """Check that a name is valid for a file and for a Ray actor.

    Raises:
        ConfigError: the name is not valid.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ConfigError(
            f"job name {name!r}: expected 1 to 100 letters, digits, '.', '_' or '-', with a letter or digit first"
        )


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


@dataclass(frozen=True)
class RestartBudget:
    """At most `max_restarts` restarts within `window_s` seconds. Repeated failures use up the budget."""

    max_restarts: int
    window_s: float = 3600.0

    def allows(self, restarts: Sequence[float], now: float) -> bool:
        """Return whether one more restart may begin.

        Args:
            restarts: times in seconds at which restarts began.
            now: the time on the same clock.
        """
        return sum(now - began < self.window_s for began in restarts) < self.max_restarts
