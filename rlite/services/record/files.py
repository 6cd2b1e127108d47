"""The files of a record, which appear whole or not at all.

FOLDER/record/train-00000012.rows.parquet          what step 12 decided
FOLDER/record/train-00000012.tokens.parquet        tokens of some of its rollouts
FOLDER/record/eval.NAME-00000012.rows.parquet      the evaluation of set NAME after step 12
FOLDER/record/train-00000001_00000100.rows.parquet steps 1 to 100, compacted

The steps follow the last hyphen, so a NAME may end in a hyphen and digits.

FOLDER/record/gaps.jsonl   {"first": 12, "last": 40, "reason": "the disk is full"}    steps that could not be written

Full hundreds of steps are merged, and later steps and old texts are removed. There is one row for each rollout, and
beside it the tokens of some of them. The field metadata `meaning` describes each column.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from rlite import files
from rlite.errors import DataError, StorageError, writing
from rlite.trainer.run.folder import RECORD
from rlite.types import Status
from rlite.wording import warn_once

VERSION = 1
"""version of the format; a reader refuses other versions"""
VERSION_KEY = b"rlite.record"
"""metadata key of the tables that holds the version"""

STATUSES: tuple[Status, ...] = get_args(Status)


def _schema(**columns: tuple[pa.DataType, str]) -> pa.Schema:
    fields = [pa.field(name, kind, metadata={"meaning": meaning}) for name, (kind, meaning) in columns.items()]
    return pa.schema(fields, metadata={VERSION_KEY: str(VERSION)})


TEXTS_BY_NAME = pa.map_(pa.string(), pa.string())
SEGMENT = pa.struct({"role": pa.string(), "text": pa.string()})
EVENT = pa.struct({"name": pa.string(), "start": pa.float64(), "end": pa.float64()})

ROWS = _schema(
    step=(pa.int32(), "step of the run that decided the status; of an evaluation, the finished steps before it"),
    group=(pa.int64(), "number of the group in the run; of an evaluation, the number of the prompt"),
    sample=(pa.int32(), "number in the group"),
    item=(pa.string(), "id of the data item: its `id`, else its number in the data"),
    status=(pa.string(), "one of STATUSES"),
    reason=(pa.string(), "why it was not trained on, in one line; empty if it was"),
    failed_attempts=(pa.string(), "kinds of the errors of its attempts that failed, in order, between commas"),
    redrawn=(pa.string(), "kind of the failure after which the model answered anew; empty if it did not"),
    reward=(pa.float64(), "reward of the trajectory; null if it has none"),
    reward_parts=(pa.map_(pa.string(), pa.float64()), "parts of the reward by name, before their weights"),
    score=(pa.float64(), "score by which it is evaluated; null if the workflow gives none"),
    answer=(pa.string(), "answer that the reward has judged; null if it names none"),
    advantage=(pa.float64(), "mean advantage of the tokens to train on; null if it is in no batch"),
    turns=(pa.int32(), "turns of the model"),
    tool_calls=(pa.int32(), "tool calls; null if the workflow has none"),
    tool_errors=(pa.int32(), "tool calls that failed; null if the workflow has none"),
    prompt_tokens=(pa.int32(), "tokens before the first turn of the model"),
    response_tokens=(pa.int32(), "tokens that the model wrote"),
    truncated=(pa.bool_(), "a limit cut the model off"),
    version_min=(pa.int32(), "oldest policy version among the tokens"),
    version_max=(pa.int32(), "newest policy version among the tokens"),
    seconds_queue=(pa.float64(), "from the group's submission to its start"),
    seconds_generate=(pa.float64(), "in which the episode waited for the engine"),
    seconds_environment=(pa.float64(), "of the episode outside of engine and reward: environment and the rest"),
    seconds_reward=(pa.float64(), "in which the episode waited for rewards"),
    ended=(pa.float64(), "Unix time of the episode's end"),
    events=(pa.list_(EVENT), "queue, generate, environment and reward, in seconds after the group's submission"),
    data=(TEXTS_BY_NAME, "other columns of the data item, shortened; null if this rollout's text is not recorded"),
    segments=(pa.list_(SEGMENT), "texts in order, by role (prompt, model, environment); null if they are not recorded"),
)
"""one row for each rollout; only columns of NOT_NULL are never null"""

TOKENS = _schema(
    step=(pa.int32(), "as in ROWS"),
    group=(pa.int64(), "as in ROWS"),
    sample=(pa.int32(), "as in ROWS"),
    sequence=(pa.int32(), "number of the sequence in its trajectory; mostly 0"),
    text=(pa.string(), "the decoded sequence"),
    ids=(pa.list_(pa.int32()), "token ids"),
    offsets=(pa.list_(pa.int32()), "place in `text` at which each token begins, in characters"),
    mask=(pa.list_(pa.bool_()), "whether the model wrote the token and it is trained on"),
    versions=(pa.list_(pa.int32()), "policy version that made the token; -1 if the model only read it"),
    logprobs=(pa.list_(pa.float32()), "log-probability by the engine"),
    trainer_logprobs=(
        pa.list_(pa.float32()),
        "log-probability by the trainer before all updates of the step if the step computes it, else before the update "
        "of the token's minibatch; null if unknown",
    ),
    advantages=(pa.list_(pa.float32()), "advantage; null if it is in no batch"),
    entropy=(
        pa.list_(pa.float32()),
        "entropy of the trainer's distribution before the update of the token's minibatch, after earlier updates of "
        "the step; null if unknown",
    ),
)
"""one row for each sequence whose tokens are recorded; the lists have one entry for each token"""
NOT_NULL = ("step", "group", "sample", "sequence", "item", "status", "reason")
"""columns of ROWS and TOKENS that have a value in every row"""


FOLDER = RECORD
TRAIN = "train"
DAMAGED = ".damaged"
"""suffix of a file that a resumed run can neither read nor cut"""
TOKEN_ROWS = 8
"""sequences that are read together, to show one"""
ROW_BYTES = 16 << 20
"""rollouts that are read together, to show one: about a millisecond more for each such part when all are read"""
Kind = Literal["rows", "tokens"]
_NAME = re.compile(r"(train|eval\.[\w.-]+)-([0-9]{8,})(?:_([0-9]{8,}))?\.(rows|tokens)\.parquet")


class RecordFile(NamedTuple):
    """One file of a record."""

    path: Path
    source: str
    """`train`, or `eval.NAME`"""
    first: int
    last: int
    """first and last step"""
    kind: str
    """rows or tokens"""

    def covers(self, other: RecordFile) -> bool:
        """Return whether this file holds what another file holds, and further steps."""
        is_alike = (self.source, self.kind) == (other.source, other.kind)
        return is_alike and self != other and self.first <= other.first and other.last <= self.last


def all_files(folder: Path) -> list[RecordFile]:
    """Return the files of the record in a run's folder, by name, also those that a compacted file covers.

    Pipes, sockets and links to nothing are no files of the record.
    """
    found = []
    for path in sorted((folder / FOLDER).glob("*.parquet")):
        if (match := _NAME.fullmatch(path.name)) and os.path.isfile(path):
            source, first, last, kind = match.groups()
            found.append(RecordFile(path, source, int(first), int(last or first), kind))
    return found


def record_files(folder: Path) -> list[RecordFile]:
    """Return the files of the record in a run's folder, by name; each step is in one file of its source and kind."""
    found = all_files(folder)
    compacted = [file for file in found if file.first < file.last]
    return [file for file in found if not any(wide.covers(file) for wide in compacted)]


def used_bytes(folder: Path) -> int:
    """Return the bytes of all files of the record in a run's folder, whatever they are."""
    return sum(size_of(path) for path in (folder / FOLDER).glob("*"))


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 if there is none."""
    return (files.stamp(path) or (0, 0))[1]


def path_of(folder: Path, source: str, kind: str, first: int, last: int) -> Path:
    """Return the path of the file of some steps.

    Args:
        folder: the run's folder.
        source: `train`, or `eval.NAME`.
        kind: rows or tokens.
        first: first step.
        last: last step.
    """
    steps = f"{first:08d}" if first == last else f"{first:08d}_{last:08d}"
    return folder / FOLDER / f"{source}-{steps}.{kind}.parquet"


def write_table(folder: Path, source: str, step: int, kind: Kind, table: pa.Table) -> Path:
    """Write one table of a step; an older table of the same step is replaced.

    Args:
        folder: the run's folder.
        source: `train`, or `eval.NAME`.
        step: step of the run.
        kind: which table.
        table: table of the schema `ROWS` or `TOKENS`.

    Returns:
        The file.

    Raises:
        StorageError: the file cannot be written.
    """
    path = path_of(folder, source, kind, step, step)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = io.BytesIO()
        size = TOKEN_ROWS if kind == "tokens" else max(ROW_BYTES * len(table) // max(table.nbytes, 1), 1)
        pq.write_table(table, stream, compression="zstd", row_group_size=size)
        files.replace(path, stream.getvalue())
    return path


GAPS = "gaps.jsonl"
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Gap:
    """Steps that may be missing in a record, all of them or in part."""

    first: int
    last: int | None
    """last step; None if the run has not been resumed since"""
    reason: str

    def __str__(self) -> str:
        last = "the end" if self.last is None else self.last
        return f"steps {self.first} to {last} are missing or incomplete: {self.reason}"


_GAP = TypeAdapter(Gap)


def read_gaps(folder: Path) -> list[Gap]:
    """Return the gaps of the record in a run's folder. Lines that cannot be read are left out."""
    try:
        with files.reading(folder / FOLDER / GAPS) as file:
            lines = file.read(MAX_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    gaps = []
    for line in lines:
        with suppress(ValidationError):
            gaps.append(_GAP.validate_json(line))
    return gaps


def write_gaps(folder: Path, gaps: Sequence[Gap]) -> None:
    """Replace the gaps of the record in a run's folder.

    Raises:
        StorageError: the file cannot be written or deleted.
    """
    path = folder / FOLDER / GAPS
    with writing(path):
        if gaps:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(path, "".join(f"{json.dumps(asdict(gap))}\n" for gap in gaps).encode())
        else:
            path.unlink(missing_ok=True)


def resume_gaps(folder: Path, step: int) -> None:
    """End the gaps at the step from which a run is resumed. Later steps are recorded anew.

    Raises:
        StorageError: the file cannot be written or deleted.
    """
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
    return _has_texts(file.path) and _rewrite([file.path], file.path, _without_texts)


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
    for field in map(ROWS.field, {*TEXTS}.intersection(table.column_names)):
        table = table.set_column(table.column_names.index(field.name), field, pa.nulls(len(table), field.type))
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
        self.has_removed = False
        """true as soon as something was removed because of the limit"""

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
        damaged = sorted((self._folder / FOLDER).glob(f"*{DAMAGED}"))
        yield from ((path, partial(delete, [path])) for path in damaged)
        yield from ((file.path, partial(strip, file)) for file in oldest)
        yield from ((file.path, partial(delete, [file.path])) for file in oldest)
