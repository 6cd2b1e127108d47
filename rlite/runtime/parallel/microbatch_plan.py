"""Packing of token rows into microbatches of bounded size, equally many on every data-parallel rank.

The plan consists of row indices only. It is pure, the same on every rank that computes it, and made before any tensor
is touched.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import zip_longest

import numpy as np

from rlite.errors import DataError
from rlite.runtime.parallel.balancing import balanced_partitions, karmarkar_karp
from rlite.runtime.parallel.prefix_tree import Prefixes
from rlite.types import PackingMethod

Plan = list[list[list[int]]]
"""[rank][microbatch][row indices]"""


def _check_lengths(lengths: Sequence[int], capacity: int) -> None:
    for row, length in enumerate(lengths):
        if length > capacity:
            raise DataError(
                f"row {row} has {length} tokens, and a microbatch holds at most {capacity}; "
                "truncate or drop the row, or raise the capacity (max_tokens_per_microbatch, max_length_per_device)"
            )


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack rows into few bins of at most `capacity` tokens: longest row first, each into the first bin with room.

    First-fit decreasing needs at most 11/9 of the fewest possible bins plus 6/9 (Dosa 2007), and far less on the
    length distributions of text.

    `capacity`: most tokens in one bin. Returns bins of row indices, ascending in each, every row in exactly one bin; no
    bin is empty.
    """
    _check_lengths(lengths, capacity)
    room = np.full(len(lengths), capacity, dtype=np.int64)  # of every bin that could be opened
    bins: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        index = int(np.argmax(room[: len(bins) + 1] >= lengths[row]))
        if index == len(bins):
            bins.append([])
        bins[index].append(row)
        room[index] -= lengths[row]
    return [sorted(rows) for rows in bins]


def sequence_flops(length: int, hidden_size: int, num_layers: int) -> float:
    """Estimate the floating-point operations of a transformer's forward pass over one sequence.

    num_layers (24 l h^2 + 2 l^2 h), after Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters" (2021), where a causal mask saves half of attention. The estimate is for comparisons: the backward pass
    costs twice as much for every length, and costs that are equal for all tokens, such as the vocabulary, are left out.
    """
    return num_layers * (24.0 * length * hidden_size**2 + 2.0 * length**2 * hidden_size)


def plan_microbatches(
    lengths: Sequence[int],
    num_ranks: int,
    capacity: int,
    groups: Sequence[Hashable] | None = None,
    *,
    costs: Sequence[float] | None = None,
    method: PackingMethod = "first_fit_decreasing",
) -> Plan:
    """Assign rows to data-parallel ranks and pack each rank's rows into microbatches.

    `capacity`: most tokens in one microbatch. `groups`: one key per row; rows with equal keys (such as the two sides of
    a preference pair) stay together in one microbatch. `costs`: time that each row takes, in any unit (such as
    `sequence_flops`); default: its length. Ranks are balanced by cost; capacity stays in tokens. `method`:
    "first_fit_decreasing" fills one microbatch after the other. "karmarkar_karp" makes a rank's microbatches alike (in
    cost, or at least in length), in the same number, if the capacity leaves room.

    Returns `plan[rank][microbatch]`, ascending row indices. Every row occurs exactly once. All ranks have the same
    number of microbatches, because each forward and backward is a collective; a rank with too little work has empty
    microbatches at its end. A rank's microbatches run from large to small, so that simultaneous microbatches have
    similar costs. Without rows, there are no microbatches.
    """
    return plan_sharing(lengths, num_ranks, capacity, groups, None, costs=costs, method=method)[0]


def plan_sharing(
    lengths: Sequence[int],
    num_ranks: int,
    capacity: int,
    groups: Sequence[Hashable] | None,
    prefixes: Prefixes | None,
    *,
    costs: Sequence[float] | None = None,
    method: PackingMethod = "first_fit_decreasing",
) -> tuple[Plan, bool]:
    """Return the plan of `plan_microbatches`, and whether rows of a microbatch share the tokens that they begin with.

    With sharing, capacity counts each shared token once. Rows that share tokens stay together, in as many parts as make
    the ranks' work the least.

    `capacity`: most tokens in one microbatch. `prefixes`: tokens that rows have in common; None shares none.
    """
    _check_lengths(lengths, capacity)
    own_costs = lengths if costs is None else [float(cost) for cost in costs]
    parts = [1 << power for power in range((num_ranks - 1).bit_length() + 1)]
    divisions: list[tuple[list[list[int]], Prefixes | None]]
    if groups is not None:
        divisions = [(_units(lengths, capacity, groups, prefixes), prefixes)]
    else:
        divisions = [([[row] for row in range(len(lengths))], None)]
        if prefixes is not None:
            divisions += [(prefixes.units(capacity, part), prefixes) for part in parts]
    plans = []
    for units, sharing in divisions:
        totals = [sum(lengths[row] for row in rows) for rows in units]
        tokens = totals if sharing is None else [sharing.num_unique(rows) for rows in units]
        whole = [sum(own_costs[row] for row in rows) for rows in units]
        weights = [cost * own / max(total, 1) for cost, own, total in zip(whole, tokens, totals, strict=True)]
        plans.append((*_plan_units(units, tokens, weights, num_ranks, capacity, method), sharing is not None))
    best, _, has_sharing = min(plans, key=lambda plan: plan[1])
    return best, has_sharing


def _plan_units(
    units: list[list[int]],
    tokens: Sequence[int],
    weights: Sequence[float],
    num_ranks: int,
    capacity: int,
    method: PackingMethod,
) -> tuple[Plan, float]:
    """Return the plan of units of rows, and its duration.

    `capacity`: most tokens in one microbatch.
    """

    def weight(pack: Iterable[int]) -> float:
        return sum(weights[unit] for unit in pack)

    def filled(share: Sequence[int]) -> list[list[int]]:
        return [[share[i] for i in pack] for pack in first_fit_decreasing([tokens[unit] for unit in share], capacity)]

    # Ranks first: the best balance. Packs first: sometimes one microbatch fewer, as rows that fit badly meet others.
    shares = balanced_partitions(weights, num_ranks)
    ranks_first = [filled(share) for share in shares]
    packs = filled(range(len(units)))
    dealt = karmarkar_karp([weight(pack) for pack in packs], num_ranks, equal_size=True)
    packs_first = [[packs[i] for i in share] for share in dealt]

    def large_to_small(plan: Plan) -> Plan:
        return [sorted(share, key=weight, reverse=True) for share in plan]

    def duration(plan: Plan) -> tuple[int, float]:
        # Ranks wait for each other at every microbatch, so the most costly one sets the time of each.
        slowest = [max(step) for step in zip_longest(*(map(weight, share) for share in plan), fillvalue=0)]
        return len(slowest), sum(slowest)

    best = min(map(large_to_small, (ranks_first, packs_first)), key=duration)
    num_microbatches = max(len(share) for share in best)
    if method == "karmarkar_karp" and num_microbatches:
        best = large_to_small(_even(shares, weights, tokens, num_microbatches, capacity) or best)
    plan = [
        [sorted(row for unit in pack for row in units[unit]) for pack in share]
        + [[] for _ in range(num_microbatches - len(share))]
        for share in best
    ]
    return plan, duration(best)[1]


def _even(
    shares: list[list[int]], weights: Sequence[float], tokens: Sequence[int], num_packs: int, capacity: int
) -> Plan | None:
    """Return each rank's share in `num_packs` packs of even cost, else of even length; None if a pack is too long."""
    for loads in (weights, tokens):
        plan = []
        for share in shares:
            parts = karmarkar_karp([loads[unit] for unit in share], num_packs)
            plan.append([[share[i] for i in part] for part in parts if part])
        if all(sum(tokens[unit] for unit in pack) <= capacity for share in plan for pack in share):
            return plan
    return None


def _units(
    lengths: Sequence[int], capacity: int, groups: Sequence[Hashable], prefixes: Prefixes | None
) -> list[list[int]]:
    """Return the rows of each group, which must stay together."""
    members: dict[Hashable, list[int]] = {}
    for row, key in enumerate(groups):
        members.setdefault(key, []).append(row)
    for key, rows in members.items():
        total = sum(lengths[row] for row in rows) if prefixes is None else prefixes.num_unique(rows)
        if total > capacity:
            raise DataError(
                f"group {key!r} (rows {', '.join(map(str, rows))}) has {total} tokens and must stay in one "
                f"microbatch, which holds at most {capacity}; shorten its rows or raise the capacity"
            )
    return list(members.values())
