"""The thread that writes a record, and the limit on the disk that the record takes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from rlite.errors import StorageError, writing
from rlite.observability.record import rewrite
from rlite.observability.record.files import FOLDER, Kind, all_files, path_of, write_table

MAX_PENDING = 2
"""steps that wait to be written; a further one waits for the first of them"""
TIMEOUT = 600.0
"""seconds in which a step must be written"""
ROOM = 0.9
"""share of the limit down to which old texts and tokens are removed"""
Tables = Mapping[Kind, pa.Table]


class RecordWriter:
    """Writes tables in the background, in the order of the calls.

    An error in the background is raised by the next call.

    Args:
        folder: the run's folder.
        limit: bytes of all files of the record. Beyond it the texts and tokens of the oldest steps are deleted, and if
            there are none left, their rows.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._pending: deque[Future[None]] = deque()
        self._size = sum(_size(file.path) for file in all_files(folder))
        self._removed = threading.Event()

    @property
    def has_removed(self) -> bool:
        """True as soon as something was removed because of the limit."""
        return self._removed.is_set()

    def write(self, source: str, step: int, make: Callable[[], Tables]) -> None:
        """Write the tables of a step. An older table of the same step is replaced, or deleted if the new one is empty.

        Args:
            source: `train`, or `eval.NAME`.
            step: of the run.
            make: returns the tables; called in the background.

        Raises:
            StorageError: an earlier step could not be written, or not in time.
        """
        self._submit(lambda: self._write(source, step, make()))

    def compact(self, before: int) -> None:
        """Merge the files of full hundreds of steps, as `rewrite.compact` does, in the background.

        Args:
            before: step after the last step that may be merged.

        Raises:
            StorageError: an earlier step could not be written, or not in time.
        """
        self._submit(lambda: rewrite.compact(self._folder, before))

    def flush(self) -> None:
        """Wait until everything is written.

        Raises:
            StorageError: something could not be written, or not in time.
        """
        while self._pending:
            self._finish(self._pending.popleft())

    def close(self) -> None:
        """Wait until everything is written, and end the thread; see `flush`."""
        try:
            self.flush()
        finally:
            self._executor.shutdown(wait=False)

    def _submit(self, act: Callable[[], None]) -> None:
        while self._pending and (self._pending[0].done() or len(self._pending) >= MAX_PENDING):
            self._finish(self._pending.popleft())
        self._pending.append(self._executor.submit(act))

    def _finish(self, written: Future[None]) -> None:
        try:
            written.result(TIMEOUT)
        except TimeoutError as error:
            raise StorageError(f"{self._folder / FOLDER}: a step was not written in {TIMEOUT:g} s") from error

    def _write(self, source: str, step: int, tables: Tables) -> None:
        for kind, table in tables.items():
            path = path_of(self._folder, source, kind, step, step)
            self._size -= _size(path)
            if len(table):
                self._size += _size(write_table(self._folder, source, step, kind, table))
            else:
                with writing(path):
                    path.unlink(missing_ok=True)
        if self._size > self._limit:
            self._trim()

    def _trim(self) -> None:
        """Remove the oldest texts and tokens, and then the oldest rows, until the record is below its limit."""
        oldest = sorted(all_files(self._folder), key=lambda file: (file.last, file.kind == "rows"))
        sizes = {file.path: _size(file.path) for file in oldest}
        self._size = sum(sizes.values())
        if self._size <= self._limit:  # files were merged
            return
        for act in (rewrite.strip, rewrite.delete):
            for file in oldest:
                if self._size <= ROOM * self._limit:
                    return
                if file.path.exists() and act(file):
                    left = _size(file.path)
                    self._size -= sizes[file.path] - left
                    sizes[file.path] = left
                    self._removed.set()


def _size(path: Path) -> int:
    """Return the bytes of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
