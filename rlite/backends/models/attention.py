"""Attention over packs: rows [1, T] that hold many sequences end to end, for unmodified Hugging Face models.

The function is registered with transformers under `PACKED`. On CUDA it is torch's own variable-length flash attention.
On CPU each sequence is attended by a call of its own, over views of the pack: nothing is padded, masked or gathered,
and the result of a sequence does not depend on its neighbours. Gathering sequences of similar length into common calls
was measured and rejected: it is faster only below about 30 tokens (docs/performance.md).
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from transformers import AttentionInterface, PretrainedConfig

from rlite.errors import ConfigError
from rlite.runtime.parallel.context_parallel import ContextShare
from rlite.runtime.parallel.prefix_tree import select_rows

logger = logging.getLogger(__name__)
PACKED = "rlite_packed"
TAKES_GROUPED_KEYS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""true if torch's variable-length attention takes fewer key heads than query heads"""


MAX_FLASH_WIDTH = 256
"""widest head of torch's flash attention, whose widths are multiples of 8"""
QUERIES = 256
"""queries whose scores are held at once, if they are computed one by one"""

Attend = Callable[..., Tensor]
"""attention of one sequence, with the arguments of `causal_attention`"""


class Softmax(NamedTuple):
    """The softmax of a layer, which may cap its scores and may have sinks."""

    softcap: float | None = None
    """scores become `softcap * tanh(scores / softcap)`"""
    sinks: Tensor | None = None
    """[H], one further score for each head, which belongs to no value"""

    @classmethod
    def asked(cls, arguments: Mapping[str, Any]) -> Softmax:
        """Return the softmax that a model asks for by its arguments `softcap` and `s_aux`."""
        return cls(arguments.get("softcap"), arguments.get("s_aux"))

    @property
    def is_plain(self) -> bool:
        """True if scores are neither capped nor have sinks."""
        return self.softcap is None and self.sinks is None

    def probabilities(self, scores: Tensor, bias: Tensor) -> Tensor:
        """Return the probabilities of keys, which sum to less than 1 if there are sinks.

        `scores`: [..., H, queries, keys]. `bias`: added after the cap; -inf hides a key.
        """
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores, dtype = scores + bias, torch.promote_types(scores.dtype, torch.float32)
        if self.sinks is None:
            return torch.softmax(scores, dim=-1, dtype=dtype).to(scores.dtype)
        sinks = self.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1, dtype=dtype)[..., :-1].to(scores.dtype)


PLAIN = Softmax()


class Weighting(NamedTuple):
    """Terms by which an attention layer weights the values."""

    scale: float
    """factor of the scores before the softmax"""
    window: int | None = None
    """positions that each query sees, its own position included; None is all positions up to its own"""
    softmax: Softmax = PLAIN


class Bounds(NamedTuple):
    """Boundaries of the queries and keys of each sequence, for one call over many sequences."""

    cu_queries: Tensor
    """[n + 1] int32, cumulative, as is cu_keys"""
    cu_keys: Tensor
    max_queries: int
    max_keys: int


class PackedLayout:
    """Boundaries of a pack's sequences, computed once and used by every layer.

    `cu_seqlens`: [n + 1], cumulative lengths. `attend`: attention of one sequence, with the arguments of
    `causal_attention`, which is the default.
    """

    def __init__(
        self, cu_seqlens: Tensor, max_seqlen: int, share: ContextShare | None = None, attend: Attend | None = None
    ) -> None:
        self.cu_seqlens, self.max_seqlen = cu_seqlens.to(torch.int32), int(max_seqlen)
        self.share = share if share is not None and not share.is_whole else None
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
        lengths = torch.tensor(self.segment_lengths).T
        cu_queries, cu_keys = F.pad(lengths.cumsum(0), (0, 0, 1, 0)).to(torch.int32).T.contiguous()
        index = torch.cat([segment.keys for segment in self.share.segments])
        max_queries, max_keys = lengths.amax(0).tolist()
        device = self.cu_seqlens.device
        return index.to(device), Bounds(cu_queries.to(device), cu_keys.to(device), max_queries, max_keys)

    @cached_property
    def segment_lengths(self) -> tuple[list[int], list[int]]:
        """Numbers of queries and of keys of the share's segments."""
        assert self.share is not None
        queries = [segment.queries.stop - segment.queries.start for segment in self.share.segments]
        return queries, [len(segment.keys) for segment in self.share.segments]


LAYOUT: ContextVar[PackedLayout | None] = ContextVar("layout", default=None)
"""layout of the pack in the innermost `attention` block; many layers do not hand arguments on to their attention"""


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

    `query`: [1, H, T, D]. `key`: [1, K, T, D]. `value`: [1, K, T, width of values]. `attention_mask`: None; the layout
    replaces it. `scaling`: factor of the scores; default: 1 / sqrt(D). `dropout`: share of attention weights that is
    set to 0. `packed_layout`: boundaries of the sequences; default: those of the `attention` block. `**kwargs`: the
    model's further arguments. With `sliding_window` a token sees that many tokens, itself included. `softcap` and
    `s_aux` change the softmax. Returns [1, T, H, width of values], and None for the weights.
    """
    packed_layout = packed_layout or LAYOUT.get()
    if packed_layout is None:
        raise ConfigError(f"attention {PACKED!r} got no packed_layout: call compute_logits, or set another attention")
    softmax = Softmax.asked(kwargs)
    if dropout and (query.is_cuda or packed_layout.share is not None):
        raise ConfigError(f"attention dropout ({dropout}) is not supported on CUDA, nor with sp_size; set it to 0")
    share, window = packed_layout.share, kwargs.get("sliding_window")
    if window is not None and window >= packed_layout.max_seqlen:
        window = None
    is_flash = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    attend = partial(packed_layout.attend, scaling=scaling, window=window, dropout=dropout)
    if not softmax.is_plain:
        attend = partial(attend, softmax=softmax)
    if share is None and not is_flash:
        # one split replaces many slices, because the gradient of a slice is as long as the pack
        parts = zip(*(x.split(packed_layout.lengths, dim=2) for x in (query, key, value)), strict=True)
        return torch.cat([attend(q, k, v).transpose(1, 2) for q, k, v in parts], dim=1), None
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    if share is not None:
        if share.group is not None:
            k, v = share.gather_keys(torch.cat([k, v], dim=-1)).split([k.shape[-1], v.shape[-1]], dim=-1)
        index, bounds = packed_layout.segments
        k, v = select_rows(k, index), select_rows(v, index)
        if is_flash:
            return varlen(q, k, v, bounds, scaling, window, softmax)[None], None
        num_queries, num_keys = packed_layout.segment_lengths
        parts = zip(q.split(num_queries), k.split(num_keys), v.split(num_keys), strict=True)
        return torch.cat([_attend_segment(attend, *part) for part in parts])[None], None
    cu_seqlens, length = packed_layout.cu_seqlens, packed_layout.max_seqlen
    return varlen(q, k, v, Bounds(cu_seqlens, cu_seqlens, length, length), scaling, window, softmax)[None], None


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys the queries see, bool [num_queries, num_keys]; the last query belongs to the last key.

    `window`: keys that a query sees; None is all.
    """
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return mask if window is None else mask.triu(num_keys - num_queries - window + 1)


@contextmanager
def attention(config: PretrainedConfig, implementation: str, layout: PackedLayout | None = None) -> Iterator[None]:
    """Make models of `config` use this attention inside the block."""
    before, token = config._attn_implementation, LAYOUT.set(layout)
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before
        LAYOUT.reset(token)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None,
    window: int | None,
    softmax: Softmax = PLAIN,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention of one sequence, [1, H, queries, width of values]; the last query belongs to the last key.

    `q`: [1, H, queries, D]. `k`: [1, K, keys, D]. `v`: [1, K, keys, width of values]. `scaling`: factor of the scores;
    default: 1 / sqrt(D). `window`: keys that a query sees; None is all. `dropout`: share of attention weights that is
    set to 0.
    """
    if scaling is None:
        scaling = q.shape[-1] ** -0.5
    if not softmax.is_plain:
        return _attention_by_scores(q, k, v, scaling, window, softmax, dropout)
    width = v.shape[-1]
    q, k, v = of_one_width(q, k, v)
    num_queries, num_keys = q.shape[2], k.shape[2]
    is_plain = num_queries == num_keys and (window is None or window >= num_keys)
    mask = None if is_plain else causal_mask(num_queries, num_keys, window, q.device)
    is_grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_plain, scale=scaling, enable_gqa=is_grouped)
    return out if out.shape[-1] == width else out[..., :width]


def of_one_width(q: Tensor, k: Tensor, v: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors with zeros at the ends of narrower heads: most kernels take one width.

    `q`: [..., D]. `k`: [..., D]. `v`: [..., width of values].
    """
    width = max(q.shape[-1], v.shape[-1])
    width += -width % multiple
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    return q, k, v


def _attention_by_scores(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softmax: Softmax, dropout: float
) -> Tensor:
    """Return `causal_attention` from scores that are held in memory, QUERIES rows at a time."""
    outputs, stop = [], k.shape[2] - q.shape[2]
    for queries in q.split(QUERIES, dim=2):
        start, stop = stop, stop + queries.shape[2]
        first = 0 if window is None else max(0, start - window + 1)
        mask = causal_mask(stop - start, stop - first, window, q.device)
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
        keys, values = k[:, :, first:stop], v[:, :, first:stop]
        outputs.append(attention_of_scores(queries, keys, values, bias, scaling, softmax, dropout))
    return torch.cat(outputs, dim=2)


def attention_of_scores(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scaling: float, softmax: Softmax, dropout: float = 0.0
) -> Tensor:
    """Return attention [B, H, queries, width of values] from scores that are held in memory.

    `q`: [B, H, queries, D]. `k`: [B, K, keys, D]. `v`: [B, K, keys, width of values]. `bias`: added to the scores [B,
    H, queries, keys]; -inf hides a key. `dropout`: share of attention weights that is set to 0.
    """
    (size, heads, num, dim), key_heads = q.shape, k.shape[1]
    # the heads that share keys are rows of one product: keys are not repeated
    scores = q.reshape(size, key_heads, -1, dim) @ k.transpose(2, 3) * scaling
    probs = F.dropout(softmax.probabilities(scores.view(size, heads, num, -1), bias), dropout)
    return (probs.reshape(size, key_heads, -1, k.shape[2]) @ v).view(size, heads, num, -1)


def _attend_segment(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention [t, H, width of values] of a segment's queries [t, H, D] to its keys and values.

    Many queries are split, because a kernel with fewer queries than keys computes the scores of hidden keys, too.
    """
    num_earlier = len(k) - len(q)
    stops = range(min(QUERIES, len(q)), len(q), QUERIES) if num_earlier else ()
    outputs = []
    for start, stop in pairwise([0, *stops, len(q)]):
        rows = q[start:stop], k[: num_earlier + stop], v[: num_earlier + stop]
        # four axes: else torch keeps every probability for the backward pass
        outputs.append(attend(*(x.transpose(0, 1)[None] for x in rows))[0].transpose(0, 1))
    return torch.cat(outputs)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Bounds,
    scaling: float | None,
    window: int | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Compute attention of many sequences by one call of flash attention.

    `q`: [T, H, D]. `k`: [S, K, D]. `v`: [S, K, width of values]. `bounds`: boundaries of the sequences. The causal mask
    is aligned to the end of each sequence's keys. `scaling`: factor of the scores; default: 1 / sqrt(D). `window`:
    tokens that a token sees, itself included; default: all before it. Returns [T, H, width of values].
    """
    if softmax.softcap is not None:
        raise ConfigError(f"the model caps its attention scores ({softmax.softcap}), and flash attention does not")
    width = v.shape[-1]
    if scaling is None:
        scaling = q.shape[-1] ** -0.5
    if k.shape[1] != q.shape[1] and not TAKES_GROUPED_KEYS:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    q, k, v = of_one_width(q, k, v, multiple=8)
    if softmax.sinks is None:
        return _flash(q, k, v, bounds, scaling, window)[0][..., :width]
    out, lse = _flash(q, k, v, bounds, scaling, window, has_lse=True)
    lse = lse.detach()
    if torch.is_grad_enabled():  # the kernel has no gradient of the log-sum-exp: its value plus 0, with the gradient
        # d lse = scale * (sum_j p_j k_j) dq + scale * sum_j p_j q dk_j; the second sum is linear in the last argument
        mean = _flash(q.detach(), k.detach(), k, bounds, scaling, window)[0]
        linear = (scaling * (q * mean.detach() + q.detach() * mean).float()).sum(-1)
        lse = lse + linear - linear.detach()
    share = torch.sigmoid(lse - softmax.sinks.float())
    return (out[..., :width].float() * share[..., None]).to(out.dtype)


@cache
def use_flash_attention_3(device: torch.device) -> str:
    """Let all flash attention of this process run FlashAttention 3, if it can.

    Returns what runs, for the start report.
    """
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if not is_hopper or importlib.util.find_spec("flash_attn_interface") is None:
        reason = "the package flash_attn_3 is not installed" if is_hopper else "it needs a Hopper GPU, such as an H100"
        logger.warning("flash_attention_3=true: %s; torch's attention is used", reason)
        return f"torch's: {reason}"
    activate_flash_attention_impl("FA3")
    return "FlashAttention 3"


def _flash(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scaling: float, window: int | None, has_lse: bool = False
) -> tuple[Tensor, Tensor]:
    """Return flash attention [T, H, D] and, if it is asked for, the log-sum-exp of the scores, [T, H]."""
    options: dict[str, Any] = {"return_aux": AuxRequest(lse=True)} if has_lse else {}
    if k.shape[1] != q.shape[1]:
        options["enable_gqa"] = True
    before = -1 if window is None else window - 1
    found = varlen_attn(q, k, v, *bounds, window_size=(before, 0), scale=scaling, **options)
    out, lse = (found, q.new_empty(0)) if isinstance(found, Tensor) else found
    # the kernel's layout is [H, T], whatever its documentation says
    return out, lse.T if has_lse and lse.shape == (q.shape[1], q.shape[0]) else lse


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Return None: rlite's attention takes no mask. In a pack, the layout states which tokens belong together."""


def keep_out_of_compiled_code() -> None:
    """Let compiled layers call the attention as it is: torch.compile can trace neither its context nor its lengths."""
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))


# without a mask function: transformers would look for the ends of sequences in the positions, and wait for the device
AttentionInterface.register(PACKED, packed_attention)
