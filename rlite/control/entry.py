"""Entries of submitted jobs in a folder of their user: `rlite status`, `logs` and `stop` find a job without Ray.

~/.rlite/jobs/NAME-SUBMISSION/   job.json     the entry
                                 record/      record of the job, as its master noted it here
                                 output/      links to Ray's files with the output of the job's processes here
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlite import files
from rlite.errors import RliteError
from rlite.runtime.cluster.guard import own_children
from rlite.runtime.cluster.host import WorkerContext, WorkerFactory
from rlite.runtime.owner import Owner
from rlite.runtime.storage.texts import FileStore
from rlite.services.recovery.record import JobRecord, LogEntry, load_record, save_record

logger = logging.getLogger(__name__)

FOLDER = "RLITE_JOBS"
"""environment variable with the folder of entries"""
RAYS_OWN = (b":job_id:", b":actor_name:", b":task_name:")
"""beginnings of lines that Ray writes into the output of a process"""
RECORD = "record"
"""folder of the record in the folder of an entry"""
EVENTS = "events"
"""name of the event log among the outputs"""
KEPT = 50
"""entries that are kept, the latest, beside those of jobs that run"""


@dataclass(frozen=True)
class JobEntry:
    """Place of a job: its cluster, its state and its run."""

    name: str
    submission: str
    address: str | None
    """address of its Ray cluster; None: the cluster of this program"""
    store: str = "ray"
    """place of its state"""
    run_folder: str = ""
    """`trainer.save_dir` of a program"""
    owner: Owner | None = None
    """process with which the Ray ends; None: the cluster goes on"""
    at: float = field(default_factory=time.time)

    @property
    def folder(self) -> Path:
        """Folder of the entry."""
        return folder_of(self.name, self.submission)

    @property
    def records(self) -> FileStore:
        """Store of the job's record."""
        return FileStore(self.folder / RECORD)

    @property
    def is_under_way(self) -> bool:
        """True if the job's master has noted here that the job runs, and its Ray is there."""
        with suppress(RliteError):
            record = load_record(self.records, self.name)
            is_left = self.owner is not None and self.owner.is_gone
            return record is not None and not record.state.has_ended and not is_left
        return False


_JSON = TypeAdapter(JobEntry)


def folder_of(name: str, submission: str) -> Path:
    """Return the folder of a job's entry."""
    return Path(os.environ.get(FOLDER) or Path.home() / ".rlite" / "jobs") / f"{name}-{submission[:8]}"


def save_entry(entry: JobEntry) -> None:
    """Write an entry, and delete the oldest ones."""
    try:
        entry.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.replace(entry.folder / "job.json", _JSON.dump_json(entry))
    except OSError as error:
        logger.warning("job %s will be found on its cluster alone: %s", entry.name, error)
    for old in entries()[KEPT:]:
        if not old.is_under_way:
            shutil.rmtree(old.folder, ignore_errors=True)


def entries(wanted: str | None = None) -> list[JobEntry]:
    """Return the entries, newest first.

    `wanted`: name or run folder of the jobs; None: all jobs.
    """
    found = []
    for path in folder_of("", "").parent.glob("*/job.json"):
        with suppress(OSError, ValidationError):
            found.append(_JSON.validate_json(path.read_bytes()))
    folder = None if wanted is None else os.path.realpath(wanted)
    chosen = [each for each in found if wanted in (None, each.name) or folder == each.run_folder]
    return sorted(chosen, key=lambda each: each.at, reverse=True)


def keep_record(name: str, record: JobRecord) -> None:
    """Keep the record of a job with its entry, if the entry is on this machine: it can be read without the cluster."""
    folder = folder_of(name, record.submission)
    with suppress(OSError):  # its store has the record as well
        if folder.exists():
            save_record(FileStore(folder / RECORD), name, record)


def run_in_job(job: str, submission: str, role: str, factory: WorkerFactory, context: WorkerContext) -> Any:
    """Return the worker of a job's process.

    Programs that the process starts end with it. `rlite logs` finds its output, which Ray writes into files.

    `context`: place of the process.
    """
    own_children()
    folder = folder_of(job, submission) / "output"
    for stream, number in (("out", 1), ("err", 2)):
        with suppress(OSError):  # a system without /proc, or a folder that cannot be written
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            link = folder / f"{role}-{context.rank}.{os.getpid()}.{stream}"
            link.symlink_to(os.readlink(f"/proc/self/fd/{number}"))
    return factory(context)


class JobOutput:
    """Events of a job and the output of its processes on this machine, printed as far as they are new.

    `role`: role of the processes; "" for all and for the events, EVENTS for the events alone.
    """

    def __init__(self, name: str, submission: str, role: str) -> None:
        self._folder, self._pattern = folder_of(name, submission) / "output", f"{role.upper()}*"
        self._has_events = role.lower() in ("", EVENTS)
        self._events: set[LogEntry] = set()
        self._read: dict[Path, int] = {}
        self._shown = EVENTS

    def show(self, log: Sequence[LogEntry], is_last: bool) -> int:
        """Print new events and new lines under the names of their processes.

        Returns the number of the lines of processes.
        """
        for entry in log if self._has_events else ():
            if entry not in self._events:
                self._events.add(entry)
                self._print(EVENTS, str(entry))
        count = 0
        for path in sorted(self._folder.glob(self._pattern)):
            for line in self._new_lines(path, is_last):
                self._print(path.name, line)
                count += 1
        return count

    def _print(self, source: str, line: str) -> None:
        if source != self._shown:
            self._shown = source
            print(f"== {source} ==")
        print(line, flush=True)

    def _new_lines(self, path: Path, is_last: bool) -> Iterator[str]:
        with suppress(OSError), path.open("rb") as output:  # Ray's file may be gone
            output.seek(self._read.get(path, 0))
            for line in output:
                if not (is_last or line.endswith(b"\n")):
                    return
                self._read[path] = output.tell()
                if not line.startswith(RAYS_OWN):
                    yield line.decode(errors="replace").rstrip()
