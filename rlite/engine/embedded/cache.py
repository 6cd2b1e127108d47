"""The slot KV cache, in the shape that Hugging Face models expect of `past_key_values`."""

from __future__ import annotations

from typing import Any

import torch

from rlite.engine.embedded.scheduler import Move


class SlotCache:
    """Keys and values `[slots, kv_heads, max_len, head_dim]` per layer, all in one allocation.

    Before a forward, `positions_to_write` says where its keys and values go; `update` writes them there and hands back
    what it was given, because attention reads the cache itself. It begins as zeros, not as garbage: a masked position
    still takes part in the product with its weight of zero.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_slots, num_kv_heads, max_len, head_dim)
        self.storage = torch.zeros(shape, dtype=dtype, device=device)
        self.keys = [self.storage[layer, 0] for layer in range(num_layers)]
        self.values = [self.storage[layer, 1] for layer in range(num_layers)]
        self._flat = [(k.view(-1, head_dim), v.view(-1, head_dim)) for k, v in zip(self.keys, self.values, strict=True)]
        self.num_kv_heads, self.max_len, self.head_dim = num_kv_heads, max_len, head_dim
        self.rows: torch.Tensor | None = None

    def rows_of(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the flat cache for tokens at (slot, position), `[tokens * kv_heads]`, token-major."""
        heads = torch.arange(self.num_kv_heads, device=slots.device)
        return ((slots[:, None] * self.num_kv_heads + heads) * self.max_len + positions[:, None]).flatten()

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Write `[batch, kv_heads, tokens, head_dim]` to `rows`; called by the model's attention layers."""
        keys, values = self._flat[layer_idx]
        keys.index_copy_(0, self.rows, key.transpose(1, 2).reshape(-1, self.head_dim))
        values.index_copy_(0, self.rows, value.transpose(1, 2).reshape(-1, self.head_dim))
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given, so nobody needs a length; models ask all the same."""
        return 0

    def apply(self, moves: list[Move]) -> None:
        """Copy slots. No source is another move's target."""
        targets: dict[tuple[int, int], list[int]] = {}
        for move in moves:
            targets.setdefault((move.source, move.length), []).append(move.target)
        for (source, length), slots in targets.items():
            if len(slots) == 1:
                self.storage[:, :, slots[0], :, :length] = self.storage[:, :, source, :, :length]
            else:
                self.storage[:, :, slots, :, :length] = self.storage[:, :, source : source + 1, :, :length]
