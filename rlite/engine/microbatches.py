"""Division of a padded batch into data ranks' shares and microbatches, and the batch's values and means from theirs."""

from __future__ import annotations

import math
import numbers
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlite.algorithms.calls import found
from rlite.algorithms.reduce import Mean, PerToken
from rlite.batch import RAGGED
from rlite.data.microbatch_plan import PackingMethod, plan_microbatches
from rlite.data.packs import check_batch, pair_rows, sequence_lengths
from rlite.errors import ConfigError, DataError
from rlite.registry import located

Loss = Callable[[Any, dict[str, Any]], Any]
"""loss_fn(logits [T, V], data) -> mean loss, or (mean loss, dict of what to report: means, which are numbers or `Mean`,
and values of tokens, which are `PerToken`); an OnLogprobs gets log-probabilities and entropies [T] instead of logits"""
Weight = Callable[[dict[str, Any]], Any]
"""loss_weight_fn(data) -> weight of the pack's mean, e.g. its number of action tokens"""


@dataclass(frozen=True)
class BatchShare:
    """One data rank's part of a batch."""

    rows: list[int]
    """row numbers in the whole batch, in the order of the microbatches"""
    batch: dict[str, Tensor]
    """tensors of these rows, cut to the longest of them"""
    microbatches: list[list[int]]
    """row numbers in this share, for each microbatch; every rank has the same number of microbatches"""


def split_batch(
    what: str,
    batch: Mapping[str, Tensor],
    num_data_ranks: int,
    capacity: int,
    costs: Callable[[Sequence[int]], list[float]] | None = None,
    method: PackingMethod = "first_fit_decreasing",
) -> list[BatchShare]:
    """Divide the rows so that all data ranks have similar work.

    Args:
        what: name of the operation, for messages.
        batch: right-padded batch; see `check_batch`. Rows of equal `pair_ids` [N] stay in one microbatch.
        num_data_ranks: number of shares. A share without rows of its own gets some rows for their shape, in no
            microbatch.
        capacity: maximum tokens in a microbatch.
        costs: maps the lengths of the rows to the costs that ranks share evenly; without it, these are the lengths.
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
    row_costs = None if costs is None else costs(lengths)
    plan = plan_microbatches(lengths, num_data_ranks, capacity, pairs, costs=row_costs, method=method)
    return [_share(batch, microbatches, lengths) for microbatches in plan]


def _share(batch: Mapping[str, Tensor], microbatches: list[list[int]], lengths: Sequence[int]) -> BatchShare:
    rows = [row for microbatch in microbatches for row in microbatch] or pair_rows(batch)
    local = {row: index for index, row in enumerate(rows)}
    width, full_width = max(lengths[row] for row in rows), batch["input_ids"].shape[1]
    index = torch.tensor(rows)
    part = {key: value[index] for key, value in batch.items()}
    for key, value in part.items():
        if key in RAGGED:
            part[key] = value[:, : int(batch[RAGGED[key]][index].sum(-1).max())]
        elif value.dim() > 1 and value.shape[1] == full_width:
            part[key] = value[:, :width]
    return BatchShare(rows, part, [[local[row] for row in microbatch] for microbatch in microbatches])


def join_values(what: str, shares: Sequence[BatchShare], results: Sequence[Tensor], attention_mask: Tensor) -> Tensor:
    """Return values [N, L, ...] in the order of the whole batch, padded with 0.

    Args:
        what: name of the values, for messages.
        shares: shares of the batch.
        results: for each share, the values of the tokens of its own rows [T, ...].
        attention_mask: mask of the whole batch, [N, L].

    Raises:
        ConfigError: a share has another number of values than tokens.
    """
    mask = attention_mask.bool()
    most = max(results, key=len)
    padded = most.new_zeros(*mask.shape, *most.shape[1:])
    for share, values in zip(shares, results, strict=True):
        rows = torch.tensor(share.rows[: sum(map(len, share.microbatches))], dtype=torch.long)  # all rows, or none
        row, column = mask[rows].nonzero(as_tuple=True)
        if values.shape[:1] != row.shape:
            what = f"{what}: found values of shape {list(values.shape)} for {len(row)} tokens"
            raise ConfigError(f"{what}; expected one value for each token of every pack")
        padded[rows[row], column] = values
    return padded


def call_loss(loss_fn: Loss, outputs: Any, data: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """Return the loss of a pack and the means that loss_fn reports.

    Args:
        loss_fn: the loss.
        outputs: logits [T, V], or a TokenLogprobs of [T].
        data: the pack.

    Raises:
        ConfigError: loss_fn returned another type, or reports something else than numbers.
    """
    result = loss_fn(outputs, data)
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    loss, report = result if is_pair else (result, {})
    if not isinstance(loss, Tensor) or not _is_number(loss):
        what = f"loss_fn {located(loss_fn)} returned {found(loss)}"
        raise ConfigError(f"{what}; expected a mean, one number in a tensor, or (mean, dict of means)")
    for name, value in report.items():
        if not isinstance(name, str) or not (isinstance(value, Mean | PerToken) or _is_number(value)):
            what = f"loss_fn {located(loss_fn)} reports {found(value)} as {name!r}"
            raise ConfigError(f"{what}; expected a number, or a Mean or PerToken of rlite.algorithms, under a text")
    return loss, report


def weigh(loss_weight_fn: Weight, data: Any) -> float:
    """Return the weight of a pack's mean.

    Args:
        loss_weight_fn: the function of the weight.
        data: the pack.

    Raises:
        ConfigError: the weight is no finite number of at least 0.
    """
    weight = loss_weight_fn(data)
    with suppress(OverflowError):  # of a whole number beyond every float
        if _is_number(weight) and 0 <= (number := float(weight)) < math.inf:
            return number
    what = f"loss_weight_fn {located(loss_weight_fn)} returned {found(weight)}"
    raise ConfigError(f"{what}; expected the weight of a pack's mean, a finite number of at least 0")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real)


class LossSums:
    """Sums of a batch's loss and of the means that its loss_fn reports, on one rank."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, Any]] = {}
        """total and count of each mean"""

    def add(self, means: Mapping[str, Any], weight: float) -> None:
        """Add the means of a pack.

        A `Mean` counts its own elements; a number counts `weight`. If `weight` is 0 the means may be NaN. A `PerToken`
        is no mean, and is left out.

        Args:
            means: what the loss of the pack reports, by name.
            weight: weight of the pack.
        """
        for key, mean in means.items():
            if isinstance(mean, PerToken):
                continue
            total, count = self._sums.get(key, (0.0, 0.0))
            if weight:
                own = (mean.total, mean.count) if isinstance(mean, Mean) else (_number(mean) * weight, weight)
                total, count = total + _number(own[0]), count + _number(own[1])
            self._sums[key] = total, count

    def means(self, sum_over: Callable[[list[float]], list[float]], num_data_ranks: int) -> dict[str, float]:
        """Return the batch's means, by name.

        Args:
            sum_over: returns the sums over all data ranks; a collective.
            num_data_ranks: number of data ranks.

        Raises:
            ConfigError: the ranks have different names. Every rank raises it.
        """
        names = sorted(self._sums)
        own = float(zlib.crc32("\n".join(names).encode()))
        if sum_over([own])[0] != own * num_data_ranks:
            what = f"this rank's loss reports {names}, another rank's something else"
            raise ConfigError(f"{what}: a loss has to report the same metrics for every pack")
        summed = sum_over([float(part) for name in names for part in self._sums[name]])
        totals, counts = summed[::2], summed[1::2]
        return {name: total / count if count else 0.0 for name, total, count in zip(names, totals, counts, strict=True)}


def _number(value: Any) -> Tensor | float:
    """Return the value in float64 on its device. A GPU continues to work until `means` reads the batch's means."""
    return value.detach().double().reshape(()) if isinstance(value, Tensor) else float(value)
