"""Attention over the slot cache, registered with transformers under `ATTENTION`.

A model whose `config._attn_implementation` is that name calls `slot_attention` in each layer; the worker passes a plan
through the model's keyword arguments, and the plan does the work. No mask function is registered under the name, so
transformers makes no masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from rlite.engine.embedded.cache import SlotCache
from rlite.engine.embedded.scheduler import Chunk

ATTENTION = "rlite_slots"


class AttentionPlan(Protocol):
    """What one forward attends to. Queries are `[batch, heads, tokens, head_dim]`; the result is `[batch, tokens, ...]`."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor: ...


def slot_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    plan: AttentionPlan,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    return plan.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, slot_attention)


class PrefillPlan:
    """Chunks of many prompts packed in one row; each attends to its own slot alone."""

    def __init__(self, cache: SlotCache, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.cache = cache
        self.chunks = chunks
        lengths = [c.stop - c.start for c in chunks]
        # the device is stated even for the host's tensors: the caller may be inside a `torch.device("meta")` mode
        slots = torch.tensor([c.slot for c in chunks for _ in c.tokens], device=device)
        positions = torch.tensor([p for c in chunks for p in range(c.start, c.stop)], device=device)
        self.input_ids = torch.tensor([[t for c in chunks for t in c.tokens]], device=device)
        self.position_ids = positions[None]
        self.rows = cache.rows_of(slots, positions)
        self.is_varlen = (
            device.type == "cuda"
            and cache.storage.dtype in (torch.float16, torch.bfloat16)
            and all(c.start == 0 for c in chunks)
        )
        if self.is_varlen:
            self.longest = max(lengths)
            ends = list(accumulate(lengths, initial=0))
            self.cumulative = torch.tensor(ends, dtype=torch.int32, device=device)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if self.is_varlen:
            q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
            out = varlen_attn(
                q,
                k,
                v,
                self.cumulative,
                self.cumulative,
                self.longest,
                self.longest,
                scale=scale,
                window_size=(-1, 0),
                enable_gqa=True,
            )
            return out[None]
        outputs = []
        begin = 0
        for chunk in self.chunks:
            num = chunk.stop - chunk.start
            q = query[:, :, begin : begin + num]
            if chunk.start == 0:
                k, v, mask = key[:, :, begin : begin + num], value[:, :, begin : begin + num], None
            else:
                k = self.cache.keys[layer][chunk.slot, None, :, : chunk.stop]
                v = self.cache.values[layer][chunk.slot, None, :, : chunk.stop]
                mask = torch.ones(num, chunk.stop, dtype=torch.bool, device=q.device).tril(chunk.start)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
            outputs.append(out.transpose(1, 2))
            begin += num
        return torch.cat(outputs, dim=1)


class DecodePlan:
    """One token for each of the first `lengths` slots, which attend over views of the cache.

    The query heads that share a key head are folded into the query length, so keys and values are never repeated.
    Rows are taken in groups of neighbours, each at the length of its longest: padding is not read, and a group's
    keys and values stay in the processor's cache between the two products.
    """

    GROUP = 16

    def __init__(self, cache: SlotCache, lengths: Sequence[int], num_steps: int, device: torch.device) -> None:
        self.cache = cache
        num = len(lengths)
        longest = max(lengths) + num_steps
        slots = torch.arange(num, device=device)
        self.positions = torch.tensor(lengths, device=device) - 1
        self.rows = cache.rows_of(slots, self.positions)
        self._slots = slots
        self.groups = row_groups(lengths, self.GROUP)
        heads = cache.num_kv_heads
        visible = torch.arange(longest, device=device) <= self.positions[:, None]
        self.is_product = device.type == "cpu" and cache.storage.dtype in (torch.float32, torch.float64)
        bias = torch.zeros(num, longest, dtype=cache.storage.dtype, device=device)
        bias.masked_fill_(~visible, float("-inf"))
        self.bias = bias[:, None, None].repeat(1, heads if self.is_product else 1, 1, 1)
        self._set_views()

    def step(self) -> None:
        """Go on to the next position."""
        self.positions = self.positions + 1
        self.rows += 1
        self.bias[self._slots, :, :, self.positions] = 0
        self.groups = [(start, stop, length + 1) for start, stop, length in self.groups]
        self._set_views()

    def _set_views(self) -> None:
        heads = self.cache.num_kv_heads
        self._bias = [
            self.bias[start:stop, ..., :length].flatten(0, 1)
            if self.is_product
            else self.bias[start:stop, ..., :length]
            for start, stop, length in self.groups
        ]
        self._heads = [slice(start * heads, stop * heads) for start, stop, _ in self.groups]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        batch, heads, _, dim = query.shape
        kv_heads = self.cache.num_kv_heads
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if not self.is_product:
            folded = query.reshape(batch, kv_heads, heads // kv_heads, dim)
            parts = [
                F.scaled_dot_product_attention(
                    folded[start:stop],
                    keys[start:stop, :, :length],
                    values[start:stop, :, :length],
                    attn_mask=bias,
                    scale=scale,
                )
                for (start, stop, length), bias in zip(self.groups, self._bias, strict=True)
            ]
            return torch.cat(parts).view(batch, 1, heads * dim)
        folded = query.reshape(batch * kv_heads, heads // kv_heads, dim)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        out = torch.empty_like(folded)
        for rows, (_, _, length), bias in zip(self._heads, self.groups, self._bias, strict=True):
            scores = torch.baddbmm(bias, folded[rows], keys[rows, :length].transpose(1, 2), alpha=scale)
            torch.bmm(torch.softmax(scores, -1), values[rows, :length], out=out[rows])
        return out.view(batch, 1, heads * dim)


def row_groups(lengths: Sequence[int], size: int) -> list[tuple[int, int, int]]:
    """Cut rows into runs (start, stop, longest): `size` rows each, neighbours joined where that adds little padding."""
    groups: list[tuple[int, int, int]] = []
    for start in range(0, len(lengths), size):
        stop = min(start + size, len(lengths))
        longest = max(lengths[start:stop])
        if groups:
            begin, end, length = groups[-1]
            joined = max(length, longest)
            added = joined * (stop - begin) - length * (end - begin) - longest * (stop - start)
            if added * 16 <= joined * (stop - begin):
                groups[-1] = (begin, stop, joined)
                continue
        groups.append((start, stop, longest))
    return groups
