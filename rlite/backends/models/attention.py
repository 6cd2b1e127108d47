"""Attention over packs: rows [1, T] that hold many sequences end to end, for unmodified Hugging Face models.

The function is registered with transformers under `PACKED`. On CUDA it is torch's own variable-length flash attention.
On CPU each sequence is attended by a call of its own, over views of the pack: nothing is padded, masked or gathered,
and the result of a sequence does not depend on its neighbours. Gathering sequences of similar length into common calls
was measured and rejected: it is faster only below about 30 tokens (docs/performance.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from rlite.errors import ConfigError
from rlite.runtime.parallel.context_parallel import ContextShare, Segment

PACKED = "rlite_packed"
TAKES_GROUPED_KEYS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""true if torch's variable-length attention takes fewer key heads than query heads"""


Attend = Callable[..., Tensor]
"""attention of one sequence, with the arguments of `causal_attention`"""


class Bounds(NamedTuple):
    """Boundaries of the queries and keys of each sequence, for one call over many sequences."""

    cu_queries: Tensor
    """[n + 1] int32, cumulative, as is cu_keys"""
    cu_keys: Tensor
    max_queries: int
    max_keys: int


class PackedLayout:
    """Boundaries of a pack's sequences, computed once and used by every layer.

    Args:
        cu_seqlens: [n + 1], cumulative lengths.
        max_seqlen: the longest sequence.
        share: this rank's tokens, under context parallelism.
        attend: attention of one sequence, with the arguments of `causal_attention`, which is the default.
    """

    def __init__(
        self, cu_seqlens: Tensor, max_seqlen: int, share: ContextShare | None = None, attend: Attend | None = None
    ) -> None:
        self.cu_seqlens, self.max_seqlen = cu_seqlens.to(torch.int32), int(max_seqlen)
        self.share = share if share is not None and share.group is not None else None
        self.attend = attend or causal_attention

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return self.cu_seqlens.diff().tolist()

    @cached_property
    def segments(self) -> tuple[Tensor, Bounds]:
        """The keys [K] int64 that the share's segments see, one segment's after the other's, and the bounds of both.

        Keys that two segments see occur twice. The tensors are made on the host and copied: nothing waits for the
        device.
        """
        assert self.share is not None
        slices = [(segment.queries, segment.keys) for segment in self.share.segments]
        lengths = torch.tensor([[rows.stop - rows.start for rows in both] for both in slices])
        cu_queries, cu_keys = F.pad(lengths.cumsum(0), (0, 0, 1, 0)).to(torch.int32).T.contiguous()
        index = torch.cat([torch.arange(keys.start, keys.stop) for _, keys in slices])
        max_queries, max_keys = lengths.amax(0).tolist()
        device = self.cu_seqlens.device
        return index.to(device), Bounds(cu_queries.to(device), cu_keys.to(device), max_queries, max_keys)


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
    """Compute causal attention inside each sequence of a pack.

    Args:
        module: the model's attention module.
        query: [1, H, T, D].
        key: [1, K, T, D].
        value: [1, K, T, D].
        attention_mask: None; the layout replaces it.
        scaling: factor of the scores; default: 1 / sqrt(D).
        dropout: share of attention weights that is set to 0.
        packed_layout: boundaries of the sequences.
        **kwargs: the model's further arguments. With `sliding_window` a token sees that many tokens, itself included.

    Returns:
        [1, T, H, D], and None for the weights.

    Raises:
        ConfigError: the model asks for another attention, or for dropout on CUDA or with a context-parallel share.
    """
    if packed_layout is None:
        raise ConfigError(
            f"attention {PACKED!r} got no packed_layout: call compute_logits, or set another attention. "
            "A model that does not hand its arguments through to the attention cannot have packs"
        )
    refuse_other_attention(kwargs)
    if dropout and (query.is_cuda or packed_layout.share is not None):
        raise ConfigError(f"attention dropout ({dropout}) is not supported on CUDA, nor with sp_size; set it to 0")
    share, window = packed_layout.share, kwargs.get("sliding_window")
    if window is not None and window >= packed_layout.max_seqlen:
        window = None
    is_flash = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    attend = partial(packed_layout.attend, scaling=scaling, window=window, dropout=dropout)
    if share is None and not is_flash:
        # one split replaces many slices, because the gradient of a slice is as long as the pack
        parts = zip(*(x.split(packed_layout.lengths, dim=2) for x in (query, key, value)), strict=True)
        return torch.cat([attend(q, k, v).transpose(1, 2) for q, k, v in parts], dim=1), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    if share is not None:
        k, v = share.gather_keys(torch.cat([k, v], dim=-1)).split([k.shape[-1], v.shape[-1]], dim=-1)
        if not is_flash:
            return torch.cat([_attend_segment(attend, q, k, v, segment) for segment in share.segments])[None], None
        index, bounds = packed_layout.segments
        return varlen(q, k[index], v[index], bounds, scaling, window)[None], None
    cu_seqlens, length = packed_layout.cu_seqlens, packed_layout.max_seqlen
    return varlen(q, k, v, Bounds(cu_seqlens, cu_seqlens, length, length), scaling, window)[None], None


def refuse_other_attention(asked: Mapping[str, Any]) -> None:
    """Refuse arguments that change the attention scores: a soft cap, or sinks.

    Raises:
        ConfigError: a model passes such an argument.
    """
    if (softcap := asked.get("softcap")) is not None:
        raise ConfigError(f"the model caps its attention scores (softcap={softcap}), which rlite does not support")
    if asked.get("s_aux") is not None:
        raise ConfigError("the model has attention sinks (s_aux), which rlite does not support")


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys the queries see, bool [num_queries, num_keys]; the last query belongs to the last key.

    Args:
        num_queries: number of queries.
        num_keys: number of keys.
        window: keys that a query sees; None is all.
        device: device of the mask.
    """
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return mask if window is None else mask.triu(num_keys - num_queries - window + 1)


@contextmanager
def attention(config: PretrainedConfig, implementation: str) -> Iterator[None]:
    """Make models of `config` use this attention inside the block.

    Yields:
        None.
    """
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, dropout: float = 0.0
) -> Tensor:
    """Return attention of one sequence; the last query belongs to the last key.

    Args:
        q: [1, H, queries, D].
        k: [1, K, keys, D].
        v: [1, K, keys, D].
        scaling: factor of the scores; default: 1 / sqrt(D).
        window: keys that a query sees; None is all.
        dropout: share of attention weights that is set to 0.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    is_plain = num_queries == num_keys and (window is None or window >= num_keys)
    mask = None if is_plain else causal_mask(num_queries, num_keys, window, q.device)
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_plain, scale=scaling, enable_gqa=is_grouped)


def _attend_segment(attend: Attend, q: Tensor, k: Tensor, v: Tensor, segment: Segment) -> Tensor:
    """Return attention of a segment's queries, of this rank's q [t, H, D], to its keys, of the whole pack's k and v."""
    rows = ((q, segment.queries), (k, segment.keys), (v, segment.keys))
    # four axes: else torch keeps every probability for the backward pass
    return attend(*(x[places].transpose(0, 1)[None] for x, places in rows))[0].transpose(0, 1)


def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scaling: float | None, window: int | None = None) -> Tensor:
    """Compute attention of many sequences by one call of flash attention.

    Args:
        q: [T, H, D].
        k: [S, K, D].
        v: [S, K, D].
        bounds: boundaries of the sequences. The causal mask is aligned to the end of each sequence's keys.
        scaling: factor of the scores; default: 1 / sqrt(D).
        window: tokens that a token sees, itself included; default: all before it.

    Returns:
        [T, H, D].
    """
    grouped: dict[str, Any] = {}
    if k.shape[1] != q.shape[1]:
        if TAKES_GROUPED_KEYS:
            grouped = {"enable_gqa": True}
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    before = -1 if window is None else window - 1
    out = varlen_attn(q, k, v, *bounds, window_size=(before, 0), scale=scaling, **grouped)
    assert isinstance(out, Tensor)  # it also returns the log-sum-exp where that is asked for
    return out


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Return None: rlite's attention takes no mask. In a pack, the layout states which tokens belong together."""


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, no_mask)
