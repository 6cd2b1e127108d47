"""Log-probabilities of tokens: the form in which losses read them, and a softmax that never sees the whole vocabulary.

A loss that reads log-probabilities and entropies, and no logits, is an `OnLogprobs`: no rank has to hold the logits of
a pack. They are computed over blocks of columns (tensor-parallel ranks, tiles). With x = logits / temperature, four
statistics of a block are enough, and the statistics of two blocks determine those of both together:

    greatest m = max_v x_v    total s = sum_v exp(x_v - m)    moment t = sum_v exp(x_v - m) (x_v - m)    label x_l
    log p_l = x_l - m - log s         d/dx_v = [v = l] - p_v
    H = log s - t / s                 d/dx_v = -p_v (log p_v + H)

(m and s: "Online normalizer calculation for softmax", arXiv:1805.02867.)

Compare two policies by the log-probabilities of sampled tokens: estimates of the KL, and importance weights.

D = logprobs - ref_logprobs (John Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html):
k1 = D (unbiased), k2 = D^2 / 2 (biased, low variance), k3 = exp(-D) - 1 + D (unbiased, low variance, >= 0).
As a loss, only k2 has the gradient of the KL in expectation. `straight_through` gives any estimator this gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rlite.algorithms.reduce import finite_gradient, masked_mean, one_of, sequence_means, sequence_sums, to_tokens
from rlite.algorithms.shapes import CuSeqlens, Mask, Tokens
from rlite.errors import ConfigError
from rlite.types import KLEstimator


class _Pair(NamedTuple):
    logprobs: Float[Tensor, " tokens"]
    """log p(next token) under softmax(logits / temperature); without a meaning at a sequence's last position. If the
    pack has kept ids of the token, p is normalised over them"""
    entropy: Float[Tensor, " tokens"]
    """entropy of softmax(logits / temperature) over the vocabulary, in nats"""


class TokenLogprobs(_Pair):
    """The policy's log-probability and entropy at every position of a pack, for the token that follows."""

    _full: Tensor | None = None

    def __new__(cls, logprobs: Tensor, entropy: Tensor, full_logprobs: Tensor | None = None) -> Self:
        """Return the pair (logprobs, entropy), with `full_logprobs` as an attribute.

        `logprobs`: log-probabilities, `[T]`. `entropy`: entropies, `[T]`. `full_logprobs`: log-probabilities in the
        whole vocabulary, `[T]`; None if they are the same.
        """
        self = super().__new__(cls, logprobs, entropy)
        self._full = full_logprobs
        return self

    @property
    def full_logprobs(self) -> Float[Tensor, " tokens"]:
        """Return log p(next token) in the whole vocabulary, `[T]`, as a KL to another policy needs it."""
        return self.logprobs if self._full is None else self._full


class OnLogprobs(ABC):
    """A loss_fn or post_hook whose first argument is a `TokenLogprobs` instead of logits `[T, V]`.

    The engine never holds the logits of a whole pack. It computes log-probabilities in blocks of the vocabulary,
    forward and backward. Subclass it, or decorate a function with `on_logprobs`.
    """

    temperature: float = 1.0
    """divisor of the logits"""
    records_routing: ClassVar[bool] = False
    """true to get `routed_experts` of the forward pass among the pack's keys"""

    @abstractmethod
    def __call__(self, tokens: TokenLogprobs, data: dict[str, Any]) -> Any:
        """Return the result of a loss_fn or post_hook.

        `tokens`: log-probabilities and entropies, `[T]`.
        """

    def positions(self, data: Mapping[str, Any]) -> Bool[Tensor, " tokens"] | None:
        """Return the positions that the loss reads; None for all positions.

        At other positions values may be 0, which saves work.

        Args:
            data: the pack's keys, on the CPU.
        """
        return None


def next_token(
    x: Shaped[Tensor, "tokens *rest"], cu_seqlens: CuSeqlens | None = None, fill: float = 0
) -> Shaped[Tensor, "tokens *rest"]:
    """Return values shifted by one position to the left inside each sequence.

    The shift aligns a token's values (ids, masks, rewards, the sampler's log-probabilities) with the position whose
    logits predict the token.

    Args:
        x: values, packed `[T, ...]` with `cu_seqlens`, or padded `[B, L]` without.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
        fill: value at each sequence's last position.
    """
    shifted = x.roll(-1, dims=1 if cu_seqlens is None else 0)
    if cu_seqlens is None:
        shifted[:, -1:] = fill
    elif len(x):
        # an empty sequence at the front points at -1, the last position of all, which is filled anyway
        shifted.index_fill_(0, cu_seqlens[1:].long() - 1, fill)  # an assignment would copy `fill` to the device
    return shifted


def previous_token(
    x: Shaped[Tensor, "tokens *rest"], cu_seqlens: CuSeqlens | None = None, fill: float = 0
) -> Shaped[Tensor, "tokens *rest"]:
    """Return values shifted by one position to the right inside each sequence, the inverse of `next_token`.

    The shift moves values computed at the position that predicts a token, such as its log-probability, to the token
    itself.

    Args:
        x: values, packed `[T, ...]` with `cu_seqlens`, or padded `[B, L]` without.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
        fill: value at each sequence's first position.
    """
    shifted = x.roll(1, dims=1 if cu_seqlens is None else 0)
    if cu_seqlens is None:
        shifted[:, :1] = fill
    elif len(x):
        starts = cu_seqlens[:-1].long()
        # an empty sequence at the end points at T, which does not exist; position 0 is filled anyway
        shifted.index_fill_(0, torch.where(starts < len(x), starts, 0), fill)
    return shifted


def check_temperature(temperature: float) -> float:
    """Return the temperature."""
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature}: expected a positive number (greedy sampling has temperature 1)")
    return float(temperature)


# -- softmax over blocks of columns --

Statistics = Float[Tensor, "4 rows"]
"""m, s, t and x_l of each row"""
Rows = Float[Tensor, " rows"]
Block = Float[Tensor, "rows columns"]
_LEAST = -1e4
"""stands for a logarithm of 0: its exponential is 0, and times 0 it is 0"""


def block_statistics(logits: Block, labels: Int[Tensor, " rows"], temperature: float) -> Statistics:
    """Return m, s, t and x_l of a block of columns, in float32 (float64 for float64 logits).

    `logits`: a block of columns, `[rows, columns]`. `labels`: token ids, counted from the block's first column,
    `[rows]`. x_l is -inf for a label in another block.
    """
    x = scaled(logits, temperature)
    if x.shape[-1] == 0:
        return no_statistics(labels, x.dtype)
    greatest = x.amax(-1).clamp(min=torch.finfo(x.dtype).min)
    z = (x - greatest[:, None]).clamp_(min=_LEAST)
    exponentials = z.exp()
    is_here = (labels >= 0) & (labels < x.shape[-1])
    label = x.gather(-1, labels.clamp(0, x.shape[-1] - 1)[:, None])[:, 0].where(is_here, -torch.inf)
    return torch.stack([greatest, exponentials.sum(-1), z.mul_(exponentials).sum(-1), label])


def no_statistics(labels: Int[Tensor, " rows"], dtype: torch.dtype) -> Statistics:
    """Return the statistics of a block without columns."""
    values = torch.finfo(dtype).min, 0, 0, -torch.inf
    return torch.stack([labels.new_full(labels.shape, value, dtype=dtype) for value in values])


def merge(first: Statistics, second: Statistics) -> Statistics:
    """Return the statistics of two blocks together."""
    greatest, label = torch.maximum(first[0], second[0]), torch.maximum(first[3], second[3])
    totals = [moved(statistics, greatest) for statistics in (first, second)]
    return torch.stack([greatest, *(totals[0] + totals[1]), label])


def logprobs_and_entropy(statistics: Statistics) -> tuple[Rows, Rows, Rows]:
    """Return log p_l, H and log sum_v exp(x_v) of rows from the statistics of all their columns."""
    greatest, total, moment, label = statistics
    log_total = total.log()
    return label - greatest - log_total, log_total - moment / total, greatest + log_total


def block_gradient(
    logits: Block,
    labels: Int[Tensor, " rows"],
    temperature: float,
    log_sums: Rows,
    entropies: Rows,
    grad_logprobs: Rows,
    grad_entropies: Rows | None,
) -> Block:
    """Return the gradient with respect to a block of logits, in the dtype of its statistics.

    `logits`: a block of columns, `[rows, columns]`. `labels`: token ids, counted from the block's first column,
    `[rows]`. `log_sums`: log sum_v exp(x_v) over all columns, `[rows]`. `entropies`: H of the rows, `[rows]`.
    `grad_logprobs`: gradient with respect to log p_l, `[rows]`. `grad_entropies`: gradient with respect to H, `[rows]`;
    None is 0.
    """
    grad_logprobs = grad_logprobs[:, None] / temperature
    log_p = (scaled(logits, temperature) - log_sums[:, None]).clamp_(min=_LEAST)
    if grad_entropies is None:
        out = log_p.exp_().mul_(-grad_logprobs)
    else:
        p = log_p.exp()
        slope = (grad_entropies / -temperature)[:, None]
        out = log_p.add_(entropies[:, None]).mul_(slope).sub_(grad_logprobs).mul_(p)
    if out.shape[-1] == 0:
        return out
    is_here = (labels >= 0) & (labels < out.shape[-1])
    return out.scatter_add_(-1, labels.clamp(0, out.shape[-1] - 1)[:, None], grad_logprobs * is_here[:, None])


def moved(statistics: Tensor, greatest: Tensor) -> Tensor:
    """Return s and t `[2, rows]` for another m, which must not be less than the present m."""
    shift = (statistics[0] - greatest).clamp_(min=_LEAST)
    return torch.stack([statistics[1], statistics[2] + statistics[1] * shift]) * shift.exp()


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature in float32 (float64 for float64 logits)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature


Scope = Literal["token", "sequence"]
MAX_LOG_RATIO = 20.0
"""bound of a log ratio; the square of its exponential is finite in float32"""


def kl_penalty(
    logprobs: Tokens,
    ref_logprobs: Tokens,
    estimator: KLEstimator = "k1",
    *,
    straight_through: bool = False,
    weights: Tokens | None = None,
    max_log_ratio: float | None = 20.0,
    max_value: float | None = 10.0,
) -> Tokens:
    """Return an estimate of KL(policy || reference) at each token, differentiable in both arguments.

    Args:
        logprobs: log-probabilities under the policy, `[T]` or `[B, L]`.
        ref_logprobs: log-probabilities under the reference.
        estimator: "k1", "abs" (|k1|), "k2" or "k3". As a loss k1 needs `straight_through`: its own gradient, the
            gradient of log pi, is 0 in expectation.
        straight_through: give the estimate the gradient of k2.
        weights: importance weights of the policy over the policy that sampled. They multiply the straight-through
            gradient but not the value, so tokens of an older policy give the gradient of this policy's KL.
            DeepSeek-V3.2 (arXiv:2512.02556) weights both, by a ratio that carries its gradient. For this form, multiply
            the result.
        max_log_ratio: bound of |D| in the exponential of k3, beyond which there is no gradient; None sets no bound.
        max_value: bound of k3, beyond which there is no gradient; None sets no bound.

    Raises:
        ConfigError: the estimator is unknown.
    """
    one_of(KLEstimator, estimator, f"KL estimator {estimator!r}")
    log_ratio = finite_gradient(logprobs - ref_logprobs, weights)
    value = _k3(log_ratio, max_log_ratio, max_value) if estimator == "k3" else _ESTIMATE[estimator](log_ratio)
    if not straight_through:
        return value
    gradient = _k2(log_ratio) if weights is None else weights.detach() * _k2(log_ratio)
    return gradient + (value - gradient).detach()


@torch.no_grad()
def importance_weights(
    logprobs: Tokens,
    sampler_logprobs: Tokens,
    mask: Mask,
    *,
    upper: float = 2.0,
    lower: float | None = None,
    scope: Scope = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    batch_normalize: bool = False,
    max_log_ratio: float = MAX_LOG_RATIO,
    cu_seqlens: CuSeqlens | None = None,
) -> Tokens:
    """Return w = exp(logprobs - sampler_logprobs), bounded.

    Args:
        logprobs: log-probabilities under the trainer's policy, `[T]` or `[B, L]`.
        sampler_logprobs: log-probabilities under the policy that the inference engine sampled from.
        mask: tokens that count.
        upper: upper bound of w.
        lower: lower bound of w; None sets no bound.
        scope: "token", or "sequence" for the product over the sequence.
        mode: "truncate" clamps w to the bounds (Ionides 2008; TIS for the engine mismatch, Yao et al. 2025); "mask"
            makes w 0 outside of them (IcePop, Ling team 2025).
        batch_normalize: divide by the mean weight of the tokens (or of the sequences).
        max_log_ratio: bound of |log w| before the exponential.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
    """
    log_ratio = logprobs - sampler_logprobs
    if scope == "sequence":
        log_ratio = to_tokens(sequence_sums(log_ratio, mask, cu_seqlens), mask, cu_seqlens)
    weights = log_ratio.clamp(-max_log_ratio, max_log_ratio).exp()
    if mode == "truncate":
        weights = weights.clamp(min=lower, max=upper)
    else:
        weights = torch.where((weights <= upper) & (weights >= (lower or 0.0)), weights, 0.0)
    weights = torch.where(mask.bool(), weights, 0.0)
    if not batch_normalize:
        return weights
    if scope == "token":
        return weights / masked_mean(weights, mask).clamp(min=1e-8)
    means = sequence_means(weights, mask, cu_seqlens)
    return weights / masked_mean(means, is_occupied(mask, cu_seqlens)).clamp(min=1e-8)


def is_occupied(mask: Mask, cu_seqlens: CuSeqlens | None) -> Bool[Tensor, " sequences"]:
    """Return whether a sequence has a token in the mask."""
    return sequence_sums(torch.ones_like(mask, dtype=torch.float32), mask, cu_seqlens) > 0


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor, max_log_ratio: float | None, max_value: float | None) -> Tensor:
    if max_log_ratio is not None:
        log_ratio = log_ratio.clamp(-max_log_ratio, max_log_ratio)
    value = (-log_ratio).expm1() + log_ratio
    return value if max_value is None else value.clamp(-max_value, max_value)


_ESTIMATE: dict[str, Callable[[Tensor], Tensor]] = {"k1": lambda d: d, "abs": Tensor.abs, "k2": _k2}
