"""Attention over packs: rows [1, T] that hold many sequences end to end, for unmodified Hugging Face models.

The function is registered with transformers under `PACKED`. On CUDA it is torch's own variable-length flash attention.
On CPU sequences of similar length are laid side by side and attended with one causal call; the tail of a shorter
sequence is seen by nobody, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from rlite.errors import ConfigError

PACKED = "rlite_packed"
PADDING_RATIO = 0.7  # sequences share a call if the shortest is at least so long, relative to the longest


class PackedLayout:
    """Where the sequences of a pack lie. `cu_seqlens` [n + 1] int, cumulative; computed once, used by every layer."""

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self.cu_seqlens = cu_seqlens.to(torch.int32)
        self.max_seqlen = int(max_seqlen)

    @cached_property
    def buckets(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs (index [b, L], is_real [b, L]): the pack's positions, padded by repeating the last one."""
        starts = self.cu_seqlens[:-1].tolist()
        lengths = self.cu_seqlens.diff().tolist()
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        buckets = []
        while order:
            longest = lengths[order[0]]
            rows = [i for i in order if lengths[i] >= PADDING_RATIO * longest]
            order = order[len(rows) :]
            start = torch.tensor([starts[i] for i in rows])[:, None]
            length = torch.tensor([lengths[i] for i in rows])[:, None]
            steps = torch.arange(longest)[None, :]
            buckets.append((start + steps.minimum(length - 1), steps < length))
        return buckets


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence. query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    Raises: ConfigError where the model asks for another attention: a window that the longest sequence leaves, a cap of
        the scores, sinks. Without it such a model would be trained as if it were another one.
    """
    if packed_layout is None:
        raise ValueError(f"attention {PACKED!r} needs packed_layout=; call compute_logits, or set another attention")
    asked = {key: kwargs[key] for key in ("softcap", "s_aux") if kwargs.get(key) is not None}
    if (window := kwargs.get("sliding_window")) is not None and window < packed_layout.max_seqlen:
        asked["sliding_window"] = window
    if asked:
        raise ConfigError(
            f"the model asks for attention with {asked}, which packs do not support (longest sequence: "
            f"{packed_layout.max_seqlen} tokens); use a model with full attention, or sequences within the window"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    if query.is_cuda:
        return _varlen(q, k, v, packed_layout, scaling)[None], None
    groups = q.shape[1] // k.shape[1]
    parts = []
    for index, is_real in packed_layout.buckets:
        rows_q, rows_k, rows_v = (x[index].transpose(1, 2) for x in (q, k, v))  # [b, heads, L, D]
        if groups > 1:
            rows_k, rows_v = (x.repeat_interleave(groups, dim=1) for x in (rows_k, rows_v))
        attended = F.scaled_dot_product_attention(
            rows_q, rows_k, rows_v, is_causal=True, scale=scaling, dropout_p=dropout
        )
        parts.append((index[is_real], attended.transpose(1, 2)[is_real]))
    out = torch.cat([rows for _, rows in parts])
    position = torch.cat([index for index, _ in parts])
    return out[position.argsort()][None], None


@contextmanager
def attention(config: PretrainedConfig, implementation: str) -> Iterator[None]:
    """Inside, models of `config` use this attention."""
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def recompute_alike(config: PretrainedConfig) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a checkpointed forward and of its recomputation, which uses the attention that is in use now."""
    return nullcontext(), attention(config, config._attn_implementation)


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scaling: float | None) -> Tensor:
    length = layout.max_seqlen
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    cu_seqlens = layout.cu_seqlens
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, length, length, window_size=(-1, 0), scale=scaling)
    assert isinstance(out, Tensor)  # it also returns the log-sum-exp where that is asked for
    return out


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """A pack needs no mask: the layout says which tokens belong together."""


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)
