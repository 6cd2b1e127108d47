"""The tables of a record: one row for each rollout, and beside it the tokens of some of them.

The field metadata `meaning` describes each column. A record is Parquet, in `FOLDER/record/` (`files.py`).
"""

from __future__ import annotations

from typing import get_args

import pyarrow as pa

from rlite.types import Status

VERSION = 1
"""version of the format; a reader refuses other versions"""
VERSION_KEY = b"rlite.record"
"""metadata key of the tables that holds the version"""

STATUSES: tuple[Status, ...] = get_args(Status)


def _schema(**columns: tuple[pa.DataType, str]) -> pa.Schema:
    fields = [pa.field(name, kind, metadata={"meaning": meaning}) for name, (kind, meaning) in columns.items()]
    return pa.schema(fields, metadata={VERSION_KEY: str(VERSION)})


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
    redrawn=(
        pa.string(),
        "kind of the failure after which the model answered anew; empty if all answers are those drawn first",
    ),
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
    seconds_environment=(
        pa.float64(),
        "of the episode outside of engine and reward: its environment, if it has one, and the rest",
    ),
    seconds_reward=(pa.float64(), "in which the episode waited for rewards"),
    ended=(pa.float64(), "Unix time of the episode's end"),
    events=(pa.list_(EVENT), "queue, generate, environment and reward, in seconds after the group's submission"),
    data=(
        pa.map_(pa.string(), pa.string()),
        "other columns of the data item, shortened; null if this rollout's text is not recorded",
    ),
    segments=(
        pa.list_(SEGMENT),
        "texts in order, by role: prompt, model, environment; null if this rollout's text is not recorded",
    ),
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
