"""From per-token values to sequences and scalars, for packed `[T]` + `cu_seqlens` and padded `[B, L]` alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rlite.errors import ConfigError

Aggregation = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class Mean:
    """A mean over elements, as their sum and their number.

    A loss that reports it gives an engine what the mean of the whole batch needs, however the batch is split and
    whatever the loss itself is averaged over.
    """

    total: Float[Tensor, ""]
    count: Int[Tensor, ""]

    @classmethod
    def of(cls, x: Float[Tensor, "*tokens"], mask: Shaped[Tensor, "*tokens"]) -> Mean:
        """Return the mean of `x` where the mask is 1, without its gradient."""
        return cls(_masked(x.detach(), mask).sum(), mask.bool().count_nonzero())

    def item(self) -> float:
        """Return the mean of these elements alone; 0 if there are none."""
        return float(self.total) / max(int(self.count), 1)


def aggregate(
    x: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    how: Aggregation = "token",
    *,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
    num_tokens: Tensor | float | None = None,
    num_sequences: Tensor | float | None = None,
    length: float | None = None,
) -> Float[Tensor, ""]:
    """The scalar loss of per-token losses.

    token:    sum of all tokens / num_tokens            (DAPO, arXiv:2503.14476)
    sequence: sum of the sequences' means / num_sequences      (GRPO, arXiv:2402.03300)
    constant: sum of all tokens / (num_sequences * length)     (Dr. GRPO, arXiv:2503.20783)

    The counts default to those of `x` itself: a mean. Give the counts of the whole batch, and the values of all its
    microbatches and ranks add up to the loss of the whole, whatever the split. A sequence without a masked-in token
    is not counted. An empty mask gives 0.

    Raises: ConfigError for an unknown `how`, a missing `length`, or a layout that `cu_seqlens` does not fit.
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


def aggregation_weight(
    mask: Shaped[Tensor, "*tokens"], how: Aggregation = "token", cu_seqlens: Int[Tensor, " sequences+1"] | None = None
) -> Int[Tensor, ""]:
    """The count that `aggregate(how)` divides by, without `length`: the weight of a microbatch in its batch."""
    if how not in get_args(Aggregation):
        raise ConfigError(f"aggregation {how!r}: expected one of {', '.join(get_args(Aggregation))}")
    mask = mask.bool()
    if how == "token":
        return mask.count_nonzero()
    return sequence_sums(mask.float(), mask, cu_seqlens).count_nonzero()


def masked_mean(x: Float[Tensor, "*tokens"], mask: Shaped[Tensor, "*tokens"]) -> Float[Tensor, ""]:
    """Mean of `x` where the mask is 1; 0 for an empty mask."""
    return _masked(x, mask).sum() / mask.bool().count_nonzero().clamp(min=1)


def masked_variance(
    x: Float[Tensor, "*tokens"], mask: Shaped[Tensor, "*tokens"], *, unbiased: bool = True
) -> Float[Tensor, ""]:
    """Variance of `x` where the mask is 1, over n - 1 (unbiased) or n; 0 for a single value."""
    squares = _masked((x - masked_mean(x, mask)).square(), mask).sum()
    return squares / (mask.bool().count_nonzero() - int(unbiased)).clamp(min=1)


def sequence_sums(
    x: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> Float[Tensor, " sequences"]:
    """Sum over each sequence's masked-in tokens."""
    if cu_seqlens is None:
        check_layout(x, cu_seqlens)
        return _masked(x, mask).sum(-1)
    index = sequence_index(x, cu_seqlens)
    # one bin more than sequences: tokens after cu_seqlens[-1] are padding
    sums = torch.zeros(len(cu_seqlens), dtype=_accumulator(x), device=x.device)
    return sums.index_add(0, index, _masked(x, mask))[:-1]


def sequence_means(
    x: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> Float[Tensor, " sequences"]:
    """Mean over each sequence's masked-in tokens; 0 for a sequence without any."""
    ones = torch.ones_like(x, dtype=_accumulator(x))
    return sequence_sums(x, mask, cu_seqlens) / sequence_sums(ones, mask, cu_seqlens).clamp(min=1)


def to_tokens(
    values: Float[Tensor, " sequences"],
    mask: Shaped[Tensor, "*tokens"],
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> Float[Tensor, "*tokens"]:
    """Each sequence's value at each of its masked-in tokens, 0 elsewhere."""
    check_layout(mask, cu_seqlens)
    if cu_seqlens is None:
        spread = values.unsqueeze(-1)
    else:
        spread = torch.cat([values, values.new_zeros(1)])[sequence_index(mask, cu_seqlens)]
    return torch.where(mask.bool(), spread, 0.0)


def sequence_index(
    x: Shaped[Tensor, "*tokens"], cu_seqlens: Int[Tensor, " sequences+1"] | None
) -> Int[Tensor, "*tokens"]:
    """The number of each token's sequence; tokens after `cu_seqlens[-1]` get the number of sequences."""
    check_layout(x, cu_seqlens)
    if cu_seqlens is None:
        return torch.arange(x.shape[0], device=x.device)[:, None].expand(x.shape)
    # bucketize instead of repeat_interleave: it does not wait for the device
    return torch.bucketize(torch.arange(x.shape[0], device=x.device), cu_seqlens[1:].contiguous(), right=True)


def check_layout(x: Shaped[Tensor, "*tokens"], cu_seqlens: Int[Tensor, " sequences+1"] | None) -> None:
    """Raise ConfigError unless `x` is packed `[T]` with `cu_seqlens`, or padded `[B, L]` without."""
    if x.dim() != (2 if cu_seqlens is None else 1):
        layout = "padded [B, L] without cu_seqlens" if cu_seqlens is None else "packed [T] with cu_seqlens"
        raise ConfigError(f"expected {layout}, found a tensor of shape {list(x.shape)}")


def _masked(x: Float[Tensor, "*tokens"], mask: Bool[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    # where, not a product: a masked nan or inf must not reach the sum
    return torch.where(mask.bool(), x.to(_accumulator(x)), 0.0)


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
