"""Sampling for a whole batch at once.

A row's token depends only on its logits, its request's seed and its position. The random number is a hash of seed and
position. The token is the inverse of the cumulative distribution at this number. Slot, batch and history do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rlite.types import GenerationHyperparameters

CACHED_ELEMENTS = 1 << 18
"""logits that are sampled at a time on CPU: 1 MiB of float32"""
SEGMENT = 128
"""tokens per segment of a long cumulative sum; only the segment of the sampled token is summed token by token"""


@dataclass(frozen=True, kw_only=True)
class RowFilter:
    """Rows whose distribution is truncated before sampling."""

    rows: torch.Tensor
    """[rows] indices into the batch"""
    top_k: torch.Tensor
    """[rows, 1]; the vocabulary size if top-k is off"""
    top_p: torch.Tensor
    """[rows, 1]; 1 if top-p is off"""
    is_nucleus: bool
    """whether some row has a top_p below 1"""
    banned: torch.Tensor | None
    """[rows, vocabulary] of bool: tokens that may not be generated yet"""


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """Sampling parameters of a batch as tensors, reused while the composition of the batch stays the same."""

    inverse_temperature: torch.Tensor | None
    """[rows, 1]; None if all are 1"""
    is_greedy: torch.Tensor
    """[rows] of bool"""
    all_greedy: bool
    any_greedy: bool
    seeds: torch.Tensor
    """[rows] of int64"""
    stop_ids: torch.Tensor | None
    """[rows, ids], padded with -1; None if no row has stop tokens"""
    filter: RowFilter | None

    @classmethod
    def of(
        cls,
        gconfigs: Sequence[GenerationHyperparameters],
        seeds: Sequence[int],
        stop_ids: Sequence[frozenset[int]],
        is_early: Sequence[bool],
        vocab_size: int,
        device: torch.device,
    ) -> SamplingBatch:
        """Return the parameters of a batch.

        Args:
            gconfigs: generation parameters of each row.
            seeds: seed of each row.
            stop_ids: stop tokens of each row.
            is_early: True for rows that may not generate a stop token yet.
            vocab_size: size of the vocabulary.
            device: device of the tensors.
        """
        greedy = [g.greedy for g in gconfigs]
        inverse = [1.0 if g.greedy else 1.0 / g.temperature for g in gconfigs]
        width = max(len(ids) for ids in stop_ids)
        table = [[*ids, *[-1] * (width - len(ids))] for ids in stop_ids]
        return cls(
            inverse_temperature=(
                torch.tensor(inverse, device=device)[:, None] if any(i != 1.0 for i in inverse) else None
            ),
            is_greedy=torch.tensor(greedy, device=device),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            seeds=torch.tensor([_signed(s) for s in seeds], dtype=torch.int64, device=device),
            stop_ids=torch.tensor(table, device=device) if width else None,
            filter=_filter_of(gconfigs, stop_ids, is_early, vocab_size, device),
        )


def _filter_of(
    gconfigs: Sequence[GenerationHyperparameters],
    stop_ids: Sequence[frozenset[int]],
    is_early: Sequence[bool],
    vocab_size: int,
    device: torch.device,
) -> RowFilter | None:
    def has_cut(g: GenerationHyperparameters) -> bool:
        return not g.greedy and (0 < g.top_k < vocab_size or g.top_p < 1)

    rows = [r for r, g in enumerate(gconfigs) if has_cut(g) or (is_early[r] and stop_ids[r])]
    if not rows:
        return None
    # a greedy row takes the most likely token whatever its top_k and top_p
    cut = [gconfigs[r] if has_cut(gconfigs[r]) else GenerationHyperparameters() for r in rows]
    top_k = [min(g.top_k, vocab_size) if g.top_k > 0 else vocab_size for g in cut]
    top_p = [g.top_p for g in cut]
    banned = None
    if any(is_early[r] and stop_ids[r] for r in rows):
        banned = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device="cpu")
        for i, r in enumerate(rows):
            if is_early[r]:
                banned[i, [t for t in stop_ids[r] if 0 <= t < vocab_size]] = True
        banned = banned.to(device)
    return RowFilter(
        rows=torch.tensor(rows, device=device),
        top_k=torch.tensor(top_k, device=device)[:, None],
        top_p=torch.tensor(top_p, device=device)[:, None],
        is_nucleus=any(p < 1 for p in top_p),
        banned=banned,
    )


def sample(
    logits: torch.Tensor, batch: SamplingBatch, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample one token per row.

    A row with NaN or +inf among its logits gets an arbitrary token with log-probability NaN.

    Args:
        logits: `[rows, vocabulary]` of any dtype.
        batch: sampling parameters of the rows.
        uniform: random numbers in [0, 1), `[rows]`.

    Returns:
        Tokens, their log-probabilities at the row's temperature, and their log-probabilities under the truncated
            distribution; `[rows]` each.
    """
    rows, vocab_size = logits.shape
    # on CPU as many rows at a time as stay in the processor's cache: each is read several times
    num = max(1, CACHED_ELEMENTS // vocab_size) if logits.device.type == "cpu" else rows
    spans = [slice(start, start + num) for start in range(0, rows, num)]
    parts = [_draw(_scaled(logits, batch, s), uniform[s], batch, batch.is_greedy[s]) for s in spans]
    tokens, taken = parts[0] if len(parts) == 1 else (torch.cat(p) for p in zip(*parts, strict=True))
    if (cut := batch.filter) is None:
        return tokens, taken, taken
    logprobs = torch.log_softmax(_scaled(logits, batch, cut.rows), dim=-1)
    chosen, taken_of_cut = _draw(_keep(logprobs, cut), uniform[cut.rows], batch, batch.is_greedy[cut.rows])
    return (
        tokens.index_copy(0, cut.rows, chosen),
        taken.index_copy(0, cut.rows, logprobs.gather(1, chosen[:, None])[:, 0]),
        taken.index_copy(0, cut.rows, taken_of_cut),
    )


def _scaled(logits: torch.Tensor, batch: SamplingBatch, rows: slice | torch.Tensor) -> torch.Tensor:
    some = logits[rows].float()
    return some if batch.inverse_temperature is None else some * batch.inverse_temperature[rows]


def _draw(
    logits: torch.Tensor, uniform: torch.Tensor, batch: SamplingBatch, is_greedy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and their log-probabilities, without a softmax and without the whole of a long cumulative sum."""
    vocab_size = logits.shape[-1]
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp_()
    width = SEGMENT if vocab_size > 8 * SEGMENT else vocab_size
    if vocab_size % width:
        weights = F.pad(weights, (0, -vocab_size % width))
    segments = weights.view(weights.shape[0], -1, width)
    sums = segments.sum(dim=-1).cumsum(dim=-1)
    total = sums[:, -1:]
    if batch.all_greedy:
        tokens = logits.argmax(dim=-1, keepdim=True)
    else:
        # the segment in which the cumulative sum passes the target, then the token within it
        target = uniform[:, None] * total
        segment = _first_above(sums, target).clamp_(max=sums.shape[-1] - 1)  # NaN is found beyond the last
        before = sums.gather(1, (segment - 1).clamp_(min=0)) * (segment > 0)
        inside = segments.gather(1, segment[..., None].expand(-1, -1, width))[:, 0]
        tokens = (segment * width + _first_above(inside.cumsum(dim=-1) + before, target)).clamp_(max=vocab_size - 1)
        if batch.any_greedy:
            tokens = torch.where(is_greedy[:, None], logits.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], (weights.gather(1, tokens).log_() - total.log())[:, 0]


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the index [rows, 1] of the first cumulative sum above the target.

    The increment at this index is positive.
    """
    last = cumulative[:, -1:]
    # rounding must not carry the target to the last: what is found there could be of probability zero
    return torch.searchsorted(cumulative, torch.minimum(target, last.nextafter(torch.zeros_like(last))), right=True)


def _keep(logprobs: torch.Tensor, cut: RowFilter) -> torch.Tensor:
    """Return log-probabilities with bans, top-k and top-p applied: removed tokens are -inf.

    Top-p applies to the distribution that bans and top-k leave.
    """
    if cut.banned is not None:
        logprobs = logprobs.masked_fill(cut.banned, float("-inf"))
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    gone = rank >= cut.top_k
    if cut.is_nucleus:
        probs = ordered.masked_fill(gone, float("-inf")).softmax(dim=-1)
        # a token stays if those before it do not reach top_p: the first always does
        gone = gone | ((probs.cumsum(dim=-1) - probs >= cut.top_p) & (cut.top_p < 1))
    return logprobs.masked_fill(torch.zeros_like(gone).scatter(1, order, gone), float("-inf"))


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return random numbers in [0, 1), float32 with 24 random bits: splitmix64 of seed and position.

    Seeds and positions are broadcast together.
    """
    state = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    return _shift(state, 40).to(torch.float32) * 2.0**-24


def _signed(value: int) -> int:
    """Return the low 64 bits of `value` as a two's complement number."""
    return (value + 2**63) % 2**64 - 2**63


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the logical shift to the right; torch's own operator keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Return the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


_GOLDEN = _signed(0x9E3779B97F4A7C15)
