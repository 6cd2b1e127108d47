"""Attention over the slot cache, registered with transformers under `ATTENTION`.

A model whose `config._attn_implementation` is this name calls `slot_attention` in each layer. The worker passes a plan
through the model's keyword arguments, and the plan computes the attention. No mask function is registered under the
name, so transformers builds no masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from rlite.engine.embedded.cache import BLOCK, Bags, SlotCache
from rlite.engine.embedded.scheduler import Chunk
from rlite.nn.attention import Bounds, causal_mask, refuse_other_attention, varlen

ATTENTION = "rlite_slots"
TILE_ROWS = BLOCK
"""number of tokens of a `TilePlan`"""


class AttentionPlan(Protocol):
    """The attention of one forward pass: the positions that queries see, and the cache rows that keys and values fill.

    All tensors are `[tokens, (kv_)heads, head_dim]`.
    """

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values to the cache, for later tokens to read.

        Args:
            layer: index of the layer.
            key: `[tokens, kv_heads, head_dim]`.
            value: `[tokens, kv_heads, head_dim]`.
        """
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Write keys and values to the cache and return the attention output, in the shape of the queries.

        Args:
            layer: index of the layer.
            query: `[tokens, heads, head_dim]`.
            key: `[tokens, kv_heads, head_dim]`.
            value: `[tokens, kv_heads, head_dim]`.
            scale: factor of the scores before the softmax.
            window: number of positions that each query sees, its own position included. None is all positions up to its
                own.
        """
        ...


def slot_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    plan: AttentionPlan,
    sliding_window: int | None = None,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer with the plan; transformers calls this function.

    Args:
        module: the model's attention layer.
        query: `[batch, heads, tokens, head_dim]`.
        key: `[batch, kv_heads, tokens, head_dim]`.
        value: `[batch, kv_heads, tokens, head_dim]`.
        attention_mask: unused. The plan knows which positions a query sees.
        scaling: factor of the scores before the softmax.
        plan: the plan of this forward pass.
        sliding_window: number of positions that each query sees, its own position included. None is no window.
        **asked: further options of the layer. Options that change the result are refused.

    Returns:
        The output `[batch, tokens, heads, head_dim]`, and None in place of attention weights.
    """
    refuse_other_attention(asked)
    batch, heads, tokens, dim = query.shape
    query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    attended = plan.attend(module.layer_idx, query, key, value, scaling, sliding_window)
    return attended.view(batch, tokens, heads, dim), None


AttentionInterface.register(ATTENTION, slot_attention)


class PrefillPlan:
    """Chunks of many prompts packed in one row. Each chunk attends to its own slot alone."""

    def __init__(self, cache: SlotCache, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.cache = cache
        self.chunks = chunks
        lengths = [c.stop - c.start for c in chunks]
        # the device is stated even for the host's tensors: the caller may be inside a `torch.device("meta")` mode
        slots = torch.tensor([c.slot for c in chunks for _ in c.tokens], device=device)
        self.tokens = torch.tensor([t for c in chunks for t in c.tokens], device=device)
        self.positions = torch.tensor([p for c in chunks for p in range(c.start, c.stop)], device=device)
        self._targets = cache.targets(slots, self.positions)
        is_varlen = (
            device.type == "cuda"
            and cache.values.dtype in (torch.float16, torch.bfloat16)
            and all(c.start == 0 for c in chunks)
        )
        self._bounds: Bounds | None = None
        """bounds of the chunks if one call of variable-length attention computes all of them, else None"""
        if is_varlen:
            ends = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
            self._bounds = Bounds(ends, ends, max(lengths), max(lengths))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values to the cache; see `AttentionPlan.write`.

        Args:
            layer: index of the layer.
            key: `[tokens, kv_heads, head_dim]`.
            value: `[tokens, kv_heads, head_dim]`.
        """
        self.cache.write(layer, self._targets, key, value)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the attention output `[tokens, heads, head_dim]`; see `AttentionPlan.attend`.

        Args:
            layer: index of the layer.
            query: `[tokens, heads, head_dim]`.
            key: `[tokens, kv_heads, head_dim]`.
            value: `[tokens, kv_heads, head_dim]`.
            scale: factor of the scores before the softmax.
            window: number of positions that each query sees. None is no window.
        """
        self.write(layer, key, value)
        if self._bounds is not None:
            return varlen(query, key, value, self._bounds, scale, window)
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        outputs = []
        begin = 0
        for chunk in self.chunks:
            num = chunk.stop - chunk.start
            q, k, v = (t[:, :, begin : begin + num] for t in (query, key, value))
            mask = None
            if chunk.start > 0:
                k, v = self.cache.sequence(layer, chunk.slot, chunk.stop)
            if chunk.start > 0 or (window is not None and window < num):
                mask = causal_mask(num, chunk.stop, window, q.device)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
            outputs.append(out[0].transpose(0, 1))
            begin += num
        return torch.cat(outputs)


class TilePlan:
    """TILE_ROWS tokens of one sequence that attend to its slot. Rows after the last token are padding.

    Padding is written to the cache positions of the next tokens. These tokens overwrite it before it is read.
    """

    def __init__(self, cache: SlotCache, slot: int, start: int, tokens: Sequence[int], device: torch.device) -> None:
        self.cache = cache
        self._slot = slot
        self._stop = start + TILE_ROWS
        last = start + len(tokens) - 1
        self.tokens = torch.tensor([*tokens, *[0] * (TILE_ROWS - len(tokens))], device=device)
        places = torch.arange(start, self._stop, device=device)
        self.positions = places.clamp(max=last)  # the table of rotary angles may end here
        self._targets = cache.targets(torch.full_like(places, slot), places)
        self._mask = causal_mask(TILE_ROWS, self._stop, None, device)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values to the cache; see `AttentionPlan.write`.

        Args:
            layer: index of the layer.
            key: `[TILE_ROWS, kv_heads, head_dim]`.
            value: `[TILE_ROWS, kv_heads, head_dim]`.
        """
        self.cache.write(layer, self._targets, key, value)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the attention output `[TILE_ROWS, heads, head_dim]`; see `AttentionPlan.attend`.

        Args:
            layer: index of the layer.
            query: `[TILE_ROWS, heads, head_dim]`.
            key: `[TILE_ROWS, kv_heads, head_dim]`.
            value: `[TILE_ROWS, kv_heads, head_dim]`.
            scale: factor of the scores before the softmax.
            window: number of positions that each query sees. None is no window.
        """
        self.write(layer, key, value)
        keys, values = self.cache.sequence(layer, self._slot, self._stop)
        mask = self._mask if window is None else causal_mask(TILE_ROWS, self._stop, window, query.device)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


class DecodePlan:
    """One token of each of the first slots. The given sequence lengths include this token.

    Neighbouring rows form groups. A group is computed at the length of its longest row, so that little padding is read.

    If keys are blocked, both products of attention are weighted sums of rows. Scores sum the rows of a key block,
    weighted by the query. Outputs sum the values, weighted by the probabilities. torch's `embedding_bag` computes such
    sums at nearly the memory bandwidth. A batched matrix product took twice as long, because few queries share a key
    head.

    Otherwise the query heads that share a key head are folded into the query length. Keys and values are views of the
    cache and are never repeated.
    """

    GROUP = 16

    def __init__(
        self,
        cache: SlotCache,
        lengths: Sequence[int],
        positions: torch.Tensor,
        first_slot: int = 0,
        is_padded: bool = True,
    ) -> None:
        """Plan the first step.

        Args:
            cache: the cache of the slots.
            lengths: length of each sequence, in tokens.
            positions: positions of the tokens, `[steps, rows]`. The first step holds each sequence's last token; every
                further step is one position later.
            first_slot: slot of the first row.
            is_padded: compute rows at the length of their group. Otherwise compute each row at its own length, rounded
                up to whole blocks.
        """
        self.cache = cache
        self._first_slot = first_slot
        self._rows = torch.arange(len(lengths), device=positions.device)
        self._positions = positions
        self._lengths = lengths
        self._is_padded = is_padded
        self._groups = row_groups(lengths, self.GROUP) if is_padded else equal_groups(lengths)
        self._width = min(_round_up(max(lengths) + len(positions)), cache.max_len)
        self._bias = _bias(positions[0], self._width, cache)
        self._window_biases: dict[int, torch.Tensor] = {}
        """biases of the current step, by window"""
        self._look_up(0)

    def go_to(self, step: int) -> None:
        """Advance to this step, which must follow the current step."""
        if self._is_padded:
            self._groups = [(start, stop, length + 1) for start, stop, length in self._groups]
        else:
            self._groups = equal_groups([length + step for length in self._lengths])
        self._look_up(step)
        self._bias[self._rows, :, :, self._positions[step]] = 0
        self._window_biases.clear()

    def _bias_of(self, window: int | None) -> torch.Tensor:
        if window is None or window >= self._width:
            return self._bias
        if window not in self._window_biases:
            self._window_biases[window] = _bias(self._positions[self._step], self._width, self.cache, window)
        return self._window_biases[window]

    def _look_up(self, step: int) -> None:
        self._step = step
        first = self._first_slot
        self._targets = self.cache.targets(self._rows + first, self._positions[step])
        if self.cache.is_blocked:
            # held here besides: the cache may forget them
            self._bags = [
                self.cache.bags(first + start, first + stop, -(-length // BLOCK))
                for start, stop, length in self._groups
            ]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values to the cache; see `AttentionPlan.write`.

        Args:
            layer: index of the layer.
            key: `[rows, kv_heads, head_dim]`.
            value: `[rows, kv_heads, head_dim]`.
        """
        self.cache.write(layer, self._targets, key, value)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the attention output `[rows, heads, head_dim]`; see `AttentionPlan.attend`.

        Args:
            layer: index of the layer.
            query: `[rows, heads, head_dim]`.
            key: `[rows, kv_heads, head_dim]`.
            value: `[rows, kv_heads, head_dim]`.
            scale: factor of the scores before the softmax.
            window: number of positions that each query sees. None is no window.
        """
        self.write(layer, key, value)
        bias = self._bias_of(window)
        if self.cache.is_blocked:
            parts = [
                self._weighted_sums(layer, query[start:stop] * scale, bias[start:stop, 0], bags)
                for (start, stop, _), bags in zip(self._groups, self._bags, strict=True)
            ]
        else:
            parts = [
                _product(
                    self.cache,
                    layer,
                    query[start:stop],
                    bias[start:stop, ..., :length],
                    self._first_slot + start,
                    scale,
                )
                for start, stop, length in self._groups
            ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(query.shape)

    def _weighted_sums(self, layer: int, query: torch.Tensor, bias: torch.Tensor, bags: Bags) -> torch.Tensor:
        num, heads, dim = query.shape
        weights = query[:, :, None].expand(num, heads, bags.num_blocks, dim).flatten()
        scores = _weighted_sum(self.cache.key_rows[layer], bags.key_rows, bags.key_starts, weights)
        scores = scores.view(num, heads, bags.num_blocks * BLOCK)
        scores += bias[..., : scores.shape[-1]]
        probs = torch.softmax(scores, dim=-1).flatten()
        return _weighted_sum(self.cache.value_rows[layer], bags.value_rows, bags.value_starts, probs)


class FixedDecodePlan:
    """One token of each of the first slots, over the first `width` positions regardless of the sequence lengths.

    Its kernels do not depend on the values of the positions, as a captured step requires. It does not support blocked
    keys.
    """

    def __init__(self, cache: SlotCache, positions: torch.Tensor, width: int) -> None:
        self.cache = cache
        self._targets = cache.targets(torch.arange(len(positions), device=positions.device), positions)
        self._positions = positions
        self._width = width
        self._biases: dict[int | None, torch.Tensor] = {}

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values to the cache; see `AttentionPlan.write`.

        Args:
            layer: index of the layer.
            key: `[rows, kv_heads, head_dim]`.
            value: `[rows, kv_heads, head_dim]`.
        """
        self.cache.write(layer, self._targets, key, value)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the attention output `[rows, heads, head_dim]`; see `AttentionPlan.attend`.

        Args:
            layer: index of the layer.
            query: `[rows, heads, head_dim]`.
            key: `[rows, kv_heads, head_dim]`.
            value: `[rows, kv_heads, head_dim]`.
            scale: factor of the scores before the softmax.
            window: number of positions that each query sees. None is no window.
        """
        self.write(layer, key, value)
        if window not in self._biases:
            self._biases[window] = _bias(self._positions, self._width, self.cache, window)
        return _product(self.cache, layer, query, self._biases[window], 0, scale)


def _bias(positions: torch.Tensor, width: int, cache: SlotCache, window: int | None = None) -> torch.Tensor:
    """Return the additive mask `[rows, 1, 1, width]`: -inf after each row's position and before its window, else 0."""
    steps_back = positions[:, None] - torch.arange(width, device=positions.device)
    is_hidden = steps_back < 0
    if window is not None:
        is_hidden |= steps_back >= window
    bias = torch.zeros(len(positions), 1, 1, width, dtype=cache.values.dtype, device=positions.device)
    return bias.masked_fill_(is_hidden[:, None, None], float("-inf"))


def _product(
    cache: SlotCache, layer: int, query: torch.Tensor, bias: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """Return the attention of the slots from `start` on, over the `width` positions of `bias` `[rows, 1, 1, width]`."""
    rows, heads, dim = query.shape
    kv_heads, width = cache.num_kv_heads, bias.shape[-1]
    out = F.scaled_dot_product_attention(
        query.reshape(rows, kv_heads, heads // kv_heads, dim),
        cache.keys[layer, start : start + rows, :, :width],
        cache.values[layer, start : start + rows, :, :width],
        attn_mask=bias,
        scale=scale,
    )
    return out.reshape(rows, heads, dim)


def _weighted_sum(table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `F.embedding_bag` in mode "sum" `[bags, width]`, without its checks, which take as long as a short sum."""
    return torch.embedding_bag(table, rows, starts, False, 0, False, weights)[0]


def _round_up(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def row_groups(lengths: Sequence[int], size: int) -> list[tuple[int, int, int]]:
    """Return runs (start, stop, longest) of `size` rows each.

    Neighbouring runs are joined if this adds little padding.
    """
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


def equal_groups(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return runs (start, stop, length) of neighbours with equally many blocks; lengths are whole blocks."""
    groups: list[tuple[int, int, int]] = []
    for row, length in enumerate(map(_round_up, lengths)):
        if groups and groups[-1][2] == length:
            groups[-1] = (groups[-1][0], row + 1, length)
        else:
            groups.append((row, row + 1, length))
    return groups
