"""Tolerant reading of a record: readable files are shown, and unreadable files are named with the reason.

A record may grow, be compacted, or be cut off by a crash while it is read. Files are immutable, so each is read once.

`read_part_aside` reads in a sandbox process: a run's folder may come from anyone, and a file may kill its reader. The
process has the memory limit of one part, and no environment variables that may be secret.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.dataset import ParquetFileFormat, ParquetFileFragment
from pyarrow.fs import LocalFileSystem

from rlite import files
from rlite.errors import DataError
from rlite.runtime.sandbox.calls import Call, Code, SandboxError
from rlite.runtime.sandbox.child import printable
from rlite.runtime.sandbox.pool import shared_pool
from rlite.services.record.files import (
    BEYOND,
    NOT_NULL,
    NUMBERS,
    ROWS,
    TOKENS,
    VERSION,
    VERSION_KEY,
    WRITTEN_TOKENS,
    RecordFile,
    record_files,
)

LONG = ("segments", "events", "data")
"""columns that are read for single rollouts only"""
SCALARS = pa.schema([field for field in ROWS if field.name not in LONG])
SEGMENTS = pa.schema([ROWS.field(name) for name in ("step", "group", "sample", "segments")])
TEXTS = pa.schema([*SEGMENTS, ROWS.field("data")])
Steps = Sequence[int] | None
"""steps to read; None for all"""
Place = tuple[int, int]
"""group and sample of a rollout in its step"""
Stamp = tuple[int, int]
"""time of change and size of a file"""
Rows = tuple[pa.Table, int | None]
"""rows of a file, and the place after them; None at the end"""
ALL = pc.scalar(True)
"""condition that all rows meet"""
PART = 16 << 20
"""bytes after which a part of a file ends, with its last row group"""
MAX_PART = 128 << 20
"""bytes of a part; the row groups that this library writes have about 16 MiB"""
TOO_LARGE = f"cannot be read: a part of it takes more than {MAX_PART >> 20} MiB"
MAX_KEPT = 512 << 20
"""bytes of the rows without texts that are kept: those of a million rollouts take a third"""
ROWS_AT_ONCE = 1024
MAX_FOOTERS = 16
"""files whose footers are kept: each takes about 5 kB for each row group"""


class Part(NamedTuple):
    """The next rows of a file, from some of its row groups."""

    path: Path
    schema: pa.Schema
    """columns of the table; columns that the file lacks are null"""
    chosen: pc.Expression = ALL
    """condition of the rows. Row groups without such rows have no place"""
    last_first: bool = False
    """begin with the last row group"""
    start: int = 0
    """place of the first row group to read; 0 is there always"""


class RecordReader:
    """Reader of the record in one run's folder. One thread at a time may use it.

    `read_part`: reads a part of a file; default: in this process.
    """

    def __init__(self, folder: Path, read_part: Callable[[Part], Rows] | None = None) -> None:
        self.folder = folder
        self._read_part = read_part or read_file_part
        self.problems: dict[str, str] = {}
        """file name -> why the file, or a part of it, is not shown"""
        self._files: dict[Path, tuple[RecordFile, Stamp]] = {}
        self._kept: dict[Path, pa.Table] = {}
        """rows of files without their texts; none of rows that cannot be kept, and of files of tokens"""
        self._tables: dict[str, pa.Table] = {}
        self._has_news = False

    def refresh(self) -> bool:
        """Look for new, replaced and deleted files.

        Returns True if there are any since the last call.
        """
        self._look()
        has_news, self._has_news = self._has_news, False
        return has_news

    def _look(self) -> None:
        found = {}
        self.problems = {name: text for name, text in self.problems.items() if text != files.LEADS_OUT}
        for file in record_files(self.folder):
            if not files.is_inside(file.path, self.folder):
                self.problems[file.path.name] = files.LEADS_OUT
            elif stamp := files.stamp(file.path):
                found[file.path] = (file, stamp)
        changed = {path for path in {*found, *self._files} if found.get(path) != self._files.get(path)}
        for path in changed:
            self._kept.pop(path, None)
            self.problems.pop(path.name, None)
        self._files = found
        if changed:
            self._tables.clear()
            self._has_news = True

    def check_tokens(self) -> None:
        """Name the files of tokens that are damaged. Their tokens are read when a page asks for them."""
        for path, (file, _) in self._files.items():
            if file.kind == "tokens" and path not in self._kept:
                self._kept[path] = SCALARS.empty_table()
                list(self._read(file, TOKENS, pc.scalar(False)))

    @property
    def sources(self) -> list[str]:
        """The sources that have rows: `train` first, then the sets of evaluations."""
        return sorted({file.source for file, _ in self._files.values()}, key=lambda source: (source != "train", source))

    def table(self, source: str) -> pa.Table:
        """Return all rows of a source without texts and events, in the order of step, group and sample."""
        if source not in self._tables:
            files, own = self._files, self._holders(source, "rows")
            for file in own:
                if file.path not in self._kept:
                    self._keep(file)
            if self._files is not files:  # some were merged meanwhile
                return self.table(source)
            joined = pa.concat_tables([SCALARS.empty_table(), *(self._kept[file.path] for file in own)])
            self._tables[source] = joined.sort_by([(key, "ascending") for key in ("step", "group", "sample")])
        return self._tables[source]

    def segments(self, source: str, steps: Steps = None, newest_first: bool = False) -> Iterator[pa.Table]:
        """Yield tables of step, group, sample and segments, one for each row group that may have the steps.

        `steps`: steps to read; None for all. `newest_first`: True for the order from the last step to the first.
        """
        yield from self._chosen(source, SEGMENTS, steps, newest_first=newest_first)

    def texts(self, source: str, step: int) -> list[dict[str, Any]]:
        """Return the segments and the columns of data of a step's rollouts."""
        return _rows(self._chosen(source, TEXTS, [step]))

    def rollouts(self, source: str, step: int, place: Place | None = None) -> list[dict[str, Any]]:
        """Return rollouts of a step with all their columns.

        `place`: group and sample of the rollout to return; None for all.
        """
        return _rows(self._chosen(source, ROWS, [step], place))

    def tokens(self, source: str, step: int, place: Place | None = None) -> list[dict[str, Any]]:
        """Return the recorded sequences of a step, in the order of their numbers.

        `place`: group and sample of the rollout whose sequences to return; None for all.
        """
        return sorted(_rows(self._chosen(source, TOKENS, [step], place)), key=lambda sequence: sequence["sequence"])

    def batch_rows(self, step: int) -> list[dict[str, Any]]:
        """Return the recorded sequences of a step of training, with the other keys of their rows in its batch."""
        return _rows(self._chosen("train", WRITTEN_TOKENS, [step]))

    def token_table(self, source: str, steps: Steps = None) -> pa.Table:
        """Return all recorded sequences of some steps; None for all steps."""
        return pa.concat_tables([TOKENS.empty_table(), *self._chosen(source, TOKENS, steps)])

    def _chosen(
        self, source: str, schema: pa.Schema, steps: Steps, place: Place | None = None, newest_first: bool = False
    ) -> Iterator[pa.Table]:
        """Yield tables of the rows of some steps, or of one rollout in them."""
        chosen = ALL if steps is None else pc.field("step").isin(list(steps))
        if place is not None:
            chosen &= (pc.field("group") == place[0]) & (pc.field("sample") == place[1])
        own = self._holders(source, "tokens" if schema in (TOKENS, WRITTEN_TOKENS) else "rows", steps)
        for file in reversed(own) if newest_first else own:
            yield from self._read(file, schema, chosen, newest_first)

    def _holders(self, source: str, kind: str, steps: Steps = None) -> list[RecordFile]:
        """Return the files that may have some steps."""
        own = [file for file, _ in self._files.values() if (file.source, file.kind) == (source, kind)]
        if steps is not None:
            own = [file for file in own if any(file.first <= step <= file.last for step in steps)]
        return sorted(own, key=lambda file: file.first)

    def _keep(self, file: RecordFile) -> None:
        """Read and keep the rows of a file without their texts, if there is room for them."""
        found, room = [SCALARS.empty_table()], MAX_KEPT - sum(own.nbytes for own in self._kept.values())
        for table in self._read(file, SCALARS):
            found.append(table)
            if (room := room - table.nbytes) < 0:
                problem = f"not shown: with its rows, more than {MAX_KEPT >> 20} MiB would be kept"
                self.problems[file.path.name] = problem
                del found[1:]
                break
        if file.path in self._files:  # else it was merged meanwhile, and no look would find a change in it
            self._kept[file.path] = pa.concat_tables(found)

    def _read(
        self, file: RecordFile, schema: pa.Schema, chosen: pc.Expression = ALL, last_first: bool = False
    ) -> Iterator[pa.Table]:
        """Yield columns of a file in the form of `schema`, one table for each row group that may have the chosen rows.

        A file that was merged is read from the one that holds it. What cannot be read is a problem.
        """
        num_read = 0
        with suppress(FileNotFoundError):
            for table in self._read_file(Part(file.path, schema, chosen, last_first)):
                num_read += 0 if last_first else len(table)  # in that order, the parts of both files differ
                yield table
            return
        self._look()
        chosen &= (pc.field("step") >= file.first) & (pc.field("step") <= file.last)
        for wide in self._holders(file.source, file.kind, [file.first]):
            with suppress(FileNotFoundError):
                for table in self._read_file(Part(wide.path, schema, chosen, last_first)):
                    yield table.slice(num_read)
                    num_read = max(num_read - len(table), 0)
                return

    def _read_file(self, part: Part) -> Iterator[pa.Table]:
        """Yield the tables of `_read`, from a part on."""
        try:
            place: int | None = 0
            while place is not None:
                table, place = self._read_part(part._replace(start=place))
                if len(table):
                    yield table
        except DataError as error:
            self.problems[part.path.name] = str(error)


def read_file_part(part: Part) -> Rows:
    """Return the next rows of a file."""
    tables, size, end = [part.schema.empty_table()], 0, part.start
    try:
        footer = _footer(part.path)
        _check_version(footer.physical_schema)
        groups = [group.id for group in footer.subset(part.chosen).row_groups][:: -1 if part.last_first else 1]
        for group in groups[part.start :]:
            end += 1
            for table in _batches(part.path, footer, group, part.schema):
                size += table.nbytes
                if size > MAX_PART:
                    raise DataError(TOO_LARGE)
                tables.append(table.filter(part.chosen))
            if size >= PART or part.last_first:  # the caller stops as soon as it has enough
                break
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException, KeyError, MemoryError, UnicodeDecodeError) as error:
        reason = "it takes too much memory" if isinstance(error, MemoryError) else str(error).partition("\n")[0]
        raise DataError(f"cannot be read: {reason}") from error
    return pa.concat_tables(tables), end if end < len(groups) else None


def _batches(path: Path, footer: ParquetFileFragment, group: int, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of one row group, a few at a time: they may take far more memory than the footer says."""
    wanted = [name for name in schema.names if name in footer.physical_schema.names]
    about = footer.metadata.row_group(group)
    chunks = map(about.column, range(about.num_columns))
    sizes = [chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in wanted]
    if sum(sizes) > MAX_PART:
        raise DataError(TOO_LARGE)
    rows = MAX_PART // max([1, *sizes])  # each of them may have a value as large as its whole column in the file
    with pq.ParquetFile(path, metadata=footer.metadata) as opened:
        for batch in opened.iter_batches(max(1, min(rows, ROWS_AT_ONCE)), [group], wanted):
            table = _conformed(pa.Table.from_batches([batch]), schema)
            if empty := [name for name in schema.names if name in NOT_NULL and table[name].null_count]:
                raise DataError(f"cannot be read: rows without a value of {', '.join(empty)}")
            if odd := [name for name in schema.names if name in NUMBERS and not _are_numbers(table[name])]:
                raise DataError(f"cannot be read: rows whose {', '.join(odd)} is below 0, or no finite number")
            yield table


def _are_numbers(column: pa.ChunkedArray) -> bool:
    is_number = pc.and_(pc.greater_equal(column, 0), pc.less(column, BEYOND))
    return pc.all(is_number, min_count=0).as_py()


def _rows(tables: Iterable[pa.Table]) -> list[dict[str, Any]]:
    return [row for table in tables for row in table.to_pylist()]


def _footer(path: Path) -> ParquetFileFragment:
    """Return the schema, the row groups and the statistics of a file; those of the files read last are kept."""
    if (stamp := files.stamp(path)) is None:
        raise FileNotFoundError(path)
    return _footer_of(path, stamp)


@lru_cache(MAX_FOOTERS)
def _footer_of(path: Path, stamp: Stamp) -> ParquetFileFragment:
    footer = ParquetFileFormat().make_fragment(str(path), LocalFileSystem())
    footer.ensure_complete_metadata()
    return footer


def _check_version(schema: pa.Schema) -> None:
    """Check that a file is of a record, and of the version that this library reads."""
    if (version := (schema.metadata or {}).get(VERSION_KEY)) is None:
        raise DataError("no table of a record: it has no version")
    if (written := version.decode(errors="replace")) != str(VERSION):
        raise DataError(f"written in version {written} of the format; this rlite reads version {VERSION}")


def _conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with exactly the columns of a schema. Missing columns are null, invalid UTF-8 is replaced."""
    for field in [field for field in schema if field.name not in table.column_names]:
        table = table.append_column(field, pa.nulls(len(table), field.type))
    return pa.table([_valid(table[field.name].cast(field.type)) for field in schema], schema=schema)


def _valid(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Return a column whose texts are valid UTF-8."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array(list(map(_decoded, column.cast(_as_bytes(column.type)).to_pylist())), column.type)
    return column


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """Return a type with bytes in place of texts."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_list(kind):
        return pa.list_(_as_bytes(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _as_bytes(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_as_bytes(kind.key_type), _as_bytes(kind.item_type))
    return kind


def _decoded(value: Any) -> Any:
    """Return a value with texts in place of its bytes."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, dict):
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_decoded(item) for item in value)
    return value


MEMORY = 2 << 30
"""bytes that the process may take"""
SECONDS = 60.0
"""time for one part"""


def read_part_aside(part: Part) -> Rows:
    """Return what `read_file_part` returns, from another process."""
    part = part._replace(path=part.path.absolute())  # the other process may have begun in another folder
    call = Call(_CODE, cloudpickle.dumps({"part": part}), SECONDS, MEMORY)
    try:
        match shared_pool(1).submit(call).result():
            case ["read", int() | None as place, bytes() as content]:
                table = pa.ipc.open_stream(content).read_all()
                table.validate(full=True)
                if table.schema == part.schema:
                    return table, place
            case ["gone"]:
                raise FileNotFoundError(part.path)
            case ["damaged", str() as text]:
                raise DataError(printable(text))
    except (SandboxError, pa.ArrowException) as error:
        reason, _, _ = str(error).partition("\n")
        raise DataError(f"cannot be read: {reason}") from error
    raise DataError("cannot be read: its reader answered something else")


def read_in_process(part: Part) -> list[Any]:
    """Return the answer of the process: a part in Arrow's stream format, or why there is none."""
    try:
        table, place = read_file_part(part)
    except FileNotFoundError:
        return ["gone"]
    except DataError as error:
        return ["damaged", str(error)]
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return ["read", place, sink.getvalue()]


_CODE = Code.of(read_in_process, what="its reader", max_answer=2 * MAX_PART)
