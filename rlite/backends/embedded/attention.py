"""Attention over the paged cache, registered with transformers under `ATTENTION`.

A model whose `config._attn_implementation` is this name calls `page_attention` in each layer. The plan of the current
`mixing` block computes the attention: layers of many classes do not hand arguments on. No mask function is registered
under the name, so transformers builds no masks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from rlite.backends.embedded.cache import GatherIndex, PagedCache, Targets, block_table, rows_of_pages
from rlite.backends.embedded.pages import num_pages
from rlite.backends.embedded.scheduler import Chunk
from rlite.backends.models.attention import (
    Bounds,
    Softmax,
    Weighting,
    attention_of_scores,
    causal_attention,
    causal_mask,
    of_one_width,
    varlen,
)
from rlite.backends.models.batch_invariant import BLOCK, SUM, attend
from rlite.backends.models.mixers import Mixer, Mixing, State, current_mixing, map_outputs
from rlite.backends.serving.native import decode_attention
from rlite.runtime.parallel.upload import upload

ATTENTION = "rlite_pages"


class AttentionPlan(Mixing):
    """The attention of one forward pass: the positions that queries see, and the cache rows that keys and values fill.

    All tensors are `[tokens, (kv_)heads, width]`. The plan also knows the states from which mixers continue.
    """

    cache: PagedCache
    targets: Targets
    """rows of the cache for the keys and values of this pass"""

    @property
    def places(self) -> Tensor | None:
        """Places of the tokens in the cache, `[tokens]`; None beside the cache."""
        return None

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values to the cache, for later tokens to read.

        `key`: `[tokens, kv_heads, key width]`. `value`: `[tokens, kv_heads, value width]`.
        """
        self.cache.write(layer, self.targets, key, value)

    @abstractmethod
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
        """Write keys and values to the cache and compute the attention.

        `query`: `[tokens, heads, key width]`. `key`: `[tokens, kv_heads, key width]`. `value`: `[tokens, kv_heads,
        value width]`. Returns the attention output, `[tokens, heads, value width]`.
        """


def page_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **asked: Any
) -> tuple[Tensor, None]:
    """Compute the attention of one layer with the current plan; transformers calls this function.

    `query`: `[batch, heads, tokens, key width]`. `key`: `[batch, kv_heads, tokens, key width]`. `value`: `[batch,
    kv_heads, tokens, value width]`. `*_`: an unused mask, and so is the keyword `attention_mask`. The plan knows which
    positions a query sees. `**asked`: further options of the layer. With `sliding_window`, each query sees that many
    positions, its own position included. `softcap` and `s_aux` change the softmax. Returns the output `[batch, tokens,
    heads, value width]`, and None in place of attention weights.
    """
    batch, heads, tokens = query.shape[:3]
    query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    weighting = Weighting(scaling, asked.get("sliding_window"), Softmax.asked(asked))
    plan: Any = current_mixing()
    return plan.attend(module.layer_idx, query, key, value, weighting).view(batch, tokens, heads, -1), None


AttentionInterface.register(ATTENTION, page_attention)


class PrefillPlan(AttentionPlan):
    """Chunks of many prompts packed in one row. Each chunk attends to its own sequence alone."""

    def __init__(
        self, cache: PagedCache, chunks: Sequence[Chunk], is_flash: bool, is_invariant: bool, is_fixed: bool = False
    ) -> None:
        self.cache, self.chunks, device = cache, chunks, cache.device
        self._is_flash, self._is_invariant, self._is_fixed = is_flash, is_invariant, is_fixed
        self.tokens, places = rows_of(chunks, device)
        lengths, stops = [c.stop - c.start for c in chunks], [c.stop for c in chunks]
        # the table of rotary angles may end with the last token
        self.positions = places.clamp(max=stops[-1] - chunks[-1].num_padding - 1) if is_fixed else places
        rows = [rows_of_pages(c.pages, c.start, c.stop) for c in chunks]
        self.targets = Targets(upload(np.concatenate(rows), device))
        if is_flash:
            sums = [[0, *accumulate(lengths)], [0, *accumulate(stops)]]
            cu_queries, cu_keys = upload(sums, device, torch.int32)
            self._bounds = Bounds(cu_queries, cu_keys, max(lengths), max(stops))
            self._seen: Tensor | None = None
            """places of the keys that the chunks see, if some are of an earlier forward"""
            if any(c.start for c in chunks):
                self._seen = upload(np.concatenate([rows_of_pages(c.pages, 0, c.stop) for c in chunks]), device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
        """Compute the attention of the chunks to their sequences."""
        self.write(layer, key, value)
        if self._is_flash:
            if self._seen is not None:
                key, value = self.cache.at(layer, self._seen)
            return varlen(query, key, value, self._bounds, *weighting)
        outputs = []
        for chunk, (q, k, v) in zip(self.chunks, _by_chunk(self.chunks, query, key, value), strict=True):
            if self._is_invariant:
                k, v = self._keys_of(layer, chunk)
                out = attend(q[0], k[0], v[0], chunk.start, weighting.scale)
            else:
                if chunk.start > 0 or self._is_fixed:
                    k, v = (x[:, :, : chunk.stop] for x in self._keys_of(layer, chunk))
                compute = _masked_attention if self._is_fixed else causal_attention
                out = compute(q, k, v, *weighting)[0]
            outputs.append(out.transpose(0, 1))
        return torch.cat(outputs)

    @property
    def places(self) -> Tensor:
        """Places of the tokens in the cache, `[tokens]`."""
        return self.targets.rows

    def _keys_of(self, layer: int, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return keys and values of all pages up to the end of a chunk."""
        pages = upload(chunk.pages[: num_pages(chunk.stop)], self.cache.device)
        return self.cache.gathered(layer, pages[None])

    def mix(self, mixer: Mixer, hidden_states: Tensor) -> Any:
        """Compute each chunk from the state of its row, and leave the state after its last token there.

        `hidden_states`: `[1, tokens, width]`. Returns the output of the mixer's module; zeros at padding.
        """
        states, parts = self.cache.states, _split_chunks(self.chunks, hidden_states)
        outputs: list[Any] = [None] * len(parts)
        for group in equal_chunks(self.chunks):
            slots = [slice(self.chunks[i].row, self.chunks[i].row + 1) for i in group]
            before = states.take(mixer.number, slots[0]) if self.chunks[group[0]].start else None
            batch, after = mixer.run(torch.cat([parts[i] for i in group]), before)
            for row, (i, slot) in enumerate(zip(group, slots, strict=True)):
                states.put(mixer.number, slot, {key: tensor[row : row + 1] for key, tensor in after.items()})
                outputs[i] = map_outputs(lambda x, r=row: x[r : r + 1], batch)
        return _join_chunks(self.chunks, outputs)


def equal_chunks(chunks: Sequence[Chunk]) -> list[list[int]]:
    """Return the indices of chunks that a mixer can compute in one call: beginnings of equal length; others alone."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, chunk in enumerate(chunks):
        groups.setdefault((len(chunk.tokens), index if chunk.start else -1), []).append(index)
    return list(groups.values())


def _split_chunks(chunks: Sequence[Chunk], hidden_states: Tensor) -> list[Tensor]:
    """Return the part `[1, tokens, width]` of each chunk, without padding."""
    parts = hidden_states.split([c.stop - c.start for c in chunks], dim=1)
    return [part[:, : len(chunk.tokens)] for chunk, part in zip(chunks, parts, strict=True)]


def _join_chunks(chunks: Sequence[Chunk], outputs: Sequence[Any]) -> Any:
    """Return the outputs of all chunks as one, with zeros at padding."""
    padded = [
        map_outputs(lambda x, n=c.num_padding: torch.cat([x, x.new_zeros(1, n, *x.shape[2:])], dim=1) if n else x, out)
        for c, out in zip(chunks, outputs, strict=True)
    ]
    return map_outputs(lambda *parts: torch.cat(parts, dim=1), *padded)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softmax: Softmax) -> Tensor:
    """Return `causal_attention`, by one kernel for all chunks."""
    if not softmax.is_plain:
        return causal_attention(q, k, v, scaling, window, softmax)
    mask, width = causal_mask(q.shape[2], k.shape[2], window, q.device), v.shape[-1]
    q, k, v = of_one_width(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)[..., :width]


def rows_of(chunks: Sequence[Chunk], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and places `[tokens]` of a row of chunks."""
    tokens = [token for c in chunks for token in (*c.tokens, *[0] * c.num_padding)]
    places = np.concatenate([np.arange(c.start, c.stop) for c in chunks])
    return upload(tokens, device), upload(places, device)


def _by_chunk(chunks: Sequence[Chunk], *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return each chunk's part `[1, heads, tokens, head_dim]` of rows `[tokens, heads, head_dim]`."""
    lengths = [chunk.stop - chunk.start for chunk in chunks]
    return zip(*(t.transpose(0, 1)[None].split(lengths, dim=2) for t in rows), strict=True)


Past = dict[int, tuple[Tensor, Tensor]]
"""keys and values `[1, kv_heads, tokens, head_dim]` of one prompt's tokens so far, by layer"""


class ScoringPlan(AttentionPlan):
    """Chunks of many prompts packed in one row, beside the cache.

    `before`: plan of the earlier piece with the prompt that the first chunk continues, if there is any.
    """

    def __init__(self, chunks: Sequence[Chunk], before: ScoringPlan | None, device: torch.device) -> None:
        self._chunks = chunks
        is_further = before is not None and chunks[0].start > 0
        self._past: Past = before.seen if before is not None and is_further else {}
        self._states: dict[int, State] = before.states if before is not None and is_further else {}
        self.seen: Past = {}
        """keys and values of the last chunk's prompt"""
        self.states: dict[int, State] = {}
        """states after the last chunk, by the number of the mixer"""
        self.tokens, self.positions = rows_of(chunks, device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
        """Compute the attention of the chunks, and keep the keys and values of the last prompt."""
        outputs = []
        for index, (q, k, v) in enumerate(_by_chunk(self._chunks, query, key, value)):
            if index == 0 and self._past:
                k, v = (torch.cat(pair, dim=2) for pair in zip(self._past[layer], (k, v), strict=True))
            self.seen[layer] = k, v
            outputs.append(causal_attention(q, k, v, *weighting)[0].transpose(0, 1))
        return torch.cat(outputs)

    def mix(self, mixer: Mixer, hidden_states: Tensor) -> Any:
        """Compute the chunks, and keep the state of the last prompt.

        Returns the output of the mixer's module.
        """
        outputs = []
        for chunk, part in zip(self._chunks, _split_chunks(self._chunks, hidden_states), strict=True):
            before = self._states.get(mixer.number) if chunk.start else None
            output, self.states[mixer.number] = mixer.run(part, before)
            outputs.append(output)
        return _join_chunks(self._chunks, outputs)


class StepsPlan(AttentionPlan):
    """One token of each row, for the steps of a burst.

    `table`: pages of the rows' sequences, `[rows, pages]`. `positions`: positions of the tokens, `[steps, rows]`.
    `first_row`: row of the first sequence.
    """

    def __init__(self, cache: PagedCache, table: Tensor, positions: Tensor, first_row: int = 0) -> None:
        self.cache, self.table, self._positions, self._first_row = cache, table, positions, first_row
        self._step = 0

    def go_to(self, step: int) -> None:
        """Advance to this step, which must follow the current step."""
        self._step = step

    @property
    def places(self) -> Tensor:
        """Places of the tokens in the cache, `[rows]`."""
        positions = self._positions[self._step]
        return self.table.gather(1, positions[:, None] // BLOCK)[:, 0] * BLOCK + positions % BLOCK

    def mix(self, mixer: Mixer, hidden_states: Tensor) -> Any:
        """Compute the next token of the rows, and advance their states.

        `hidden_states`: `[rows, 1, width]`.
        """
        rows = slice(self._first_row, self._first_row + len(hidden_states))
        output, after = mixer.run(hidden_states, self.cache.states.take(mixer.number, rows))
        self.cache.states.put(mixer.number, rows, after)
        return output


class NativeDecodePlan(StepsPlan):
    """Steps that `decode.c` computes, each sequence at its own length. The keys of the cache are blocked."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
        """Write keys and values to the cache and compute the attention, by one call."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return decode_attention(query, key, value, self._positions[self._step], self.table, keys, values, weighting)


PagedKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Weighting], Tensor]
"""(query, keys, values, table, positions, weighting) -> output, see `triton_decode.paged_decode`"""


class KernelDecodePlan(StepsPlan):
    """Steps that a kernel computes, each sequence at its own length. No shape depends on the lengths."""

    def __init__(self, cache: PagedCache, table: Tensor, positions: Tensor, kernel: PagedKernel) -> None:
        super().__init__(cache, table, positions)
        self._kernel = kernel
        self.go_to(0)

    def go_to(self, step: int) -> None:
        """Advance to this step."""
        super().go_to(step)
        self.targets = Targets(self.places)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
        """Compute the attention of the rows to their sequences."""
        self.write(layer, key, value)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return self._kernel(query, keys, values, self.table, self._positions[self._step], weighting)


class CheckPlan(PrefillPlan):
    """Several tokens of some sequences; each sees its sequence up to itself: `decode.c`'s part of a prefill."""

    def __init__(self, cache: PagedCache, chunks: Sequence[Chunk]) -> None:
        super().__init__(cache, chunks, is_flash=False, is_invariant=False)
        lengths = upload([chunk.stop - chunk.start for chunk in chunks], cache.device)
        self._table = block_table([chunk.pages for chunk in chunks], cache.device).repeat_interleave(lengths, dim=0)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
        """Compute the attention of all tokens by one call."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return decode_attention(query, key, value, self.positions, self._table, keys, values, weighting)


class DecodePlan(StepsPlan):
    """Steps that PyTorch computes. The given sequence lengths include the first step's token.

    Neighbouring rows form groups. A group is computed at the length of its longest row, so that little padding is read.

    If keys are blocked, both products of attention are weighted sums of rows. Scores sum the rows of a key block,
    weighted by the query. Outputs sum the values, weighted by the probabilities. torch's `embedding_bag` computes such
    sums at nearly the memory bandwidth. A batched matrix product took twice as long, because few queries share a key
    head.

    Otherwise the keys and values of a group are gathered, and the query heads that share a key head are folded into the
    query length.
    """

    GROUP = 16

    def __init__(
        self,
        cache: PagedCache,
        table: Tensor,
        positions: Tensor,
        lengths: Sequence[int],
        first_row: int = 0,
        is_padded: bool = True,
        is_invariant: bool = False,
    ) -> None:
        """Plan the first step.

        `table`: pages of the rows' sequences, `[rows, pages]`. `positions`: positions of the tokens, `[steps, rows]`.
        The first step holds each sequence's last token; every further step is one position later. `lengths`: length of
        each sequence, in tokens. `is_padded`: compute rows at the length of their group. Otherwise compute each row at
        its own length, rounded up to whole blocks.
        """
        super().__init__(cache, table, positions, first_row)
        self._lengths, self._is_padded, self._is_invariant = lengths, is_padded, is_invariant
        self._rows = torch.arange(len(lengths), device=positions.device)
        self._groups = row_groups(lengths, self.GROUP) if is_padded else equal_groups(lengths)
        self._width = min(_round_up(max(lengths) + len(positions) - 1), table.shape[1] * BLOCK)
        self._biases: dict[int | None, Tensor] = {None: _bias(positions[0], self._width, cache)}
        """biases of the current step, by window"""
        self._look_up(0)

    def go_to(self, step: int) -> None:
        """Advance to this step, which must follow the current step."""
        if self._is_padded:
            self._groups = [(start, stop, length + 1) for start, stop, length in self._groups]
        else:
            self._groups = equal_groups([length + step for length in self._lengths])
        self._look_up(step)
        bias = self._biases[None]
        bias[self._rows, :, :, self._positions[step]] = 0
        self._biases = {None: bias}

    def _look_up(self, step: int) -> None:
        self._step = step
        self.targets = Targets(self.places)
        self._gather_indices: dict[tuple[int, ...], list[GatherIndex]] = {}
        """indices of each group by the sizes of a layer, held here besides: the cache may forget them"""

    def _table_of(self, start: int, stop: int, length: int) -> Tensor:
        """Return the pages of a group's first positions."""
        return self.table[start:stop, : num_pages(length)]

    def _gather_index(self, layer: int) -> list[GatherIndex]:
        sizes = self.cache.layers[layer][:3]
        if sizes not in self._gather_indices:
            found = [self.cache.gather_index(layer, self._table_of(*group)) for group in self._groups]
            self._gather_indices[sizes] = found
        return self._gather_indices[sizes]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
        """Compute the attention of the rows to their sequences."""
        self.write(layer, key, value)
        scale, window, softmax = weighting
        if window is not None and window >= self._width:
            window = None
        if window not in self._biases:
            self._biases[window] = _bias(self._positions[self._step], self._width, self.cache, window)
        bias = self._biases[window]
        if self.cache.is_blocked:
            parts = [
                self._weighted_sums(layer, query[start:stop] * scale, bias[start:stop, 0], index, softmax)
                for (start, stop, _), index in zip(self._groups, self._gather_index(layer), strict=True)
            ]
        else:
            parts = [
                self._product(layer, query[group[0] : group[1]], bias, group, scale, softmax) for group in self._groups
            ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.reshape(*query.shape[:-1], -1)

    def _weighted_sums(self, layer: int, query: Tensor, bias: Tensor, index: GatherIndex, softmax: Softmax) -> Tensor:
        (num, heads, dim), width = query.shape, index.num_blocks * BLOCK
        weights = query[:, :, None].expand(num, heads, index.num_blocks, dim).flatten()
        scores = _weighted_sum(self.cache.key_rows[layer], index.key_rows, index.key_starts, weights)
        scores = scores.view(num, heads, width)
        if softmax.is_plain:
            scores += bias[..., :width]
            probs = torch.softmax(scores, dim=-1).flatten()
        else:
            probs = softmax.probabilities(scores[:, :, None], bias[:, None, :, :width]).flatten()
        values, starts = self.cache.value_rows[layer], index.value_starts
        if not self._is_invariant or width <= SUM:
            return _weighted_sum(values, index.value_rows, starts, probs)
        starts = starts[:, None] + torch.arange(0, width, SUM, dtype=starts.dtype, device=starts.device)
        parts = _weighted_sum(values, index.value_rows, starts.flatten(), probs).view(*starts.shape, -1)
        return reduce(torch.add, parts.unbind(1))

    def _product(
        self, layer: int, query: Tensor, bias: Tensor, group: tuple[int, int, int], scale: float, softmax: Softmax
    ) -> Tensor:
        """Return the attention of a group's queries, over whole pages."""
        rows, heads, dim = query.shape
        keys, values = self.cache.gathered(layer, self._table_of(*group))
        bias = bias[group[0] : group[1], ..., : keys.shape[2]]
        if not softmax.is_plain:
            return attention_of_scores(query[:, :, None], keys, values, bias, scale, softmax)
        query = query.reshape(rows, keys.shape[1], heads // keys.shape[1], dim)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale)


def _bias(positions: Tensor, width: int, cache: PagedCache, window: int | None = None) -> Tensor:
    """Return the additive mask `[rows, 1, 1, width]`: -inf after each row's position and before its window, else 0."""
    steps_back = positions[:, None] - torch.arange(width, device=positions.device)
    is_hidden = steps_back < 0
    if window is not None:
        is_hidden |= steps_back >= window
    bias = torch.zeros(len(positions), 1, 1, width, dtype=cache.dtype, device=positions.device)
    return bias.masked_fill_(is_hidden[:, None, None], float("-inf"))


def _weighted_sum(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Return `F.embedding_bag` in mode "sum" `[bags, width]`, without its checks, which take as long as a short sum."""
    return torch.embedding_bag(table, rows, starts, False, 0, False, weights)[0]


def _round_up(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def row_groups(lengths: Sequence[int], size: int) -> list[tuple[int, int, int]]:
    """Return runs (start, stop, longest) of `size` rows each.

    Neighbouring runs are joined if this adds little padding.
    """
    groups = [(0, 0, 0)]  # an empty run, which the first one joins
    for start in range(0, len(lengths), size):
        stop = min(start + size, len(lengths))
        longest = max(lengths[start:stop])
        begin, end, length = groups[-1]
        joined = max(length, longest)
        added = joined * (stop - begin) - length * (end - begin) - longest * (stop - start)
        if added * 16 <= joined * (stop - begin):
            groups[-1] = (begin, stop, joined)
        else:
            groups.append((start, stop, longest))
    return groups


def equal_groups(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return runs (start, stop, length) of neighbours with equally many blocks; lengths are whole blocks."""
    groups: list[tuple[int, int, int]] = []
    for length, run in groupby(map(_round_up, lengths)):
        start = groups[-1][1] if groups else 0
        groups.append((start, start + len(list(run)), length))
    return groups
