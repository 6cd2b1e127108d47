"""The files of a record: their names, their columns, and the steps that they lack.

FOLDER/record/train-00000012.rows.parquet          what step 12 decided
FOLDER/record/train-00000012.tokens.parquet        tokens of some of its rollouts
FOLDER/record/eval.NAME-00000012.rows.parquet      the evaluation of set NAME after step 12
FOLDER/record/train-00000001_00000100.rows.parquet steps 1 to 100, compacted

The steps follow the last hyphen, so a NAME may end in a hyphen and digits.

FOLDER/record/gaps.jsonl   {"first": 12, "last": 40, "reason": "the disk is full"}    steps that could not be written

There is one row for each rollout, and beside it the tokens of some of them. The field metadata `meaning` describes each
column.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from rlite import files
from rlite.trainer.run.folder import RECORD
from rlite.types import Status

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
OTHERS = pa.map_(pa.string(), pa.struct({"dtype": pa.string(), "shape": pa.list_(pa.int64()), "data": pa.binary()}))
IN_BATCH = _schema(
    row=(pa.int32(), "number of the sequence in the batch that was trained on; null if it is in none"),
    others=(OTHERS, "the other keys of its row in the batch, without padding"),
)
WRITTEN_TOKENS = pa.schema([*TOKENS, *IN_BATCH], metadata=TOKENS.metadata)
"""columns of a file of tokens; those that TOKENS lacks are read to make a step again or to check it, and else never"""
NUMBERS = (
    *("step", "group", "sample", "sequence", "turns", "tool_calls", "tool_errors", "prompt_tokens", "response_tokens"),
    *("version_min", "version_max", "ended"),
    *("seconds_queue", "seconds_generate", "seconds_environment", "seconds_reward"),
)
"""columns of ROWS and TOKENS whose values are 0 or more, and less than BEYOND"""
BEYOND = 2**53
NOT_NULL = ("step", "group", "sample", "sequence", "item", "status", "reason")
"""columns of ROWS and TOKENS that have a value in every row"""


FOLDER = RECORD
TRAIN = "train"
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
    paths = sorted((folder / FOLDER).glob("*.parquet"))
    return [file for path in paths if (file := file_of(path)) and os.path.isfile(path)]


def file_of(path: Path) -> RecordFile | None:
    """Return the file of a record that a path names, whether or not it is there; None if it names none."""
    if (match := _NAME.fullmatch(path.name)) is None:
        return None
    source, first, last, kind = match.groups()
    return RecordFile(path, source, int(first), int(last or first), kind)


def record_files(folder: Path) -> list[RecordFile]:
    """Return the files of the record in a run's folder, by name; each step is in one file of its source and kind."""
    found = all_files(folder)
    compacted = [file for file in found if file.first < file.last]
    return [file for file in found if not any(wide.covers(file) for wide in compacted)]


def path_of(folder: Path, source: str, kind: str, first: int, last: int) -> Path:
    """Return the path of the file of some steps."""
    steps = f"{first:08d}" if first == last else f"{first:08d}_{last:08d}"
    return folder / FOLDER / f"{source}-{steps}.{kind}.parquet"


GAPS = "gaps.jsonl"
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Gap:
    """Steps that may be missing in a record, all of them or in part."""

    first: int
    last: int | None
    """last step; None if the run has not been resumed since"""
    reason: str

    def __contains__(self, step: int) -> bool:
        """Return whether a step may be missing."""
        return self.first <= step and (self.last is None or step <= self.last)

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
