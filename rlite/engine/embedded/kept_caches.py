"""Keys and values of ended sequences, in the slots behind the running ones, from which later requests continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

MIN_SHARED = 32
"""least number of shared leading tokens"""
MIN_SHARE = 0.25
"""least share of the tokens; tokens that are prefilled behind others need a slower kernel than whole prompts"""


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the first `length` positions of slot `source` to slot `target`."""

    source: int
    target: int
    length: int


class _Kept(NamedTuple):
    tokens: np.ndarray
    """the leading tokens whose keys and values are in the slot"""
    used: int
    """time of the last use; the cache with the lowest is evicted first"""


class KeptCaches:
    """Contents of the slots that no running sequence has.

    Args:
        num_slots: number of slots; 0 keeps nothing.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: dict[int, _Kept] = {}
        self._clock = count()

    def clear(self) -> None:
        """Forget all contents."""
        self._slots.clear()

    def keep(self, tokens: Sequence[int], slot: int, first_free: int) -> list[Move]:
        """Keep the cache of a sequence that has ended.

        Args:
            tokens: the leading tokens whose keys and values the slot holds.
            slot: the sequence's slot.
            first_free: this slot and all behind it belong to no running sequence. If `slot` is before it, the cache is
                copied to one of them, and the least recently used one is evicted if none is empty.

        Returns:
            The copies.
        """
        if len(tokens) < MIN_SHARED or slot >= self._num_slots:
            return []
        target = slot if slot >= first_free else self._vacate(first_free)
        if target is None:
            return []
        self._slots[target] = _Kept(np.asarray(tokens, dtype=np.int64), next(self._clock))
        return [] if target == slot else [Move(slot, target, len(tokens))]

    def take(self, tokens: Sequence[int], slot: int) -> tuple[int, list[Move]]:
        """Fill a new sequence's slot from the cache that shares most of its leading tokens.

        A cache of which all tokens are shared moves to the slot, because its session goes on there. Otherwise it is
        copied.

        Args:
            tokens: the tokens whose keys and values are wanted.
            slot: the new sequence's slot. All slots behind it belong to no running sequence.

        Returns:
            The number of leading tokens whose keys and values the slot holds after the copies; and the copies.
        """
        if not self._slots:
            return 0, []
        source, num_shared = self._best(np.asarray(tokens, dtype=np.int64))
        here = self._slots.pop(slot, None)
        if source == slot:
            return num_shared, []
        moves: list[Move] = []
        if here is not None and (target := self._vacate(slot + 1, source, here.used)) is not None:
            self._slots[target] = here
            moves.append(Move(slot, target, len(here.tokens)))
        if source is not None:
            found = self._slots.pop(source)
            if num_shared < len(found.tokens):
                self._slots[source] = found._replace(used=next(self._clock))
            moves.append(Move(source, slot, num_shared))
        return num_shared, moves

    def _best(self, tokens: np.ndarray) -> tuple[int | None, int]:
        """Return the slot with the longest shared prefix that is worth copying, and its length; None and 0 if none."""
        least, best = max(MIN_SHARED, int(MIN_SHARE * len(tokens))), None
        for slot, kept in self._slots.items():
            length = min(len(tokens), len(kept.tokens))
            if length >= least and kept.tokens[0] == tokens[0]:
                differs = kept.tokens[:length] != tokens[:length]
                num_shared = int(differs.argmax()) if differs.any() else length
                if num_shared >= least:
                    least, best = num_shared + 1, slot
        return best, 0 if best is None else least - 1

    def _vacate(self, first: int, spared: int | None = None, younger_than: int | None = None) -> int | None:
        """Return an empty slot, or else evict the least recently used cache.

        Args:
            first: first slot to consider.
            spared: a slot that is not evicted.
            younger_than: time of use; a cache that was used later is not evicted.
        """
        for slot in range(first, self._num_slots):
            if slot not in self._slots:
                return slot
        others = [slot for slot in self._slots if slot >= first and slot != spared]
        oldest = min(others, key=lambda slot: self._slots[slot].used, default=None)
        if oldest is None or (younger_than is not None and self._slots[oldest].used > younger_than):
            return None
        del self._slots[oldest]
        return oldest
