"""Changes to the files of a record: full hundreds of steps are merged, and later steps and old texts are removed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlite import files
from rlite.errors import DataError, writing
from rlite.observability.record.files import DAMAGED, FOLDER, RecordFile, all_files, path_of, record_files, size_of
from rlite.observability.record.gaps import resume_gaps
from rlite.observability.record.schema import ROWS
from rlite.wording import warn_once

logger = logging.getLogger(__name__)
HUNDRED = 100
"""steps that a compacted file holds"""
PART_BYTES = 4 << 20
"""rows that are read together of a file of many steps, to show one: a footer lists the parts, and is read first"""
TEXTS = ("segments", "data")
"""columns of rows that are null if the text of a rollout is not recorded"""


def compact(folder: Path, before: int, has_room: Callable[[int], bool] = lambda num_bytes: True) -> None:
    """Merge the files of each full hundred of steps, from step 1 on, into one file for each source and kind.

    Args:
        folder: the run's folder.
        before: step after the last step that may be merged. It may still be recorded: the evaluation after a step
            comes later than the step's own rows.
        has_room: whether the disk may take so many more bytes. While files are merged they are there twice; files for
            which there is no room stay as they are.

    Raises:
        StorageError: a file cannot be written.
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

    Args:
        folder: the run's folder.
        step: last step that stays; -1 removes all steps.

    Raises:
        StorageError: a file cannot be written or deleted.
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

    Args:
        file: a file of tokens is deleted, and a file of rows loses its texts.

    Returns:
        False if the file has no texts, or cannot be read.

    Raises:
        StorageError: a file cannot be written or deleted.
    """
    if file.kind == "tokens":
        return delete([file.path])
    if not _has_texts(file.path):
        return False
    return _rewrite([file.path], file.path, _without_texts)


def delete(paths: Iterable[Path]) -> bool:
    """Delete files.

    Returns:
        True.

    Raises:
        StorageError: a file cannot be deleted.
    """
    for path in paths:
        with writing(path):
            path.unlink(missing_ok=True)
    return True


def _has_texts(path: Path) -> bool:
    """Return whether a file has a text, which is read no further than to the first row group with one."""
    try:
        with pq.ParquetFile(path) as file:
            parts = (file.read_row_group(number, columns=list(TEXTS)) for number in range(file.num_row_groups))
            return any(column.null_count < len(column) for part in parts for column in part.columns)
    except (pa.ArrowException, OSError, ValueError):
        return False


def _without_texts(table: pa.Table) -> pa.Table:
    for place, name in enumerate(table.column_names):
        if name in TEXTS:
            field = ROWS.field(name)
            table = table.set_column(place, field, pa.nulls(len(table), field.type))
    return table


def _rewrite(
    sources: Sequence[Path], target: Path, change: Callable[[pa.Table], pa.Table] = lambda table: table
) -> bool:
    """Write the changed rows of files into one file. Neighbouring row groups are joined up to `PART_BYTES`.

    Returns:
        False if a source cannot be read. The sources stay as they are, and one warning names the unreadable source.

    Raises:
        StorageError: the target cannot be written.
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
    schemas: list[pa.Schema] = []
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
    """Convert the errors that pyarrow raises for a damaged file.

    Yields:
        None.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{source} cannot be read and is left as it is: {error}") from error
