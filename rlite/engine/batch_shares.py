"""Division of a padded batch into data ranks' shares and microbatches, and the reverse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlite.data.packing import PackingMethod, plan_microbatches
from rlite.data.packs import check_batch, companions, sequence_lengths
from rlite.errors import DataError


@dataclass(frozen=True)
class BatchShare:
    """One data rank's part of a batch."""

    rows: list[int]
    """row numbers in the whole batch"""
    batch: dict[str, Tensor]
    """tensors of these rows, cut to the longest of them"""
    microbatches: list[list[int]]
    """row numbers in this share, for each microbatch; every rank has the same number of microbatches"""


def split_batch(
    what: str,
    batch: Mapping[str, Tensor],
    num_data_ranks: int,
    capacity: int,
    costs: Callable[[Sequence[int]], list[float] | None],
    method: PackingMethod = "first_fit_decreasing",
) -> list[BatchShare]:
    """Divide the rows so that all data ranks have similar work.

    Args:
        what: name of the operation, for messages.
        batch: right-padded batch; see `check_batch`. Rows of equal `pair_ids` [N] stay in one microbatch.
        num_data_ranks: number of shares. A share without rows of its own gets some rows for their shape, in no
            microbatch.
        capacity: maximum tokens in a microbatch.
        costs: maps the lengths of the rows to the costs that ranks share evenly; None is the lengths.
        method: packing method; see `plan_microbatches`.

    Returns:
        One share for each data rank.

    Raises:
        DataError: the batch has another form, has no rows, or has a row longer than `capacity`.
    """
    check_batch(batch)
    if len(batch["input_ids"]) == 0:
        raise DataError(f"{what}: the batch has no rows")
    lengths = sequence_lengths(batch)
    pairs = batch["pair_ids"].tolist() if "pair_ids" in batch else None
    plan = plan_microbatches(lengths, num_data_ranks, capacity, pairs, costs=costs(lengths), method=method)
    return [_share(batch, microbatches, lengths) for microbatches in plan]


def _share(batch: Mapping[str, Tensor], microbatches: list[list[int]], lengths: Sequence[int]) -> BatchShare:
    rows = [row for microbatch in microbatches for row in microbatch] or companions(batch)
    local = {row: index for index, row in enumerate(rows)}
    width, full_width = max(lengths[row] for row in rows), batch["input_ids"].shape[1]
    index = torch.tensor(rows)
    part = {
        key: value[index][:, :width] if value.dim() > 1 and value.shape[1] == full_width else value[index]
        for key, value in batch.items()
    }
    return BatchShare(rows, part, [[local[row] for row in microbatch] for microbatch in microbatches])


def join_rows(shares: Sequence[BatchShare], results: Sequence[Mapping[int, Tensor]], shape: Sequence[int]) -> Tensor:
    """Return values [N, L, ...] in the order of the whole batch, padded with 0.

    Args:
        shares: shares of the batch.
        results: for each share, row number in the share -> values, as wide as the share.
        shape: [N, L] of the whole batch.
    """
    first = next(value for part in results for value in part.values())
    padded = first.new_zeros(*shape, *first.shape[1:])
    for share, values in zip(shares, results, strict=True):
        for local, value in values.items():
            padded[share.rows[local], : len(value)] = value
    return padded
