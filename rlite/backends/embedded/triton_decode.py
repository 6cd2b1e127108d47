"""Attention of decode steps over the paged cache on a GPU, in Triton: each sequence at its own length.

The pages of a sequence are divided among several programs, so that few long sequences keep a GPU busy, too. The first
kernel computes the softmax and the weighted values of each part, the second one joins the parts [FlashDecoding: Dao et
al. 2023, https://pytorch.org/blog/flash-decoding/]. The query heads that share a key head are rows of one product, so
that keys and values are read once.

Shapes and grids depend on the number of rows and the width of the table alone: the kernels can be captured in a graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlite.backends.models.attention import Weighting

PROGRAMS = 1024
"""programs among which the pages of a step are divided, at least, if there are as many pages"""
LEAST_ROWS = 16
"""rows of the smallest product of tensor cores"""
NO_WINDOW = 1 << 30
STAGES = 3
"""pages of keys and values that are on their way into shared memory at once"""


# Triton reads the annotations of its kernels
@triton.jit
def partial_attention(  # type: ignore[no-untyped-def]
    query, keys, values, table, positions, sums, stats,
    scale, softcap, window, table_stride, pages_per_part,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    KEY: tl.constexpr, KEY_PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr,
    HAS_CAP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the maximum and sum of e^score, and the weighted values, of one part of one sequence and key head.

    query [rows, heads, KEY]; keys [pages, PAGE, KV_HEADS, KEY]; values [pages, PAGE, KV_HEADS, VALUE]; table [rows,
    pages]; positions [rows]; sums [rows, heads, parts, VALUE]; stats [rows, heads, parts, 2]. WIDE computes products in
    float32: the interpreter multiplies the bits of bfloat16 as integers.
    """
    row, head, part, num_parts = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    length = (tl.load(positions + row) + 1).to(tl.int32)
    g, d, e, n = tl.arange(0, ROWS), tl.arange(0, KEY_PADDED), tl.arange(0, VALUE_PADDED), tl.arange(0, PAGE)
    heads = head * GROUP + g
    at = (row * KV_HEADS * GROUP + heads).to(tl.int64)
    q = tl.load(query + at[:, None] * KEY + d, mask=(g < GROUP)[:, None] & (d < KEY), other=0.0)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, VALUE_PADDED), tl.float32)
    first = tl.maximum(length - window, 0)
    begin = tl.maximum(first // PAGE, part * pages_per_part)
    for index in range(begin, tl.minimum(tl.cdiv(length, PAGE), (part + 1) * pages_per_part)):
        page = tl.load(table + row * table_stride + index).to(tl.int64)
        position = index * PAGE + n
        is_seen = (position < length) & (position >= first)
        line = (page * PAGE + n) * KV_HEADS + head
        k = tl.load(keys + line[:, None] * KEY + d, mask=is_seen[:, None] & (d < KEY), other=0.0)
        v = tl.load(values + line[:, None] * VALUE + e, mask=is_seen[:, None] & (e < VALUE), other=0.0)
        if WIDE:
            q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_CAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
        scores = tl.where(is_seen, scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        weights, change = tl.exp(scores - highest[:, None]), tl.exp(most - highest)
        weighted = weighted * change[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total, most = total * change + tl.sum(weights, 1), highest
    at = at * num_parts + part
    tl.store(stats + at * 2, most, mask=g < GROUP)
    tl.store(stats + at * 2 + 1, total, mask=g < GROUP)
    tl.store(sums + at[:, None] * VALUE + e, weighted, mask=(g < GROUP)[:, None] & (e < VALUE))


@triton.jit
def join_parts(  # type: ignore[no-untyped-def]
    sums, stats, sinks, output, num_parts,
    HEADS: tl.constexpr, PARTS: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Write the attention of one row and head, output [rows, heads, VALUE], from its parts; sinks [heads]."""
    at = (tl.program_id(0) * HEADS + tl.program_id(1)).to(tl.int64)
    p, e = tl.arange(0, PARTS), tl.arange(0, VALUE_PADDED)
    lines = at * num_parts + p
    most = tl.load(stats + lines * 2, mask=p < num_parts, other=float("-inf"))
    total = tl.load(stats + lines * 2 + 1, mask=p < num_parts, other=0.0)
    highest = tl.max(most, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32)
        highest = tl.maximum(highest, sink)
    change = tl.exp(most - highest)
    whole = tl.sum(total * change, 0)
    if HAS_SINKS:
        whole += tl.exp(sink - highest)
    parts = tl.load(sums + lines[:, None] * VALUE + e, mask=(p < num_parts)[:, None] & (e < VALUE), other=0.0)
    found = tl.sum(parts * change[:, None], 0) / whole
    tl.store(output + at * VALUE + e, found.to(output.dtype.element_ty), mask=e < VALUE)


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    weighting: Weighting,
    is_wide: bool = False,
) -> Tensor:
    """Return the attention of one token of each row, whose keys and values are in the cache already.

    `query`: `[rows, heads, key width]`. `keys`: `[pages, BLOCK, kv_heads, key width]`. `values`: `[pages, BLOCK,
    kv_heads, value width]`. `table`: pages of the rows' sequences, int64 `[rows, pages]`. `positions`: positions of the
    tokens, int64 `[rows]`. Returns the output, `[rows, heads, value width]`.
    """
    query, (rows, heads, key) = query.contiguous(), query.shape
    (_, page, kv_heads, value), (scale, window, softmax) = values.shape, weighting
    num_parts = min(table.shape[1], triton.cdiv(PROGRAMS, rows * kv_heads))
    pages_per_part = triton.cdiv(table.shape[1], num_parts)
    sums = query.new_empty(rows, heads, num_parts, value, dtype=torch.float32)
    stats = query.new_empty(rows, heads, num_parts, 2, dtype=torch.float32)
    output, group = query.new_empty(rows, heads, value), heads // kv_heads
    sizes: dict[str, Any] = {"VALUE": value, "VALUE_PADDED": max(16, triton.next_power_of_2(value))}
    partial_attention[rows, kv_heads, num_parts](
        query, keys, values, table, positions, sums, stats, scale, softmax.softcap or 0.0, window or NO_WINDOW,
        table.stride(0), pages_per_part, KV_HEADS=kv_heads, GROUP=group,
        ROWS=max(LEAST_ROWS, triton.next_power_of_2(group)), PAGE=page,
        KEY=key, KEY_PADDED=max(16, triton.next_power_of_2(key)), HAS_CAP=softmax.softcap is not None, WIDE=is_wide,
        num_stages=STAGES, **sizes,
    )  # fmt: skip
    join_parts[rows, heads](
        sums, stats, sums if softmax.sinks is None else softmax.sinks, output, num_parts,
        HEADS=heads, PARTS=triton.next_power_of_2(num_parts), HAS_SINKS=softmax.sinks is not None, **sizes,
    )  # fmt: skip
    return output
