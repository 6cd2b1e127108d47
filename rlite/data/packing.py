"""Pack token rows into microbatches of bounded size, the same number on every data-parallel rank.

The plan is row indices only: pure, the same on every rank that computes it, made before any tensor is touched.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import zip_longest

import numpy as np

from rlite.data.balancing import balanced_partitions, karmarkar_karp
from rlite.errors import DataError

Plan = list[list[list[int]]]
"""[rank][microbatch][row indices]"""


def _checked_lengths(lengths: Sequence[int], capacity: int) -> list[int]:
    if capacity < 1:
        raise DataError(f"capacity={capacity}: expected at least 1 token")
    checked = [int(length) for length in lengths]
    for row, length in enumerate(checked):
        if length < 0:
            raise DataError(f"row {row} has length {length}; expected at least 0 tokens")
        if length > capacity:
            raise DataError(
                f"row {row} has {length} tokens, and a microbatch holds at most {capacity}; "
                "truncate or drop the row, or raise the capacity (max_tokens_per_microbatch, max_length_per_device)"
            )
    return checked


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack rows into few bins of at most `capacity` tokens: longest row first, each into the first bin with room.

    First-fit decreasing needs at most 11/9 of the fewest possible bins plus 6/9 (Dosa 2007), and far less on the
    length distributions of text.

    Args:
        lengths: tokens of each row.
        capacity: most tokens in one bin.

    Returns:
        Bins of row indices, ascending in each, every row in exactly one bin; no bin is empty.

    Raises:
        DataError: a row is longer than `capacity`; names the row, its length and the capacity.
    """
    lengths = _checked_lengths(lengths, capacity)
    room = np.full(len(lengths), capacity, dtype=np.int64)  # of every bin that could be opened
    bins: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        index = int(np.argmax(room[: len(bins) + 1] >= lengths[row]))
        if index == len(bins):
            bins.append([])
        bins[index].append(row)
        room[index] -= lengths[row]
    return [sorted(rows) for rows in bins]


def plan_microbatches(
    lengths: Sequence[int], num_ranks: int, capacity: int, groups: Sequence[Hashable] | None = None
) -> Plan:
    """Deal rows to data-parallel ranks and pack each rank's rows into microbatches.

    Args:
        lengths: tokens of each row.
        num_ranks: data-parallel ranks.
        capacity: most tokens in one microbatch.
        groups: one key for each row; rows with equal keys (say, the two sides of a preference pair) stay together in
            one microbatch.

    Returns:
        `plan[rank][microbatch]` = row indices, ascending. Every row is there exactly once. All ranks have the same
        number of microbatches, because each forward and backward is a collective: a rank with too little work has
        empty microbatches at its end. Tokens are balanced over ranks, and a rank's microbatches run from large to
        small, so that those which run at the same time are of like size. Without rows, there are no microbatches.

    Raises:
        ValueError: `num_ranks` is below 1, or `groups` has another length than `lengths`.
        DataError: a row, or the rows of one group together, exceed `capacity`.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: expected at least 1")
    lengths = _checked_lengths(lengths, capacity)
    units = _units(lengths, capacity, groups)
    weights = [_tokens(rows, lengths) for rows in units]

    # Ranks first: the best balance. Packs first: sometimes one microbatch fewer, as rows that fit badly meet others.
    ranks_first = [_pack(share, weights, capacity) for share in balanced_partitions(weights, num_ranks)]
    packs = _pack(range(len(units)), weights, capacity)
    loads = [_tokens(pack, weights) for pack in packs]
    packs_first = [[packs[i] for i in share] for share in karmarkar_karp(loads, num_ranks, equal_size=True)]

    def large_to_small(share: list[list[int]]) -> list[list[int]]:
        return sorted(share, key=lambda pack: _tokens(pack, weights), reverse=True)

    def cost(plan: Plan) -> tuple[int, int]:
        # Ranks wait for each other at every microbatch, so the fullest one sets the time of each.
        steps = zip_longest(*([_tokens(pack, weights) for pack in share] for share in plan), fillvalue=0)
        slowest = [max(step) for step in steps]
        return len(slowest), sum(slowest)

    best = min(([large_to_small(share) for share in plan] for plan in (ranks_first, packs_first)), key=cost)
    num_microbatches = max(len(share) for share in best)
    return [
        [sorted(row for unit in pack for row in units[unit]) for pack in share]
        + [[] for _ in range(num_microbatches - len(share))]
        for share in best
    ]


def _tokens(pack: Iterable[int], weights: list[int]) -> int:
    return sum(weights[unit] for unit in pack)


def _pack(share: Sequence[int], weights: list[int], capacity: int) -> list[list[int]]:
    return [[share[i] for i in pack] for pack in first_fit_decreasing([weights[unit] for unit in share], capacity)]


def _units(lengths: list[int], capacity: int, groups: Sequence[Hashable] | None) -> list[list[int]]:
    """What must stay together: single rows, or the rows of one group."""
    if groups is None:
        return [[row] for row in range(len(lengths))]
    if len(groups) != len(lengths):
        raise ValueError(f"groups has {len(groups)} entries for {len(lengths)} rows; expected one key for each row")
    members: dict[Hashable, list[int]] = {}
    for row, key in enumerate(groups):
        members.setdefault(key, []).append(row)
    for key, rows in members.items():
        total = _tokens(rows, lengths)
        if total > capacity:
            raise DataError(
                f"group {key!r} (rows {', '.join(map(str, rows))}) has {total} tokens and must stay in one "
                f"microbatch, which holds at most {capacity}; shorten its rows or raise the capacity"
            )
    return list(members.values())
