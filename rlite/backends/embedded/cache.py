"""The slot KV cache: its memory layout, and the rows at which a token's keys and values are stored.

Keys and values of ended sequences, in the slots behind the running ones, from which later requests continue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlite.backends.models.batch_invariant import BLOCK

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


GATHER_INDEX_BYTES = 64 << 20
"""bytes for cached row indices of slot groups; beyond it they are forgotten"""


@dataclass(frozen=True, slots=True)
class Targets:
    """Row indices at which keys and values of some tokens are stored: `[tokens * kv_heads]` each, token-major."""

    rows: Tensor
    """rows of the flat values, and of the flat keys unless keys are blocked"""
    blocks: Tensor
    """rows of the flat blocked keys"""
    offsets: Tensor
    """positions within a block"""


@dataclass(frozen=True, slots=True)
class GatherIndex:
    """Arguments of `embedding_bag` to decode some slots over their first `num_blocks` blocks."""

    num_blocks: int
    key_rows: Tensor
    key_starts: Tensor
    """start of each bag; one bag per slot, query head and block"""
    value_rows: Tensor
    value_starts: Tensor
    """start of each bag; one bag per slot and query head"""

    @property
    def nbytes(self) -> int:
        """Size of the index tensors in bytes."""
        return self.key_rows.nbytes + self.key_starts.nbytes + self.value_rows.nbytes + self.value_starts.nbytes


class CacheShape(NamedTuple):
    """Sizes of a cache."""

    num_layers: int
    num_slots: int
    num_heads: int
    """number of query heads"""
    num_kv_heads: int
    max_len: int
    """positions of a slot; the cache rounds them up to whole blocks"""
    head_dim: int


class SlotCache:
    """Keys and values of every layer and slot, in one allocation each.

    Values are `[slots, kv_heads, max_len, head_dim]` per layer. Keys have the same shape, unless they are blocked: on
    CPU in float32 they are `[slots, kv_heads, max_len / BLOCK, head_dim, BLOCK]` if torch has fbgemm. A query's product
    with a block of keys is then a weighted sum of rows (see `DecodePlan`).

    The cache begins as zeros: a masked position still takes part in the product, with weight zero.

    Args:
        shape: sizes of the cache.
        dtype: dtype of keys and values.
        device: device of the memory.
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        # torch has the weighted sum of rows as a fast kernel where it has fbgemm
        self.is_blocked = (
            device.type == "cpu" and dtype == torch.float32 and "fbgemm" in torch.backends.quantized.supported_engines
        )
        self.num_heads, self.num_kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.max_len = -(-shape.max_len // BLOCK) * BLOCK
        slots = (shape.num_layers, shape.num_slots, shape.num_kv_heads)
        plain = (*slots, self.max_len, self.head_dim)
        blocked = (*slots, self.max_len // BLOCK, self.head_dim, BLOCK)
        self.keys = _zeros(blocked if self.is_blocked else plain, dtype, device)
        self.values = _zeros(plain, dtype, device)
        row: tuple[int, ...] = (self.head_dim, BLOCK) if self.is_blocked else (self.head_dim,)
        self._flat_keys = [keys.view(-1, *row) for keys in self.keys]
        self.value_rows = [values.view(-1, self.head_dim) for values in self.values]
        """the rows that `GatherIndex.value_rows` indexes, per layer"""
        self.key_rows = [keys.view(-1, BLOCK) for keys in self.keys] if self.is_blocked else []
        """the rows that `GatherIndex.key_rows` indexes, per layer"""
        self._gather_indices: dict[tuple[int, int, int], GatherIndex] = {}

    @property
    def nbytes(self) -> int:
        """Size of keys and values in bytes."""
        return self.keys.nbytes + self.values.nbytes

    def targets(self, slots: Tensor, positions: Tensor) -> Targets:
        """Return the row indices of tokens at (slot, position). Both arguments are `[tokens]`."""
        heads = torch.arange(self.num_kv_heads, device=slots.device)
        rows = ((slots[:, None] * self.num_kv_heads + heads) * self.max_len + positions[:, None]).flatten()
        return Targets(rows, rows // BLOCK, rows % BLOCK)

    def write(self, layer: int, targets: Targets, key: Tensor, value: Tensor) -> None:
        """Write keys and values into one layer.

        Args:
            layer: index of the layer.
            targets: row indices of the tokens.
            key: `[tokens, kv_heads, head_dim]`.
            value: `[tokens, kv_heads, head_dim]`.
        """
        key, value = key.reshape(-1, self.head_dim), value.reshape(-1, self.head_dim)
        if self.is_blocked:
            self._flat_keys[layer][targets.blocks, :, targets.offsets] = key
        else:
            self._flat_keys[layer].index_copy_(0, targets.rows, key)
        self.value_rows[layer].index_copy_(0, targets.rows, value)

    def sequence(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first positions of one slot, `[1, kv_heads, length, head_dim]` each.

        Args:
            layer: index of the layer.
            slot: index of the slot.
            length: number of positions.
        """
        keys = self.keys[layer, slot]
        if self.is_blocked:
            keys = keys[:, : -(-length // BLOCK)].transpose(2, 3).flatten(1, 2)
        return keys[None, :, :length], self.values[layer, slot, None, :, :length]

    def at(self, layer: int, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of tokens, `[tokens, kv_heads, head_dim]` each.

        Args:
            layer: index of the layer.
            slots: `[tokens]`, slots of the tokens.
            positions: `[tokens]`, positions of the tokens.
        """
        if self.is_blocked:
            keys = self.keys[layer][slots, :, positions // BLOCK, :, positions % BLOCK]
        else:
            keys = self.keys[layer][slots, :, positions]
        return keys, self.values[layer][slots, :, positions]

    def gather_index(self, start: int, stop: int, blocks: int) -> GatherIndex:
        """Return the row indices of slots [start, stop) over their first `blocks` blocks; recent results are cached.

        Args:
            start: first slot.
            stop: end of the slots, exclusive.
            blocks: number of blocks per slot.
        """
        if (found := self._gather_indices.get((start, stop, blocks))) is not None:
            return found
        device, dim = self.values.device, self.head_dim
        num, heads = stop - start, self.num_heads
        # half of the memory to read wherever it is enough
        dtype = torch.int32 if self.values[0].numel() < 2**31 else torch.int64
        kv_heads = torch.arange(heads, device=device) // (heads // self.num_kv_heads)
        first = (torch.arange(start, stop, device=device)[:, None] * self.num_kv_heads + kv_heads)[..., None]
        value_rows = first * self.max_len + torch.arange(blocks * BLOCK, device=device)
        block = first * (self.max_len // BLOCK) + torch.arange(blocks, device=device)
        key_rows = block[..., None] * dim + torch.arange(dim, device=device)
        found = GatherIndex(
            blocks,
            key_rows.flatten().to(dtype),
            torch.arange(0, num * heads * blocks * dim, dim, dtype=dtype, device=device),
            value_rows.flatten().to(dtype),
            torch.arange(0, num * heads * blocks * BLOCK, blocks * BLOCK, dtype=dtype, device=device),
        )
        if sum(index.nbytes for index in self._gather_indices.values()) + found.nbytes > GATHER_INDEX_BYTES:
            self._gather_indices.clear()
        self._gather_indices[start, stop, blocks] = found
        return found

    def clear(self, slot: int) -> None:
        """Write zeros into a slot that may hold non-finite values, before another sequence uses it."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0

    def apply(self, moves: list[Move]) -> None:
        """Copy slots, one move after the other."""
        for move in moves:
            blocks = -(-move.length // BLOCK) if self.is_blocked else move.length
            for storage, stop in ((self.keys, blocks), (self.values, move.length)):
                storage[:, move.target, :, :stop] = storage[:, move.source, :, :stop]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On CPU, numpy reserves memory only for written pages, while torch would write all of them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    line = 64  # bytes of the cache line at which torch aligns
    memory = np.zeros(math.prod(shape) * dtype.itemsize + line, dtype=np.uint8)
    start = -memory.ctypes.data % line
    return torch.from_numpy(memory[start : start + memory.size - line]).view(dtype).view(shape)
