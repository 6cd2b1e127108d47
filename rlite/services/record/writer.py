"""The writer of a record: tables of steps in the background, merged files of full hundreds of steps, and gaps.

Each file appears whole or not at all. Old texts go when the limit is reached, and later steps when a run resumes.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlite import files
from rlite.errors import DataError, StorageError, writing
from rlite.services.record.files import FOLDER, GAPS, ROWS, Gap, RecordFile, all_files, path_of, read_gaps, record_files
from rlite.wording import warn_once

TOKEN_ROWS = 8
"""sequences that are read together, to show one"""
ROW_BYTES = 16 << 20
"""rollouts that are read together, to show one: about a millisecond more for each such part when all are read"""
Kind = Literal["rows", "tokens"]


def write_table(folder: Path, source: str, step: int, kind: Kind, table: pa.Table) -> Path:
    """Write one table of a step; an older table of the same step is replaced."""
    path = path_of(folder, source, kind, step, step)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = io.BytesIO()
        size = TOKEN_ROWS if kind == "tokens" else max(ROW_BYTES * len(table) // max(table.nbytes, 1), 1)
        pq.write_table(table, stream, compression="zstd", row_group_size=size)
        files.replace(path, stream.getvalue())
    return path


DAMAGED = ".damaged"
"""suffix of a file that a resumed run can neither read nor cut"""


def used_bytes(folder: Path) -> int:
    """Return the bytes of all files of the record in a run's folder, whatever they are."""
    return sum(size_of(path) for path in (folder / FOLDER).glob("*"))


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 if there is none."""
    return (files.stamp(path) or (0, 0))[1]


def write_gaps(folder: Path, gaps: Sequence[Gap]) -> None:
    """Replace the gaps of the record in a run's folder."""
    path = folder / FOLDER / GAPS
    with writing(path):
        if gaps:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(path, "".join(f"{json.dumps(asdict(gap))}\n" for gap in gaps).encode())
        else:
            path.unlink(missing_ok=True)


def resume_gaps(folder: Path, step: int) -> None:
    """End the gaps at the step from which a run is resumed. Later steps are recorded anew."""
    if gaps := read_gaps(folder):
        kept = [gap for gap in gaps if gap.first <= step]
        write_gaps(folder, [replace(gap, last=step if gap.last is None else min(gap.last, step)) for gap in kept])


logger = logging.getLogger(__name__)
HUNDRED = 100
"""steps that a compacted file holds"""
PART_BYTES = 4 << 20
"""rows that are read together of a file of many steps, to show one: a footer lists the parts, and is read first"""
TEXTS = ("segments", "data")
"""columns of rows that are null if the text of a rollout is not recorded"""


def compact(folder: Path, before: int, has_room: Callable[[int], bool] = lambda num_bytes: True) -> None:
    """Merge the files of each full hundred of steps, from step 1 on, into one file for each source and kind.

    `before`: step after the last step that may be merged. It may still be recorded: the evaluation after a step comes
    later than the step's own rows. `has_room`: whether the disk may take so many more bytes. While files are merged
    they are there twice; files for which there is no room stay as they are.
    """

    def hundred_of(file: RecordFile) -> tuple[str, str, int]:
        return file.source, file.kind, (file.first - 1) // HUNDRED

    due = [file for file in record_files(folder) if file.first > 0 and (hundred_of(file)[2] + 1) * HUNDRED < before]
    for (source, kind, number), parts in groupby(sorted(due, key=hundred_of), key=hundred_of):
        own = sorted(parts, key=lambda file: file.first)
        if len(own) > 1 and has_room(sum(size_of(file.path) for file in own)):
            target = path_of(folder, source, kind, number * HUNDRED + 1, (number + 1) * HUNDRED)
            if _rewrite([file.path for file in own], target):
                delete(file.path for file in own)


def drop_later(folder: Path, step: int) -> None:
    """Remove the rows of later steps, and what a killed run has left behind.

    `step`: last step that stays; -1 removes all steps.
    """
    delete((folder / FOLDER).glob(".*.partial"))
    resume_gaps(folder, step)
    whole = {file.path for file in record_files(folder)}
    for file in all_files(folder):
        if file.path not in whole or file.first > step:
            delete([file.path])
        elif file.last > step:
            target = path_of(folder, file.source, file.kind, file.first, step)
            if _rewrite([file.path], target, lambda table: table.filter(pc.field("step") <= step)):
                delete([file.path])
            else:  # its name would hide the files of the steps that are made again
                file.path.rename(file.path.with_suffix(DAMAGED))


def strip(file: RecordFile) -> bool:
    """Remove the texts and tokens of a file.

    Returns False if the file has no texts, or cannot be read.
    """
    if file.kind == "tokens":
        return delete([file.path])
    return has_texts(file.path) and _rewrite([file.path], file.path, _without_texts)


def delete(paths: Iterable[Path]) -> bool:
    """Delete files.

    Returns True.
    """
    for path in paths:
        with writing(path):
            path.unlink(missing_ok=True)
    return True


def has_texts(path: Path) -> bool:
    """Return whether a file has a text; it is read no further than to the first row group with one."""
    try:
        with pq.ParquetFile(path) as file:
            parts = (file.read_row_group(number, columns=list(TEXTS)) for number in range(file.num_row_groups))
            return any(column.null_count < len(column) for part in parts for column in part.columns)
    except (pa.ArrowException, OSError, ValueError):
        return False


def _without_texts(table: pa.Table) -> pa.Table:
    for field in map(ROWS.field, {*TEXTS}.intersection(table.column_names)):
        table = table.set_column(table.column_names.index(field.name), field, pa.nulls(len(table), field.type))
    return table


def _rewrite(
    sources: Sequence[Path], target: Path, change: Callable[[pa.Table], pa.Table] = lambda table: table
) -> bool:
    """Write the changed rows of files into one file. Neighbouring row groups are joined up to `PART_BYTES`.

    Returns False if a source cannot be read. The sources stay as they are, and one warning names the unreadable source.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    with writing(target):
        try:
            _copy(sources, partial, change)
            files.sync(partial)
            os.replace(partial, target)
        except DataError as error:
            warn_once(logger, str(error))  # every later compaction finds the same damage
            return False
        finally:
            partial.unlink(missing_ok=True)
        files.sync(target.parent)
    return True


def _copy(sources: Sequence[Path], partial: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    schemas = []
    for source in sources:
        with _reading(source):
            schemas.append(pq.read_schema(source))
    schema = pa.unify_schemas(schemas)  # older files lack columns
    changed = (table for source in sources for table in _changed(source, schema, change) if len(table))
    with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
        for table in _joined(changed):
            writer.write_table(table)


def _changed(source: Path, schema: pa.Schema, change: Callable[[pa.Table], pa.Table]) -> Iterator[pa.Table]:
    with _reading(source), pq.ParquetFile(source) as file:
        for number in range(file.num_row_groups):
            table = change(file.read_row_group(number))
            yield pa.concat_tables([schema.empty_table(), table], promote_options="default").cast(schema)


def _joined(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield tables of at most `PART_BYTES` from smaller ones; a larger one stays as it is."""
    held: list[pa.Table] = []
    size = 0
    for table in tables:
        if held and size + table.nbytes > PART_BYTES:
            yield pa.concat_tables(held)
            held, size = [], 0
        held.append(table)
        size += table.nbytes
    if held:
        yield pa.concat_tables(held)


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Convert the errors that pyarrow raises for a damaged file."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{source} cannot be read and is left as it is: {error}") from error


MAX_PENDING = 2
"""steps that wait to be written; a further one waits for the first of them"""
TIMEOUT = 600.0
"""seconds in which a step must be written"""
ROOM = 0.9
"""share of the limit down to which old texts and tokens are removed"""
Tables = Mapping[Kind, pa.Table]


class RecordWriter:
    """Writes tables in the background, in the order of the calls.

    No failure costs the run more than its record. If something cannot be written, such as on a full disk, a warning
    says why, `gaps.jsonl` names the first step that may be missing, and later calls do nothing.

    `limit`: bytes of all files of the record. Beyond it damaged files are deleted, then the texts and tokens of the
    oldest steps, and if there are none left, their rows.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._pending: deque[tuple[int, Future[None]]] = deque()
        self._gap: Gap | None = None
        self._is_noted = False
        self._size = used_bytes(folder)
        self.has_removed = False
        """true as soon as something was removed because of the limit"""

    def write(self, source: str, step: int, make: Callable[[], Tables]) -> None:
        """Write the tables of a step. An older table of the same step is replaced, or deleted if the new one is empty.

        `make`: returns the tables; called in the background.
        """
        self._submit(step, lambda: self._write(source, step, make()))

    def compact(self, before: int) -> None:
        """Merge the files of full hundreds of steps, as `compact` does, in the background."""
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
        message = f"{self._folder / FOLDER}: the record ends before step {step}: {reason}. The run goes on without it. "
        logger.warning("%sFree space if the disk is full; a run that is resumed is recorded again", message)

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
            compact(self._folder, before, lambda size: used_bytes(self._folder) + size <= self._limit)
        except StorageError as error:  # nothing is lost: the next checkpoint tries again
            logger.warning("the files of the record are not merged: %s", error)
        self._size = used_bytes(self._folder)

    def _write(self, source: str, step: int, tables: Tables) -> None:
        for kind, table in tables.items():
            path = path_of(self._folder, source, kind, step, step)
            self._size -= size_of(path)
            if len(table):
                self._size += size_of(write_table(self._folder, source, step, kind, table))
            else:
                delete([path])
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
                self.has_removed = True

    def _removable(self) -> Iterator[tuple[Path, Callable[[], bool]]]:
        """Yield the files with a call that removes the file, or a part of it: the least useful come first."""
        oldest = sorted(all_files(self._folder), key=lambda file: (file.last, file.kind == "rows"))
        yield from ((path, partial(delete, [path])) for path in sorted((self._folder / FOLDER).glob(f"*{DAMAGED}")))
        yield from ((file.path, partial(strip, file)) for file in oldest)
        yield from ((file.path, partial(delete, [file.path])) for file in oldest)
