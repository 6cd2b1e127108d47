"""Partition of weighted rows into parts of nearly equal weight.

Pure Python: the control plane uses it, and imports neither torch nor numpy.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlite.errors import DataError


@dataclass(slots=True)
class _Part:
    weight: float
    rows: list[int] = field(default_factory=list)

    def join(self, other: _Part) -> _Part:
        # The shorter list moves, so that n rows are moved O(n log n) times in all.
        long, short = (self, other) if len(self.rows) >= len(other.rows) else (other, self)
        long.rows.extend(short.rows)
        long.weight += short.weight
        return long


def _heaviest_first(part: _Part) -> float:
    return -part.weight


def _merge(a: list[_Part], b: list[_Part], num_parts: int) -> list[_Part]:
    """Return two joined partial solutions: the heaviest part of one with the lightest of the other.

    Empty parts are implicit.
    """
    if len(a) < len(b):
        a, b = b, a
    if len(b) == 1:  # by far the most frequent: one row enters a solution; nothing else moves
        part = b[0].join(a.pop()) if len(a) == num_parts else b[0]
        insort(a, part, key=_heaviest_first)
        return a
    alone_a, alone_b = num_parts - len(b), num_parts - len(a)  # so many heaviest parts of each meet an empty one
    joined = [a[i].join(b[num_parts - 1 - i]) for i in range(alone_a, len(a))]
    return sorted([*a[:alone_a], *joined, *b[:alone_b]], key=_heaviest_first)


def karmarkar_karp(weights: Sequence[float], num_parts: int, equal_size: bool = False) -> list[list[int]]:
    """Partition rows into `num_parts` parts of nearly equal weight by the largest differencing method.

    Karmarkar and Karp, "The differencing method of set partitioning" (1982), in Korf's form for several parts: the two
    partial solutions whose parts differ most are joined, heavy parts with light ones, until one solution is left.

    `weights`: one finite weight of at least 0 per row. Returns `num_parts` lists of ascending row indices; every row is
    in exactly one. Parts are ordered by their first row. Parts are empty only if there are fewer rows than parts; empty
    parts come last.
    """
    weights = [weight.item() if hasattr(weight, "item") else weight for weight in weights]  # an int8 would overflow
    for row, weight in enumerate(weights):
        if not (0 <= weight < math.inf):
            raise DataError(f"row {row} has weight {weight!r}; expected a finite number of at least 0")
    parts = [_Part(weights[row], [row]) for row in sorted(range(len(weights)), key=weights.__getitem__, reverse=True)]
    if equal_size:
        # Every state gives one row to each part, so joining states keeps sizes equal. What is missing to fill the last
        # one up are parts without a row: they stay apart from each other, hence sizes differ by one at most.
        parts += [_Part(0) for _ in range(-len(parts) % num_parts)]
        states = [parts[i : i + num_parts] for i in range(0, len(parts), num_parts)]
    else:
        states = [[part] for part in parts]

    def entry(state: list[_Part], order: int) -> tuple[float, float, int, list[_Part]]:
        # Ties go to the heavier, then to the older state, so that the outcome depends on nothing but the input.
        spread = state[0].weight - (state[-1].weight if len(state) == num_parts else 0)
        return -spread, -state[0].weight, order, state

    heap = [entry(state, order) for order, state in enumerate(states)]
    heapq.heapify(heap)
    for order in range(len(states), 2 * len(states) - 1):
        widest, second = heapq.heappop(heap)[-1], heap[0][-1]
        heapq.heapreplace(heap, entry(_merge(widest, second, num_parts), order))
    found = [sorted(part.rows) for part in heap[0][-1] if part.rows] if heap else []
    return sorted(found) + [[] for _ in range(num_parts - len(found))]


def balanced_partitions(weights: Sequence[float], num_parts: int) -> list[list[int]]:
    """Return the rows of each of `num_parts` ranks, balanced by weight; the numbers of rows may differ.

    The same input gives the same result on every machine. See `karmarkar_karp` for the form of the result and errors.
    """
    return karmarkar_karp(weights, num_parts)
