"""Batches of a record: the rows of a step as they were trained on, from which the step is made again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlite.batch import KEYS, PER_TOKEN
from rlite.data.packs import check_batch
from rlite.errors import DataError
from rlite.services.record.files import BEYOND, TRAIN
from rlite.services.record.reader import RecordReader

GIVEN = {"input_ids": "ids", "loss_mask": "mask", "versions": "versions", "logprobs": "logprobs"}
"""columns of tokens that hold keys of a batch that a workflow makes, by these keys"""
OF_STEP = ("advantages", "trainer_logprobs", "entropy")
"""columns of tokens that a step makes"""
MADE = frozenset(key.name for key in KEYS.values() if key.writer in ("reference", "critic", "trainer", "advantages"))
"""keys of a batch that a step makes itself"""
DTYPES = {name: getattr(torch, name) for name in ("bool", "uint8", "int8", "int16", "int32", "int64")}
DTYPES |= {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
"""types of recorded values by name"""
MAKERS = ("workflow", "data", "collector")
"""beginnings of the writers of the keys that a record gives to a step"""
DAMAGED = (TypeError, ValueError, LookupError, RuntimeError, ArithmeticError, AttributeError)
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


def read_batch(reader: RecordReader, step: int) -> RecordedBatch:
    """Return the batch that a recorded step was trained on."""
    where = f"{reader.folder}: step {step}"
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
    """Return the batch of recorded rows, each with the columns of `WRITTEN_TOKENS`, in the order of the batch."""
    for row, name in product(rows, GIVEN.values()):
        if row[name] is None or None in row[name] or len(row[name]) != len(row["ids"]):
            told = f"group {row['group']}, sample {row['sample']}, sequence {row['sequence']}"
            raise DataError(f"{told}: {name} does not have one value for each token")
    dtypes = {key: DTYPES[KEYS[key].dtype] for key in GIVEN}
    columns = {key: [torch.tensor(row[name], dtype=dtypes[key]) for row in rows] for key, name in GIVEN.items()}
    for name in OF_STEP:
        values = [[math.nan] * len(row["ids"]) if row[name] is None else row[name] for row in rows]
        columns[name] = [torch.tensor(value, dtype=torch.float32) for value in values]
    others = [dict(row["others"]) for row in rows]
    for key in others[0]:
        if key in columns:
            raise DataError(f"it has {key} twice")
        columns[key] = [read_value(key, row.get(key)) for row in others]
    needed = sum(len(rows) * max(value.nbytes for value in values) for values in columns.values())
    if needed > (free := psutil.virtual_memory().available):
        longest = max(len(row["ids"]) for row in rows)
        told = f"{len(rows)} rows of up to {longest:,} tokens take {needed / 1e9:.3g} GB"
        raise DataError(f"{told} when they are padded, and {free / 1e9:.3g} GB of memory are free")
    lengths = torch.tensor([len(row["ids"]) for row in rows])
    batch = {key: _padded(key, values) for key, values in columns.items()}
    batch["attention_mask"] = torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]
    made = {key: batch.pop(key) for key in [*batch] if key in MADE or key in OF_STEP}
    check_batch(batch)
    return RecordedBatch(TensorDict(batch, batch_size=[len(rows)]), made)


def check_values(batch: TensorDict, vocabulary: int | None, where: str) -> None:
    """Check that the values of a batch are what the table of keys says, as far as a workflow or the data made them.

    `vocabulary`: size of the model's vocabulary; None if it is not known.
    """
    for key, value in ((str(key), value) for key, value in batch.items() if isinstance(value, Tensor)):
        known = KEYS.get(key)
        if known is None or not known.writer.startswith(MAKERS) or not value.numel():
            continue
        is_float = value.dtype.is_floating_point
        if key in PER_TOKEN and (is_float != DTYPES[known.dtype].is_floating_point or value.dim() != 2):
            told = f"{key} is {value.dtype} of shape {list(value.shape)}; expected {known.dtype} {known.shape}"
            raise DamagedBatch(f"{where}: {told}")
        least = -BEYOND if is_float else min(known.padding, 0)
        most = vocabulary if vocabulary and key in ("input_ids", "kept_ids") else BEYOND
        for odd in [odd for odd in (value.min().item(), value.max().item()) if not least <= odd < most][:1]:
            place = ((value == odd) | (value != value)).nonzero()[0].tolist()
            at = ", ".join(f"{name} {number}" for name, number in zip(("row", "token", "value"), place, strict=False))
            raise DamagedBatch(f"{where}, {at}: {key} has {odd}; expected {least:,} to {most - 1:,}")


def read_value(key: str, stored: Mapping[str, Any] | None) -> Tensor:
    """Return a stored value.

    `stored`: a value of OTHERS; None if a row lacks it.
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
