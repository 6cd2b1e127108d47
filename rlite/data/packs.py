"""Batches of rows, right-padded, and packs: rows of a batch, concatenated to one-dimensional tensors."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlite.batch import KEYS, PACK_LAYOUT, RAGGED
from rlite.errors import DataError

BatchT = TypeVar("BatchT", bound=Any)


def with_keys(batch: BatchT, **columns: Any) -> BatchT:
    """Return a batch that has further keys, or other values of some keys. Tensors are shared, and `batch` is unchanged.

    Args:
        batch: a TensorDict.
        columns: tensors by key, each with as many rows as the batch.
    """
    return batch.clone(recurse=False).update(columns)


def check_has(batch: Any, *names: str) -> None:
    """Check that a batch has these keys.

    Raises:
        DataError: A key is missing; the message names its writer and its content.
    """
    for name in names:
        if name not in batch:
            key = KEYS[name]
            raise DataError(
                f"the batch has no {name!r}, which the {key.writer} must return: {key.meaning} Expected {key.dtype} "
                f"{key.shape}; it has {', '.join(sorted(map(str, batch.keys())))}"
            )


def check_one_per_row(batch: Any, name: str) -> None:
    """Check that a key of a batch has one value for each row, not one for each token.

    Raises:
        DataError: The key is missing, or has another shape.
    """
    check_has(batch, name)
    if batch[name].dim() != 1:
        raise DataError(
            f"{name} has shape {list(batch[name].shape)}; expected [{len(batch)}], one for each row: rewards of single "
            "tokens are the key token_rewards, beside rewards with their sum"
        )


def check_batch(batch: Any) -> None:
    """Check the form of a right-padded batch: input_ids and attention_mask [N, L], and N rows in every key.

    Raises:
        DataError: the batch has another form.
    """
    missing = [key for key in ("input_ids", "attention_mask") if key not in batch]
    if missing:
        raise DataError(f"a batch needs input_ids and attention_mask [N, L]; missing: {', '.join(missing)}")
    shape = tuple(batch["input_ids"].shape)
    if len(shape) != 2 or tuple(batch["attention_mask"].shape) != shape:
        raise DataError(
            f"input_ids {shape} and attention_mask {tuple(batch['attention_mask'].shape)}: expected both [N, L]"
        )
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise DataError(f"{key}: expected a tensor [{shape[0]}] or [{shape[0]}, {shape[1]}], found {value!r}")
        if key not in RAGGED and (
            value.shape[0] != shape[0] or (value.dim() > 1 and tuple(value.shape[:2]) != shape and value.shape[1] != 1)
        ):
            raise DataError(f"{key} {tuple(value.shape)}: expected [{shape[0]}] or [{shape[0]}, {shape[1]}]")
    mask = batch["attention_mask"].bool()
    if (mask[:, 1:] & ~mask[:, :-1]).any() or not mask[:, 0].all():
        row = int(((mask[:, 1:] & ~mask[:, :-1]).any(1) | ~mask[:, 0]).nonzero()[0])
        raise DataError(f"row {row}: attention_mask must be ones and then zeros (right padding), and not all zeros")
    check_ragged(batch, "the batch")


def check_ragged(batch: Any, what: str) -> None:
    """Check that each ragged key holds the values that its counts announce.

    Raises:
        DataError: a key holds another number of values; the message begins with `what`.
    """
    shape = tuple(batch["input_ids"].shape)
    for key, counts in RAGGED.items():
        if key not in batch and counts not in batch:
            continue
        if key not in batch or counts not in batch or tuple(batch[counts].shape) != shape:
            raise DataError(
                f"{what}: expected {key} [{shape[0]}, M] with {counts} [{shape[0]}, {shape[1]}], its values per token"
            )
        values, number = batch[key], batch[counts]
        if values.dim() != 2 or len(values) != shape[0] or values.is_floating_point():
            raise DataError(
                f"{what}: {key} is {values.dtype} {list(values.shape)}; expected whole numbers [{shape[0]}, M], the "
                "values of each row end to end"
            )
        if (number < 0).any() or (number[:, 0] != 0).any() or (number.bool() & ~batch["attention_mask"].bool()).any():
            raise DataError(f"{what}: {counts} must be at least 0, and 0 for the first token of a row and for padding")
        if (most := max(number.sum(-1).tolist(), default=0)) > values.shape[1]:
            raise DataError(f"{what}: {counts} counts {most} values in a row, and {key} has {values.shape[1]}")


def sequence_lengths(batch: Any) -> list[int]:
    """Return the tokens of each row of a right-padded batch."""
    return batch["attention_mask"].sum(-1).tolist()


def pair_rows(batch: Mapping[str, Tensor]) -> list[int]:
    """Return the rows that stay in one pack with row 0, including itself: rows with the same `pair_ids`, if any."""
    if "pair_ids" not in batch:
        return [0]
    return (batch["pair_ids"] == batch["pair_ids"][0]).nonzero()[:, 0].tolist()


def is_ragged_value(counts: Tensor, width: int) -> Tensor:
    """Return where a ragged key has values, `[n, width]`; the rest is padding.

    Args:
        counts: number of values of each token, `[n, L]`.
        width: width of the ragged key.
    """
    return torch.arange(width) < counts.sum(-1, keepdim=True)


class Pack(UserDict[str, Any]):
    """Rows of a batch, concatenated; each key is packed and moved to the device when it is first read."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, partial):  # not read yet
            value = self.data[key] = value()
        return value


def lazy_pack(batch: Mapping[str, Tensor], rows: Sequence[int], device: torch.device) -> Pack:
    """Concatenate rows of a right-padded batch.

    Args:
        batch: keys [N, L, ...] per token, ragged keys [N, M], or [N] or [N, 1] per row. It must not change while the
            pack is read.
        rows: the rows to take, in this order.
        device: where the pack is read.

    Returns:
        Keys [T, ...] per token, [K] for ragged keys, and [n] or [n, 1] per sequence, with cu_seqlens [n + 1] int32,
            position_ids [T] and max_seqlen.
    """

    def packed_key(key: str, value: Tensor) -> Tensor:
        selected = value[index]
        if key in RAGGED:
            selected = selected[is_ragged_value(batch[RAGGED[key]][index], selected.shape[1])]
        elif selected.shape[:2] == mask.shape:
            selected = selected[mask]
        return selected.to(device)

    index = torch.as_tensor(rows)
    mask = batch["attention_mask"][index].bool()
    lengths = mask.sum(-1)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    packed = Pack({key: partial(packed_key, key, value) for key, value in batch.items() if key not in PACK_LAYOUT})
    packed["cu_seqlens"] = starts.to(device)
    packed["position_ids"] = (torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(lengths)).to(device)
    packed["max_seqlen"] = int(lengths.max())
    return packed
