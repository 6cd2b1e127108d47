"""The thread that writes a record, and the limit on the disk that the record takes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow as pa

from rlite.errors import StorageError
from rlite.services.record import files
from rlite.services.record.files import (
    FOLDER,
    Gap,
    Kind,
    all_files,
    damaged_files,
    path_of,
    read_gaps,
    size_of,
    used_bytes,
    write_gaps,
    write_table,
)

MAX_PENDING = 2
"""steps that wait to be written; a further one waits for the first of them"""
TIMEOUT = 600.0
"""seconds in which a step must be written"""
ROOM = 0.9
"""share of the limit down to which old texts and tokens are removed"""
Tables = Mapping[Kind, pa.Table]

logger = logging.getLogger(__name__)


class RecordWriter:
    """Writes tables in the background, in the order of the calls.

    No failure costs the run more than its record. If something cannot be written, such as on a full disk, a warning
    says why, `gaps.jsonl` names the first step that may be missing, and later calls do nothing.

    Args:
        folder: the run's folder.
        limit: bytes of all files of the record. Beyond it damaged files are deleted, then the texts and tokens of the
            oldest steps, and if there are none left, their rows.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._pending: deque[tuple[int, Future[None]]] = deque()
        self._gap: Gap | None = None
        self._is_noted = False
        self._size = used_bytes(folder)
        self._removed = threading.Event()

    @property
    def has_removed(self) -> bool:
        """True as soon as something was removed because of the limit."""
        return self._removed.is_set()

    def write(self, source: str, step: int, make: Callable[[], Tables]) -> None:
        """Write the tables of a step. An older table of the same step is replaced, or deleted if the new one is empty.

        Args:
            source: `train`, or `eval.NAME`.
            step: step of the run.
            make: returns the tables; called in the background.
        """
        self._submit(step, lambda: self._write(source, step, make()))

    def compact(self, before: int) -> None:
        """Merge the files of full hundreds of steps, as `rewrite.compact` does, in the background.

        Args:
            before: step after the last step that may be merged.
        """
        self._submit(before, lambda: self._compact(before))

    def flush(self) -> None:
        """Wait until everything is written, or the record has ended."""
        while self._pending:
            self._finish()

    def close(self) -> None:
        """Wait until everything is written, and end the thread; see `flush`."""
        self.flush()
        wait([self._executor.submit(self._note)], TIMEOUT)
        self._executor.shutdown(wait=False)

    def _submit(self, step: int, act: Callable[[], None]) -> None:
        while self._pending and (self._pending[0][1].done() or len(self._pending) >= MAX_PENDING):
            self._finish()
        if self._gap is None:
            self._pending.append((step, self._executor.submit(self._attempt, step, act)))
        else:
            self._executor.submit(self._note)

    def _finish(self) -> None:
        """Wait for the oldest step that is not written; if it takes too long, the record ends."""
        step, written = self._pending.popleft()
        if not wait([written], TIMEOUT).done:
            self._end(step, f"a step was not written in {TIMEOUT:g} s")
            self._pending.clear()

    def _end(self, step: int, reason: str) -> None:
        self._gap = Gap(step, None, reason)
        logger.warning(
            "%s: the record ends before step %d: %s. The run goes on without it. Free space if the disk is full; a run "
            "that is resumed is recorded again",
            self._folder / FOLDER,
            step,
            reason,
        )

    # -- called in the background --------------------------------------------------------------------------------

    def _attempt(self, step: int, act: Callable[[], None]) -> None:
        """Act, unless the record has ended; a failure ends it."""
        if self._gap is None:
            try:
                act()
            except StorageError as error:
                self._end(step, str(error))
            except Exception as error:  # tables may hold anything, and no record is worth a run
                logger.warning("the record of step %d failed", step, exc_info=True)
                self._end(step, repr(error))
        self._note()

    def _note(self) -> None:
        """Note the gap in the record, as soon as the disk takes it."""
        if self._gap is not None and not self._is_noted:
            with suppress(StorageError):
                write_gaps(self._folder, [*read_gaps(self._folder), self._gap])
                self._is_noted = True

    def _compact(self, before: int) -> None:
        try:
            files.compact(self._folder, before, self._has_room)
        except StorageError as error:  # nothing is lost: the next checkpoint tries again
            logger.warning("the files of the record are not merged: %s", error)
        self._size = used_bytes(self._folder)

    def _has_room(self, num_bytes: int) -> bool:
        return used_bytes(self._folder) + num_bytes <= self._limit

    def _write(self, source: str, step: int, tables: Tables) -> None:
        for kind, table in tables.items():
            path = path_of(self._folder, source, kind, step, step)
            self._size -= size_of(path)
            if len(table):
                self._size += size_of(write_table(self._folder, source, step, kind, table))
            else:
                files.delete([path])
        if self._size > self._limit:
            self._trim()

    def _trim(self) -> None:
        """Remove the least useful files and texts, until the record is below its limit."""
        self._size = used_bytes(self._folder)
        if self._size <= self._limit:
            return
        for path, remove in self._removable():
            if self._size <= ROOM * self._limit:
                return
            before = size_of(path)
            if before and remove():
                self._size -= before - size_of(path)
                self._removed.set()

    def _removable(self) -> Iterator[tuple[Path, Callable[[], bool]]]:
        """Yield the files with a call that removes the file, or a part of it: the least useful come first."""
        oldest = sorted(all_files(self._folder), key=lambda file: (file.last, file.kind == "rows"))
        yield from ((path, partial(files.delete, [path])) for path in damaged_files(self._folder))
        yield from ((file.path, partial(files.strip, file)) for file in oldest)
        yield from ((file.path, partial(files.delete, [file.path])) for file in oldest)
