"""Batches of a record: the rows of a step as they were trained on, from which the step is made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlite.batch import KEYS
from rlite.data.packs import check_batch
from rlite.errors import DataError
from rlite.services.record.files import TRAIN
from rlite.services.record.reader import RecordReader

FROM_COLUMNS = {"input_ids": "ids", "loss_mask": "mask", "versions": "versions", "logprobs": "logprobs"}
"""keys of a batch that a workflow makes, by the columns of tokens that hold them"""
MADE = frozenset(key.name for key in KEYS.values() if key.writer in ("reference", "critic", "trainer", "advantages"))
"""keys of a batch that a step makes itself"""
DTYPES = {name: getattr(torch, name) for name in ("bool", "uint8", "int8", "int16", "int32", "int64")}
DTYPES |= {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
"""types of recorded values by name"""
DAMAGED = (TypeError, ValueError, LookupError, RuntimeError, ArithmeticError)
"""errors of code that reads a damaged record"""
RECORD_ALL = "trainer.record=all records every step so; the default, sample, the steps 1, 11, 21, ... alone"


class DamagedBatch(DataError):
    """A recorded batch is there, and cannot be what the run has written."""


class RecordedBatch(NamedTuple):
    """The batch of one step."""

    given: TensorDict
    """the rollouts, as the step has received them"""
    made: Mapping[str, Tensor]
    """values of the step: `advantages`, `trainer_logprobs`, `entropy` and others [N, L]; NaN where unknown"""


def read_batch(folder: Path, step: int) -> RecordedBatch:
    """Return the batch that a recorded step was trained on.

    Args:
        folder: the run's folder.
        step: the step.

    Raises:
        DataError: the record does not hold the whole batch; the message says why, and which option would have kept it.
        DamagedBatch: it holds a batch that cannot be the run's.
    """
    reader = RecordReader(folder)
    reader.refresh()
    where = f"{folder}: step {step}"
    if TRAIN not in reader.sources:
        raise DataError(f"{where}: the run kept no record of its rollouts (trainer.record=none). {RECORD_ALL}")
    found = [row for row in reader.batch_rows(step) if row["row"] is not None]
    trained = {(row["group"], row["sample"]) for row in reader.rollouts(TRAIN, step) if row["advantage"] is not None}
    lacking = trained - {(row["group"], row["sample"]) for row in found}
    if not found or lacking:
        why = "; ".join(reader.problems.values()) or f"the tokens of {len(lacking)} of its rollouts are not recorded"
        if not trained:
            why = "the record has no rollout that it was trained on"
        elif not found and len(lacking) == len(trained) and list(reader.tokens(TRAIN, step)):
            why = "it was recorded by an earlier version of rlite, which did not keep whole batches"
        raise DataError(f"{where}: {why}. {RECORD_ALL}")
    found.sort(key=lambda row: row["row"])
    if [row["row"] for row in found] != list(range(len(found))):
        raise DamagedBatch(f"{where}: the record has {len(found)} rows of its batch, and they are not numbered from 0")
    try:
        return rebuilt(found)
    except DAMAGED as error:
        raise DamagedBatch(f"{where}: its record is damaged: {error}") from error


def rebuilt(rows: Sequence[Mapping[str, Any]]) -> RecordedBatch:
    """Return the batch of recorded rows, each with the columns of `BATCH_ROWS`, in the order of the batch.

    Raises:
        DataError: a value is not what its type and shape say.
    """
    columns = {key: _padded(key, [_column(key, row[name]) for row in rows]) for key, name in FROM_COLUMNS.items()}
    lengths = torch.tensor([len(row["ids"]) for row in rows])
    columns["attention_mask"] = torch.arange(columns["input_ids"].shape[1]) < lengths[:, None]
    others = [dict(row["others"]) for row in rows]
    for key in others[0]:
        if key in columns:
            raise DataError(f"the record has {key} twice")
        columns[key] = _padded(key, [read_value(key, row.get(key)) for row in others])
    made = {key: columns.pop(key) for key in [*columns] if key in MADE}
    for name in ("advantages", "trainer_logprobs", "entropy"):
        length = columns["input_ids"].shape[1]
        values = [np.full(length, np.nan) if row[name] is None else np.asarray(row[name]) for row in rows]
        made[name] = _padded(name, [torch.tensor(value, dtype=torch.float32) for value in values])
    check_batch(columns)
    return RecordedBatch(TensorDict(columns, batch_size=[len(rows)]), made)


def _column(key: str, values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=DTYPES[KEYS[key].dtype])


def read_value(key: str, stored: Mapping[str, Any] | None) -> Tensor:
    """Return a stored value.

    Args:
        key: its key.
        stored: a value of OTHERS; None if a row lacks it.

    Raises:
        DataError: its bytes are not what its type and shape say.
    """
    dtype = None if stored is None else DTYPES.get(stored["dtype"])
    if stored is None or dtype is None or len(stored["data"]) != dtype.itemsize * int(np.prod(stored["shape"])):
        raise DataError(f"the record's value of {key} is damaged: its bytes are not what its type and shape say")
    flat = torch.frombuffer(bytearray(stored["data"]), dtype=dtype) if stored["data"] else torch.empty(0, dtype=dtype)
    return flat.reshape(stored["shape"])


def _padded(key: str, values: Sequence[Tensor]) -> Tensor:
    if values[0].dim() == 0:
        return torch.stack(list(values))
    return pad_sequence(list(values), batch_first=True, padding_value=KEYS[key].padding if key in KEYS else 0)
