"""Prefix trees: tokens with which rows of a pack begin alike are computed once, forward and backward.

The siblings of a group share their prompt, the branches of an episode share earlier turns. In the order of their
tokens, each row shares most with the row before it. A model then computes nodes: all tokens of the first row, and of
every later row the tokens that it does not share. Losses still see every row whole.

    rows         a b c d e            nodes      a b c d e f g h      computed by the model
                 a b c f g            index      0 1 2 3 4            values of nodes become values of tokens;
                 a b h                           0 1 2 5 6            a gradient is the sum over the rows of a node
                                                 0 1 7

A node stands for a token, all tokens before it, and the token after it: its label, so that the output embedding, too,
works on nodes. So two rows share one token less than they have in common. A row's queries are its own nodes, and its
keys are the nodes of all its tokens, so that any attention with fewer queries than keys computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlite.runtime.parallel.upload import upload

MIN_SHARED = 16
"""fewest tokens that are worth sharing"""
MIN_SHARE = 8
"""two rows share nothing if it would be less than this part (an eighth) of the shorter one"""
MIN_SAVED = 32
"""a batch is computed whole if sharing would save less than this part of its tokens"""
ALIKE = ("input_ids", "kept_counts", "routed_experts", "teacher", "teacher_view")
"""keys per token that change what a model computes"""
READ = (*ALIKE, "versions", "kept_ids")
"""keys by which prefixes are found"""


class Sharing(NamedTuple):
    """Rows of one pack in the order of their tokens."""

    order: list[int]
    """places of the rows in the pack"""
    counts: list[int]
    """tokens that each row, in this order, shares with the row before it"""


@dataclass(frozen=True)
class Prefixes:
    """Rows of a batch in the order of their tokens."""

    order: list[int]
    """the rows"""
    shared: list[int]
    """tokens that each row, in this order, shares with the row before it"""
    lengths: Sequence[int]
    """tokens of each row of the batch"""

    @classmethod
    def of(
        cls, batch: Mapping[str, Tensor], lengths: Sequence[int], may_share: Callable[[], bool] | None
    ) -> Prefixes | None:
        """Return the prefixes of a right-padded batch; None if sharing them would save next to nothing.

        Policy versions part rows, too, where both are known: the tokens were sampled by different policies.

        `batch`: `input_ids` [N, L] and other keys. `may_share`: asked whether prefixes may be shared, if that would
        save work; None is no.
        """
        if may_share is None:
            return None
        columns = {name: batch[name].cpu().numpy() for name in READ if name in batch}
        keys = [row[:length].tobytes() for row, length in zip(columns["input_ids"], lengths, strict=True)]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        shared = [0, *(_worth(_common(columns, *pair, lengths), *pair, lengths) for pair in pairwise(order))]
        is_worth = sum(shared) * MIN_SAVED >= sum(lengths)
        return cls(order, shared, lengths) if is_worth and may_share() else None

    @cached_property
    def _place(self) -> dict[int, int]:
        return {row: number for number, row in enumerate(self.order)}

    def within(self, rows: Sequence[int]) -> Sharing:
        """Return what these rows of the batch share, as places among them."""
        order = sorted(range(len(rows)), key=lambda own: self._place[rows[own]])
        places = [self._place[rows[own]] for own in order]
        return Sharing(order, [0, *(min(self.shared[before + 1 : own + 1]) for before, own in pairwise(places))])

    def num_unique(self, rows: Sequence[int]) -> int:
        """Return the tokens that a pack of these rows computes."""
        return sum(self.lengths[row] for row in rows) - sum(self.within(rows).counts)

    def units(self, capacity: int, num_parts: int) -> list[list[int]]:
        """Return rows that stay together: rows that share tokens, in at most `num_parts` parts of equally many rows.

        A part that computes more than `capacity` tokens is cut further.
        """
        starts = [number for number, count in enumerate(self.shared) if not count]
        units: list[list[int]] = []
        for start, stop in pairwise([*starts, len(self.order)]):
            cuts = {start + (stop - start) * part // num_parts for part in range(num_parts)}
            size = 0
            for number in range(start, stop):
                row = self.order[number]
                added = self.lengths[row] - self.shared[number]
                if number in cuts or size + added > capacity:
                    units.append([])
                    size, added = 0, self.lengths[row]
                units[-1].append(row)
                size += added
        return units


def _common(columns: Mapping[str, np.ndarray], first: int, second: int, lengths: Sequence[int]) -> int:
    """Return the number of tokens with which two rows begin alike, in all columns."""
    rows = {name: (column[first], column[second]) for name, column in columns.items()}
    count = min(lengths[first], lengths[second])
    for name in ALIKE:
        if name in rows and count:
            count = _agreeing(*rows[name], count)
    if "versions" in rows and count:
        one, other = (row[:count] for row in rows["versions"])
        differs = (one != other) & (one >= 0) & (other >= 0)
        count = int(differs.argmax()) if differs.any() else count
    if "kept_ids" in rows and count:
        ends = rows["kept_counts"][0][:count].cumsum()
        count = int(np.searchsorted(ends, _agreeing(*rows["kept_ids"], int(ends[-1])), side="right"))
    return count


def _agreeing(one: np.ndarray, other: np.ndarray, count: int) -> int:
    """Return the number of first entries, of at most `count`, that are equal."""
    differs = (one[:count] != other[:count]).any(axis=tuple(range(1, one.ndim)))
    return int(differs.argmax()) if differs.any() else count


def _worth(common: int, first: int, second: int, lengths: Sequence[int]) -> int:
    """Return the tokens that two rows share: one less than they have in common, or none if it saves too little."""
    count, shorter = common - 1, min(lengths[first], lengths[second])
    return count if count >= MIN_SHARED and count * MIN_SHARE >= shorter else 0


class PrefixTree:
    """The nodes of a pack."""

    def __init__(self, lengths: Sequence[int], sharing: Sharing, device: torch.device) -> None:
        starts = np.cumsum([0, *lengths])
        paths: dict[int, Tensor] = {}
        borders, tokens, path = [0], [], torch.empty(0, dtype=torch.int64)
        for row, count in zip(*sharing, strict=True):
            borders.append(borders[-1] + lengths[row] - count)
            path = paths[row] = torch.cat([path[:count], torch.arange(*borders[-2:])])
            tokens.append(torch.arange(int(starts[row]) + count, int(starts[row + 1])))
        self.borders = borders
        """places where the nodes of each row begin and end, in the order of the tokens"""
        self.paths = list(paths.values())
        """nodes of all tokens of each row, in the same order"""
        index = torch.cat([paths[row] for row in range(len(lengths))])
        self._host_index = index
        self.index = upload(index, device)
        """node of each token of the pack, [T] int64"""
        self.tokens = upload(torch.cat(tokens), device)
        """a token of the pack that each node stands for, [U] int64"""
        self.counts = upload(torch.bincount(index), device)
        """number of tokens of the pack that a node stands for, [U] int64"""

    def any(self, mask: Tensor) -> Tensor:
        """Return whether the mask [T], on the host or the tree's device, has a token of a node, [U]."""
        index = self._host_index if mask.device.type == "cpu" else self.index
        return mask.new_zeros(len(self.tokens), dtype=torch.int64).index_add_(0, index, mask.long()) > 0


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return `x[index]`, whose gradient is added up in float32 or wider.

    `x`: [U, ...]. `index`: [K] int64; rows may occur many times.
    """
    return _Select.apply(x, index)


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.num_rows = index, len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.num_rows, *grad.shape[1:], dtype=wide)
        return total.index_add_(0, ctx.index, grad.to(wide)).to(grad.dtype), None
