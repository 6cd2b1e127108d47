"""The slot KV cache, in the shape that Hugging Face models expect of `past_key_values`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from rlite.engine.embedded.scheduler import Move

BLOCK = 32
"""positions of a key block"""
BAGS_KEPT = 64
"""groups of slots whose rows are remembered, oldest forgotten first"""


class SlotCache:
    """Keys and values of every layer and slot, in one allocation each.

    Values are `[slots, kv_heads, max_len, head_dim]` per layer, and so are keys, unless they are blocked: then they are
    `[slots, kv_heads, max_len / BLOCK, head_dim, BLOCK]`, so that a query's product with a block of keys is a weighted
    sum of rows (see `DecodePlan`). That is how it is on CPU in float32.

    Before a forward, `rows` says where its keys and values go; `update` writes them there and hands back what it was
    given, because attention reads the cache itself. It begins as zeros, not as garbage: a masked position still takes
    part in the product with its weight of zero.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_heads: int,
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # torch has the weighted sum of rows as a fast kernel where it has fbgemm
        self.is_blocked = (
            device.type == "cpu" and dtype == torch.float32 and "fbgemm" in torch.backends.quantized.supported_engines
        )
        max_len = -(-max_len // BLOCK) * BLOCK
        shape = (num_layers, num_slots, num_kv_heads, max_len, head_dim)
        blocked = (num_layers, num_slots, num_kv_heads, max_len // BLOCK, head_dim, BLOCK)
        self.keys = _zeros(blocked if self.is_blocked else shape, dtype, device)
        self.values = _zeros(shape, dtype, device)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.max_len, self.head_dim = max_len, head_dim
        self._flat_keys = [k.view(-1, head_dim, BLOCK) if self.is_blocked else k.view(-1, head_dim) for k in self.keys]
        self._flat_values = [v.view(-1, head_dim) for v in self.values]
        self._bags: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._targets: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def rows_of(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the flat cache for tokens at (slot, position), `[tokens * kv_heads]`, token-major."""
        heads = torch.arange(self.num_kv_heads, device=slots.device)
        return ((slots[:, None] * self.num_kv_heads + heads) * self.max_len + positions[:, None]).flatten()

    def write_to(self, rows: torch.Tensor) -> None:
        """Where the next forward's keys and values go, as `rows_of` says."""
        self._targets = rows, rows // BLOCK, rows % BLOCK

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Write `[batch, kv_heads, tokens, head_dim]` to `rows`; called by the model's attention layers."""
        if self._targets is None:
            raise RuntimeError("write_to has not said where keys and values go")
        rows, blocks, offsets = self._targets
        flat_key = key.transpose(1, 2).reshape(-1, self.head_dim)
        if self.is_blocked:
            self._flat_keys[layer_idx][blocks, :, offsets] = flat_key
        else:
            self._flat_keys[layer_idx].index_copy_(0, rows, flat_key)
        self._flat_values[layer_idx].index_copy_(0, rows, value.transpose(1, 2).reshape(-1, self.head_dim))
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given, so nobody needs a length; models ask all the same."""
        return 0

    def sequence(self, layer: int, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first positions of one slot, keys and values `[1, kv_heads, length, head_dim]`."""
        keys = self.keys[layer, slot]
        if self.is_blocked:
            keys = keys[:, : -(-length // BLOCK)].transpose(2, 3).flatten(1, 2)
        return keys[None, :, :length], self.values[layer, slot, None, :, :length]

    def bags(self, start: int, stop: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `embedding_bag` needs to decode slots [start, stop) over their first `blocks` blocks.

        Rows of the keys and where each bag of them begins, one bag per slot, query head and block; and the same for the
        values, one bag per slot and query head.
        """
        if (found := self._bags.get((start, stop, blocks))) is not None:
            return found
        if len(self._bags) >= BAGS_KEPT:
            self._bags.pop(next(iter(self._bags)))
        device, dim = self.values.device, self.head_dim
        num, heads = stop - start, self.num_heads
        kv_heads = torch.arange(heads, device=device) // (heads // self.num_kv_heads)
        first = (torch.arange(start, stop, device=device)[:, None] * self.num_kv_heads + kv_heads)[..., None]
        value_rows = first * self.max_len + torch.arange(blocks * BLOCK, device=device)
        block = first * (self.max_len // BLOCK) + torch.arange(blocks, device=device)
        key_rows = block[..., None] * dim + torch.arange(dim, device=device)
        found = (
            key_rows.flatten(),
            torch.arange(0, num * heads * blocks * dim, dim, device=device),
            value_rows.flatten(),
            torch.arange(0, num * heads * blocks * BLOCK, blocks * BLOCK, device=device),
        )
        self._bags[start, stop, blocks] = found
        return found

    def apply(self, moves: list[Move]) -> None:
        """Copy slots. No source is another move's target."""
        targets: dict[tuple[int, int], list[int]] = {}
        for move in moves:
            targets.setdefault((move.source, move.length), []).append(move.target)
        for (source, length), slots in targets.items():
            blocks = -(-length // BLOCK) if self.is_blocked else length
            for storage, stop in ((self.keys, blocks), (self.values, length)):
                for slot in slots:
                    storage[:, slot, :, :stop] = storage[:, source, :, :stop]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that on CPU take memory only where something is written: torch's own write all of it, numpy's do not."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    line = 64  # bytes of the cache line at which torch aligns
    memory = np.zeros(math.prod(shape) * dtype.itemsize + line, dtype=np.uint8)
    start = -memory.ctypes.data % line
    return torch.from_numpy(memory[start : start + memory.size - line]).view(dtype).view(shape)
