"""Reduce per-token values to sequences and scalars, for packed `[T]` + `cu_seqlens` and padded `[B, L]` alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from rlite.algorithms.shapes import CuSeqlens, Mask, Scalar, Sequences, Tokens
from rlite.errors import ConfigError
from rlite.types import Aggregation


class TokenLoss(NamedTuple):
    """The loss of every token. `aggregate` makes the scalar, so averaging is decided in one place."""

    loss: Tokens
    """carries the gradient"""
    metrics: dict[str, Tokens]
    """detached, of the same shape as the loss; to be averaged over the mask"""


@dataclass(frozen=True)
class Mean:
    """A mean over elements, as their sum and their number.

    An engine adds up the sums and the numbers of all microbatches and ranks. A metric that a loss reports as a `Mean`
    is therefore the mean over the whole batch. It depends neither on the split of the batch nor on the loss's average.
    """

    total: Scalar
    count: Int[Tensor, ""]

    @classmethod
    def of(cls, x: Tokens, mask: Mask) -> Mean:
        """Return the mean of `x` over the mask, without a gradient."""
        return cls(_masked(x.detach(), mask).sum(), mask.bool().count_nonzero())

    def item(self) -> float:
        """Return the mean of these elements alone; 0 if there are none."""
        return float(self.total) / max(int(self.count), 1)


@dataclass(frozen=True)
class PerToken:
    """Values of the tokens of a pack, which an engine returns as [N, L] if a loss reports them."""

    values: Tokens
    """value of each token, at the token; without a gradient"""


def aggregate(
    x: Tokens,
    mask: Mask,
    how: Aggregation = "token",
    *,
    cu_seqlens: CuSeqlens | None = None,
    num_tokens: Tensor | float | None = None,
    num_sequences: Tensor | float | None = None,
    length: float | None = None,
) -> Scalar:
    """Return the scalar loss of per-token losses.

    token:    sum of all tokens / num_tokens            (DAPO, arXiv:2503.14476)
    sequence: sum of the sequences' means / num_sequences      (GRPO, arXiv:2402.03300)
    constant: sum of all tokens / (num_sequences * length)     (Dr. GRPO, arXiv:2503.20783)

    Args:
        x: loss of each token, `[T]` or `[B, L]`.
        mask: tokens that count. An empty mask gives 0.
        how: "token", "sequence" or "constant".
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
        num_tokens: divisor of "token". Default: the tokens in the mask. With the count of the whole batch, the values
            of all its microbatches and ranks add up to the loss of the whole batch.
        num_sequences: divisor of "sequence" and "constant", in the same way. Default: the sequences with a token in
            the mask.
        length: divisor of "constant" in tokens, for example max_new_tokens.

    Raises:
        ConfigError: `how` is unknown, "constant" has no positive `length`, or `cu_seqlens` does not fit the layout.
    """
    if how == "sequence":
        total, count = sequence_means(x, mask, cu_seqlens).sum(), num_sequences
    else:
        total, count = _masked(x, mask).sum(), num_tokens if how == "token" else num_sequences
    if count is None:
        count = aggregation_weight(mask, how, cu_seqlens)
    if isinstance(count, Tensor):
        count = count.clamp(min=1)
    if how != "constant":
        return total / count
    if length is None or length <= 0:
        raise ConfigError(f"length={length}: constant aggregation divides by a positive length, e.g. max_new_tokens")
    return total / (count * length)


def aggregation_weight(mask: Mask, how: Aggregation = "token", cu_seqlens: CuSeqlens | None = None) -> Int[Tensor, ""]:
    """Return the count that `aggregate` divides by, without `length`: the weight of a microbatch in its batch.

    Args:
        mask: tokens that count, `[T]` or `[B, L]`.
        how: the aggregation: "token" counts tokens, the others count sequences with a token in the mask.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.

    Raises:
        ConfigError: `how` is unknown, or `cu_seqlens` does not fit the layout.
    """
    if how not in get_args(Aggregation):
        raise ConfigError(f"aggregation {how!r}: expected one of {', '.join(get_args(Aggregation))}")
    mask = mask.bool()
    if how == "token":
        return mask.count_nonzero()
    return sequence_sums(mask.float(), mask, cu_seqlens).count_nonzero()


def masked_mean(x: Shaped[Tensor, "*any"], mask: Shaped[Tensor, "*any"]) -> Scalar:
    """Return the mean of `x` over the mask; 0 for an empty mask."""
    return _masked(x, mask).sum() / mask.bool().count_nonzero().clamp(min=1)


def masked_variance(x: Tokens, mask: Mask, *, unbiased: bool = True) -> Scalar:
    """Return the variance of `x` over the mask.

    Args:
        x: values, of any shape.
        mask: elements that count, of the same shape.
        unbiased: divide by n - 1 instead of n. A single value has variance 0.
    """
    squares = _masked((_masked(x, mask) - masked_mean(x, mask)).square(), mask).sum()
    return squares / (mask.bool().count_nonzero() - int(unbiased)).clamp(min=1)


def sequence_sums(x: Tokens, mask: Mask, cu_seqlens: CuSeqlens | None = None) -> Sequences:
    """Return the sum of each sequence's tokens in the mask.

    Args:
        x: values, packed `[T]` or padded `[B, L]`.
        mask: tokens that count, of the same shape.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`. Tokens after the last boundary are padding.

    Returns:
        One sum per sequence, `[N]`, in float32 or wider.

    Raises:
        ConfigError: `cu_seqlens` does not fit the layout.
    """
    if cu_seqlens is None:
        check_layout(x, cu_seqlens)
        return _masked(x, mask).sum(-1)
    index = sequence_index(x, cu_seqlens)
    # one bin more than sequences: tokens after cu_seqlens[-1] are padding
    sums = torch.zeros(len(cu_seqlens), dtype=_accumulator(x), device=x.device)
    return sums.index_add(0, index, _masked(x, mask))[:-1]


def sequence_means(x: Tokens, mask: Mask, cu_seqlens: CuSeqlens | None = None) -> Sequences:
    """Return the mean over each sequence's tokens in the mask; 0 for a sequence without such a token.

    Args:
        x: values, packed `[T]` or padded `[B, L]`.
        mask: tokens that count, of the same shape.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
    """
    ones = torch.ones_like(x, dtype=_accumulator(x))
    return sequence_sums(x, mask, cu_seqlens) / sequence_sums(ones, mask, cu_seqlens).clamp(min=1)


def sequence_log_ratio(log_ratio: Tokens, mask: Mask, cu_seqlens: CuSeqlens | None = None) -> Tokens:
    """Return each sequence's mean log ratio at each of its tokens in the mask, with its gradient.

    GSPO, arXiv:2507.18071.

    Args:
        log_ratio: log probability ratio of each token, packed `[T]` or padded `[B, L]`.
        mask: tokens that count, of the same shape.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
    """
    return to_tokens(sequence_means(log_ratio, mask, cu_seqlens), mask, cu_seqlens)


def to_tokens(values: Sequences, mask: Mask, cu_seqlens: CuSeqlens | None = None) -> Tokens:
    """Return each sequence's value at each of its tokens in the mask; 0 at other tokens.

    Args:
        values: one value per sequence, `[N]`.
        mask: tokens that get the value, packed `[T]` or padded `[B, L]`.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
    """
    check_layout(mask, cu_seqlens)
    if cu_seqlens is None:
        spread = values.unsqueeze(-1)
    else:
        spread = torch.cat([values, values.new_zeros(1)])[sequence_index(mask, cu_seqlens)]
    return torch.where(mask.bool(), spread, 0.0)


def sequence_index(x: Shaped[Tensor, "*tokens"], cu_seqlens: CuSeqlens | None) -> Int[Tensor, "*tokens"]:
    """Return the number of each token's sequence. Tokens after `cu_seqlens[-1]` get the number of sequences."""
    check_layout(x, cu_seqlens)
    if cu_seqlens is None:
        return torch.arange(x.shape[0], device=x.device)[:, None].expand(x.shape)
    # bucketize instead of repeat_interleave: it does not wait for the device
    return torch.bucketize(torch.arange(x.shape[0], device=x.device), cu_seqlens[1:].contiguous(), right=True)


def check_layout(x: Shaped[Tensor, "*tokens"], cu_seqlens: CuSeqlens | None) -> None:
    """Check that `x` is packed `[T]` with `cu_seqlens`, or padded `[B, L]` without `cu_seqlens`.

    Raises:
        ConfigError: `x` has another number of dimensions.
    """
    if x.dim() != (2 if cu_seqlens is None else 1):
        layout = "padded [B, L] without cu_seqlens" if cu_seqlens is None else "packed [T] with cu_seqlens"
        raise ConfigError(f"expected {layout}, found a tensor of shape {list(x.shape)}")


def finite_gradient(x: Tensor, *others: Tensor | None) -> Tensor:
    """Return `x`, which has a gradient only where it and all others are finite.

    A mask applied later cannot stop a NaN: the gradient of the loss there is 0 * NaN.

    Args:
        x: values of any shape.
        *others: values of the same shape with which `x` is combined; None is left out.
    """
    is_finite = x.isfinite()
    for other in others:
        if other is not None:
            is_finite = is_finite & other.isfinite()
    return torch.where(is_finite, x, x.detach())


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    # where, not a product: a masked nan or inf must not reach the sum
    return torch.where(mask.bool(), x.to(_accumulator(x)), 0.0)


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
