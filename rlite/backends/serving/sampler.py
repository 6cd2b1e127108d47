"""The sampler: the next token of each row of a batch, at once.

A row's token depends only on its logits, its request's seed and its position. The random number is a hash of seed and
position. The token is the inverse of the cumulative distribution at this number. Slot, batch and history do not matter.

Requests as every inference backend sees them: what ends them, why they are refused, and how they are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlite.algorithms.kept_ids import KeptIds
from rlite.backends.serving import native
from rlite.data.chat.stops import length_at_stop
from rlite.errors import RliteError
from rlite.nn.pretrained import load_tokenizer
from rlite.runtime.parallel.upload import upload
from rlite.types import MAX_KEPT_IDS, GenerationHyperparameters, SequenceRequest


class Sampling(NamedTuple):
    """Parameters by which the next token of one request is sampled."""

    gconfig: GenerationHyperparameters
    seed: int
    stop_ids: frozenset[int] = frozenset()
    """tokens that end the request"""
    is_early: bool = False
    """stop tokens may not be generated yet"""
    has_kept_ids: bool = False
    """the request asks for kept ids"""

    @property
    def banned_ids(self) -> frozenset[int]:
        """Tokens that may not be generated yet."""
        return self.stop_ids if self.is_early else frozenset()


def num_left(request: SequenceRequest, max_model_len: int) -> int:
    """Return the number of tokens that a request may still generate."""
    num_done = len(request.output_ids)
    return min(request.gconfig.max_new_tokens - num_done, max_model_len - len(request.input_ids) - num_done)


def objection(request: SequenceRequest, max_model_len: int, vocab_size: int, default: str = "") -> str | None:
    """Return the reason why no backend can serve a request, None if one can.

    `max_model_len`: longest sequence in tokens.
    """
    ids = [*request.input_ids, *request.output_ids]
    if not request.input_ids:
        return "the prompt is empty; give at least one token"
    if len(ids) < max_model_len and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        return f"token id {wrong} is not in the vocabulary of {vocab_size}"
    return length_objection(len(ids), max_model_len, default)


def length_objection(num_tokens: int, max_model_len: int, default: str = "") -> str | None:
    """Return the reason why a prompt is too long, None if it is not.

    `max_model_len`: longest sequence in tokens.
    """
    limit = f"max_model_len={max_model_len}{default} leaves room for {max_model_len - 1}"
    return None if num_tokens < max_model_len else f"the prompt has {num_tokens} tokens, {limit}"


@dataclass
class RequestRules:
    """Rules of a backend that searches for stop tokens and stop strings itself."""

    path: str
    """folder of the checkpoint, for its tokenizer"""
    vocab_size: int
    max_model_len: int
    """longest sequence, in tokens"""
    end_ids: frozenset[int]
    """the model's own end tokens"""
    default: str = ""
    """explains `max_model_len` if it is not the user's"""
    agreed: Callable[[list[bool]], list[bool]] = list
    """returns for each flag whether it is set on all ranks"""

    def stop_ids(self, gconfig: GenerationHyperparameters) -> frozenset[int]:
        """Return the tokens that end a completion."""
        return frozenset(gconfig.stop_token_ids).union(() if gconfig.ignore_eos else self.end_ids)

    def objection(self, request: SequenceRequest) -> str | None:
        """Return the reason why a request cannot be served, None if it can."""
        gconfig = request.gconfig
        if (error := objection(request, self.max_model_len, self.vocab_size, self.default)) is not None:
            return error
        if gconfig.min_new_tokens and self.stop_ids(gconfig).issuperset(range(self.vocab_size)):
            return f"min_new_tokens={gconfig.min_new_tokens}, and every token is a stop token: none may be made"
        if gconfig.stop and isinstance(self._tokenizer, str):
            return f"stop strings need a tokenizer; {self.path} has none ({self._tokenizer}). Use stop_token_ids"
        return None

    def length_at_stop(self, request: SequenceRequest, tokens: Sequence[int], start: int, begin: int = 0) -> int | None:
        """Return the length in tokens at which a completion first contains a stop string, None if it contains none."""
        return length_at_stop(self._tokenizer, tokens, request.gconfig.stop, start, begin)

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer, or the reason why there is none. All ranks have one only if every rank could read it."""
        tokenizer, problem = None, "another rank could not read it"
        try:
            tokenizer = load_tokenizer(self.path)
        except RliteError as error:  # only stop strings cannot do without
            problem = str(error)
        (is_everywhere,) = self.agreed([tokenizer is not None])
        return tokenizer if is_everywhere else problem


CACHED_ELEMENTS = 1 << 18
"""logits that are sampled at a time on CPU: 1 MiB of float32"""
SEGMENT = 128
"""tokens per segment of a long cumulative sum; only the segment of the sampled token is summed token by token"""


@dataclass(frozen=True, kw_only=True)
class RowFilter:
    """Rows whose distribution is truncated before sampling."""

    rows: Tensor
    """[rows] indices into the batch"""
    top_k: Tensor
    """[rows, 1]; the vocabulary size if top-k is off"""
    top_p: Tensor
    """[rows, 1]; 1 if top-p is off"""
    is_nucleus: bool
    """true if some row has a top_p below 1"""
    banned: Tensor | None
    """[rows, vocabulary] of bool: tokens that may not be generated yet"""
    max_kept: Tensor | None
    """[rows, 1]: MAX_KEPT_IDS for a row whose kept ids are asked for, else the vocabulary size; None if there is no
    such row"""
    reported: Tensor
    """[reported] indices into the rows of the filter whose kept ids are asked for"""
    temperature: Tensor
    """[reported, 1]"""


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """Sampling parameters of a batch as tensors, reused while the composition of the batch stays the same."""

    inverse_temperature: Tensor | None
    """[rows, 1]; None if all are 1"""
    is_greedy: Tensor
    """[rows] of bool"""
    all_greedy: bool
    any_greedy: bool
    seeds: Tensor
    """[rows] of int64"""
    stop_ids: Tensor | None
    """[rows, ids], padded with -1; None if no row has stop tokens"""
    filter: RowFilter | None

    @classmethod
    def of(cls, rows: Sequence[Sampling], vocab_size: int, device: torch.device) -> SamplingBatch:
        """Return the parameters of a batch."""
        greedy = [row.gconfig.greedy for row in rows]
        inverse = [1.0 if row.gconfig.greedy else 1.0 / row.gconfig.temperature for row in rows]
        width = max((len(row.stop_ids) for row in rows), default=0)
        table = [[*row.stop_ids, *[-1] * (width - len(row.stop_ids))] for row in rows]
        return cls(
            inverse_temperature=_column(inverse, device) if any(i != 1.0 for i in inverse) else None,
            is_greedy=upload(greedy, device),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            seeds=upload([_signed(row.seed) for row in rows], device, torch.int64),
            stop_ids=upload(table, device) if width else None,
            filter=_filter_of(rows, vocab_size, device),
        )


def _filter_of(batch: Sequence[Sampling], vocab_size: int, device: torch.device) -> RowFilter | None:
    def is_cut(row: Sampling) -> bool:
        g = row.gconfig
        return not g.greedy and (0 < g.top_k < vocab_size or g.top_p < 1)

    places = [place for place, row in enumerate(batch) if is_cut(row) or row.banned_ids]
    if not places:
        return None
    rows = [batch[place] for place in places]
    # a greedy row takes the most likely token with any top_k and top_p
    cut = [row.gconfig if is_cut(row) else GenerationHyperparameters() for row in rows]
    banned = None
    if any(row.banned_ids for row in rows):
        banned = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device="cpu")
        for place, row in enumerate(rows):
            banned[place, [t for t in row.banned_ids if 0 <= t < vocab_size]] = True
    is_told = [row.has_kept_ids and is_cut(row) for row in rows]
    max_kept = [MAX_KEPT_IDS if told else vocab_size for told in is_told]
    return RowFilter(
        rows=upload(places, device),
        top_k=_column([min(g.top_k, vocab_size) if g.top_k > 0 else vocab_size for g in cut], device),
        top_p=_column([g.top_p for g in cut], device),
        is_nucleus=any(g.top_p < 1 for g in cut),
        banned=None if banned is None else upload(banned, device),
        max_kept=_column(max_kept, device) if any(is_told) else None,
        reported=upload(list(compress(count(), is_told)), device, torch.int64),
        temperature=_column([row.gconfig.temperature for row in compress(rows, is_told)], device),
    )


def _column(values: list[Any], device: torch.device) -> Tensor:
    return upload(values, device)[:, None]


class Sampled(NamedTuple):
    """One sampled token per row."""

    tokens: Tensor
    """[rows]"""
    logprobs: Tensor
    """[rows], at the row's temperature"""
    sampling_logprobs: Tensor
    """[rows], under the truncated distribution"""
    kept: Tensor | None = None
    """[pairs, 2]: (row, token id) of the kept ids of the rows that report them, in order; None if no row does"""


def sample(logits: Tensor, batch: SamplingBatch, uniform: Tensor) -> Sampled:
    """Sample one token per row.

    A row with NaN or +inf among its logits gets an arbitrary token with log-probability NaN.

    `logits`: `[rows, vocabulary]` of any dtype. `uniform`: random numbers in [0, 1), `[rows]`. Returns the tokens,
    their log-probabilities and kept ids.
    """
    rows, vocab_size = logits.shape
    # on CPU as many rows at a time as stay in the processor's cache: each is read several times
    num = max(1, CACHED_ELEMENTS // vocab_size) if logits.device.type == "cpu" else rows
    spans = [slice(start, start + num) for start in range(0, rows, num)]
    parts = [_draw(_scaled(logits, batch, s), uniform[s], batch, batch.is_greedy[s]) for s in spans]
    tokens, taken = parts[0] if len(parts) == 1 else (torch.cat(p) for p in zip(*parts, strict=True))
    if (cut := batch.filter) is None:
        return Sampled(tokens, taken, taken)
    logprobs = torch.log_softmax(_scaled(logits, batch, cut.rows), dim=-1)
    left = _keep(logprobs, cut)
    chosen, taken_of_cut = _draw(left, uniform[cut.rows], batch, batch.is_greedy[cut.rows])
    kept = None
    if cut.max_kept is not None:
        kept, over_kept = _report(logits, left, chosen, cut)
        taken_of_cut = taken_of_cut.index_copy(0, cut.reported, over_kept)
    logprobs = taken.index_copy(0, cut.rows, logprobs.gather(1, chosen[:, None])[:, 0])
    sampling_logprobs = taken.index_copy(0, cut.rows, taken_of_cut)
    return Sampled(tokens.index_copy(0, cut.rows, chosen), logprobs, sampling_logprobs, kept)


def sample_each(logits: Tensor, batches: Sequence[SamplingBatch], uniform: Tensor) -> Sampled:
    """Return the results of `sample`, computed one row at a time.

    `logits`: `[rows, vocabulary]`. `uniform`: random numbers in [0, 1), `[rows]`.
    """
    parts = [sample(logits[r : r + 1], batch, uniform[r : r + 1]) for r, batch in enumerate(batches)]
    columns = zip(*(part[:3] for part in parts), strict=True)
    tokens, logprobs, sampling_logprobs = (torch.cat(column) for column in columns)
    kept = [part.kept + part.kept.new_tensor([r, 0]) for r, part in enumerate(parts) if part.kept is not None]
    return Sampled(tokens, logprobs, sampling_logprobs, torch.cat(kept) if kept else None)


def kept_ids_of(kept: Tensor | None, num_rows: int) -> list[list[int]]:
    """Return the kept ids of each row; [] for a row that reports none."""
    if kept is None:
        return [[]] * num_rows
    counts = torch.bincount(kept[:, 0], minlength=num_rows)
    return [ids.tolist() for ids in kept[:, 1].cpu().split(counts.tolist())]


def _report(logits: Tensor, left: Tensor, tokens: Tensor, cut: RowFilter) -> tuple[Tensor, Tensor]:
    """Return the kept ids of the reported rows, and their tokens' log-probabilities over them, with the trainer's bits.

    `logits`: `[batch, vocabulary]`. `left`: log-probabilities of the filter's rows with removed tokens at -inf, `[rows,
    vocabulary]`. `tokens`: sampled tokens of the filter's rows, `[rows]`. Returns (row of the batch, token id) of each
    kept id, `[pairs, 2]`; log-probabilities `[reported]`.
    """
    rows = cut.rows[cut.reported]
    scaled = logits[rows].float() / cut.temperature  # as the trainer does, not times the inverse
    own, ids = left[cut.reported].isfinite().nonzero().unbind(1)
    kept = KeptIds.of(own, ids, len(rows))
    log_sums = kept.log_sums(scaled[kept.rows, kept.ids])
    logprobs = scaled.gather(1, tokens[cut.reported][:, None])[:, 0] - log_sums
    return torch.stack([rows[own], ids], dim=1), logprobs.to(scaled.dtype)


def _scaled(logits: Tensor, batch: SamplingBatch, rows: slice | Tensor) -> Tensor:
    some = logits[rows].float()
    return some if batch.inverse_temperature is None else some * batch.inverse_temperature[rows]


def _draw(logits: Tensor, uniform: Tensor, batch: SamplingBatch, is_greedy: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens and their log-probabilities, without a softmax and without the whole of a long cumulative sum."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and native.compiled() is not None:
        return native.draw(logits, uniform, is_greedy)
    vocab_size = logits.shape[-1]
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp_()
    width = SEGMENT if vocab_size > 8 * SEGMENT else vocab_size
    if vocab_size % width:
        weights = F.pad(weights, (0, -vocab_size % width))
    segments = weights.view(len(weights), -1, width)
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


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the index [rows, 1] of the first cumulative sum above the target.

    The increment at this index is positive.
    """
    last = cumulative[:, -1:]
    # rounding must not carry the target to the last: what is found there could be of probability zero
    return torch.searchsorted(cumulative, torch.minimum(target, last.nextafter(torch.zeros_like(last))), right=True)


def _keep(logprobs: Tensor, cut: RowFilter) -> Tensor:
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
    if cut.max_kept is not None:
        gone = gone | (rank >= cut.max_kept)
    return logprobs.masked_fill(torch.zeros_like(gone).scatter(1, order, gone), float("-inf"))


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return random numbers in [0, 1), float32 with 24 random bits: splitmix64 of seed and position.

    Seeds and positions are broadcast together.
    """
    state = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    return _shift(state, 40).to(torch.float32) * 2.0**-24


def _signed(value: int) -> int:
    """Return the low 64 bits of `value` as a two's complement number."""
    return (value + 2**63) % 2**64 - 2**63


def _shift(x: Tensor, bits: int) -> Tensor:
    """Return the logical shift to the right; torch's own operator keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Return the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


_GOLDEN = _signed(0x9E3779B97F4A7C15)
