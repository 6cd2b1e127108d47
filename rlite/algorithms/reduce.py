"""Calls of algorithms, checks of their results, and means of per-token values.

Values are packed `[T]` with `cu_seqlens`, or padded `[B, L]`.
"""

from __future__ import annotations

import math
import numbers
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from rlite.algorithms.shapes import CuSeqlens, Mask, Scalar, Sequences, Tokens
from rlite.errors import ConfigError, blamed, shortened
from rlite.registry import Table, located
from rlite.types import Aggregation

WITHOUT_GRADIENT = (
    "returned a loss without a gradient, from which nothing is learnt: it may have no detach(), no_grad()"
)
_checked: set[str] = set()
"""functions of which a result has been checked in this process, by their description"""


@dataclass(frozen=True)
class Configured:
    """An algorithm with options that suit it: looked up and checked once, called in every step."""

    name: str
    what: str
    """kind, name and place in words, for messages"""
    function: Callable[..., Any]
    options: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    """further keyword arguments that the library gives it"""

    @classmethod
    def of(
        cls, table: Table[Any], algorithm: str | Callable[..., Any] | Configured, options: Mapping[str, Any]
    ) -> Configured:
        """Return an algorithm with its options. Errors are those of `Table.check`."""
        if isinstance(algorithm, Configured):
            return algorithm
        function, name = table.check(algorithm, options), table.name_of(algorithm)
        return cls(name, f"{table.kind} {name!r}: {located(function)}", function, options, table.needs.get(name, ()))

    def __call__(self, *given: Any, **reserved: Any) -> Any:
        """Return the result of the function, which is blamed for what it raises."""
        try:
            return self.function(*given, **reserved, **self.options)
        except Exception:  # the function may be the user's, and raise anything
            with blamed(self.what):
                raise


def one_of(kind: Any, value: object, what: str) -> None:
    """Check that a value is one of a Literal's."""
    if value not in get_args(kind):
        raise ConfigError(f"{what}: expected one of {', '.join(get_args(kind))}")


def found(value: Any) -> str:
    """Return in words what a function has returned."""
    if not isinstance(value, Tensor):
        return shortened(value)
    return f"a {'complex ' if value.is_complex() else ''}tensor of shape {list(value.shape)}"


def check_result(
    what: str, values: Any, inputs: Sequence[Tensor], mask: Tensor | None = None, is_deep: bool | None = None
) -> Tensor:
    """Return the result of a function if there is a value for each element of its inputs.

    `inputs`: tensors of the shape that the result has. If the first one carries a gradient, the result has to depend on
    inputs that do. `mask`: elements that count; None for all. `is_deep`: also check the gradient, and that the values
    are finite if the inputs are, which waits for the device. None does so until a result of the function was good, if
    gradients are computed and some elements count.
    """
    like = inputs[0]
    if not isinstance(values, Tensor) or values.shape != like.shape or values.is_complex():
        raise ConfigError(f"{what} returned {found(values)}; expected a tensor of shape {list(like.shape)}")
    if is_deep is None:
        is_deep = torch.is_grad_enabled() and what not in _checked and (mask is None or bool(mask.any()))
    if not is_deep:
        return values
    if like.requires_grad and not _depends_on(values, inputs):
        raise ConfigError(f"{what} {WITHOUT_GRADIENT}")
    result, *given = (x.detach() if mask is None else x.detach()[mask.bool()] for x in (values, *inputs))
    bad = ~result.isfinite()
    if bad.any() and all(x.isfinite().all() for x in given):
        shown = ", ".join(f"{x[bad][0].item():.4g}" for x in given)
        why = "look for a logarithm of 0, or for a division by 0, such as by the deviation of equal rewards"
        raise ConfigError(f"{what} returned {result[bad][0].item()} for finite inputs ({shown}): {why}")
    _checked.add(what)
    return values


def _depends_on(values: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Return whether a gradient flows from values to inputs, which `x.detach().requires_grad_()` only pretends."""
    trained = [x for x in inputs if x.requires_grad]
    ones = torch.ones_like(values)
    return values.requires_grad and any(
        gradient is not None
        for gradient in torch.autograd.grad(values, trained, ones, retain_graph=True, allow_unused=True)
    )


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
    one_of(Aggregation, how, f"aggregation {how!r}")
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
    """Check that `x` is packed `[T]` with `cu_seqlens`, or padded `[B, L]` without `cu_seqlens`."""
    if x.dim() != (2 if cu_seqlens is None else 1):
        layout = "padded [B, L] without cu_seqlens" if cu_seqlens is None else "packed [T] with cu_seqlens"
        raise ConfigError(f"expected {layout}, found a tensor of shape {list(x.shape)}")


def finite_gradient(x: Tensor, *others: Tensor | None) -> Tensor:
    """Return `x`, which has a gradient only where it and all others are finite.

    A mask applied later cannot stop a NaN: the gradient of the loss there is 0 * NaN.

    `x`: values of any shape. `*others`: values of the same shape with which `x` is combined; None is left out.
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


# -- the loss of a batch, from the losses of its packs -----------------------------------------------------------------

Loss = Callable[[Any, dict[str, Any]], Any]
"""loss_fn(logits [T, V], data) -> mean loss, or (mean loss, dict of what to report: means, which are numbers or `Mean`,
and values of tokens, which are `PerToken`); an OnLogprobs gets log-probabilities and entropies [T] instead of logits"""
Weight = Callable[[dict[str, Any]], Any]
"""loss_weight_fn(data) -> weight of the pack's mean, e.g. its number of action tokens"""


def call_loss(loss_fn: Loss, outputs: Any, data: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """Return the loss of a pack and the means that loss_fn reports.

    `outputs`: logits [T, V], or a TokenLogprobs of [T].
    """
    result = loss_fn(outputs, data)
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    loss, report = result if is_pair else (result, {})
    if not isinstance(loss, Tensor) or not _is_number(loss):
        what = f"loss_fn {located(loss_fn)} returned {found(loss)}"
        raise ConfigError(f"{what}; expected a mean, one number in a tensor, or (mean, dict of means)")
    for name, value in report.items():
        if not isinstance(name, str) or not (isinstance(value, Mean | PerToken) or _is_number(value)):
            what = f"loss_fn {located(loss_fn)} reports {found(value)} as {name!r}"
            raise ConfigError(f"{what}; expected a number, or a Mean or PerToken of rlite.algorithms, under a text")
    return loss, report


def weigh(loss_weight_fn: Weight, data: Any) -> float:
    """Return the weight of a pack's mean."""
    weight = loss_weight_fn(data)
    with suppress(OverflowError):  # of a whole number beyond every float
        if _is_number(weight) and 0 <= (number := float(weight)) < math.inf:
            return number
    what = f"loss_weight_fn {located(loss_weight_fn)} returned {found(weight)}"
    raise ConfigError(f"{what}; expected the weight of a pack's mean, a finite number of at least 0")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real)


class LossSums:
    """Sums of a batch's loss and of the means that its loss_fn reports, on one rank: these are metrics.

    The gradient needs no sum of losses. A backend sums the weights of all packs over the ranks first. It then scales
    the loss of each pack by its share of that sum before it calls backward (`BatchRunner.forward_backward`).
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, Any]] = {}
        """total and count of each mean"""

    def add(self, means: Mapping[str, Any], weight: float) -> None:
        """Add the means of a pack.

        A `Mean` counts its own elements; a number counts `weight`. If `weight` is 0 the means may be NaN. A `PerToken`
        is no mean, and is left out.
        """
        for key, mean in means.items():
            if isinstance(mean, PerToken):
                continue
            total, count = self._sums.get(key, (0.0, 0.0))
            if weight:
                own = (mean.total, mean.count) if isinstance(mean, Mean) else (_number(mean) * weight, weight)
                total, count = total + _number(own[0]), count + _number(own[1])
            self._sums[key] = total, count

    def means(self, sum_over: Callable[[list[float]], list[float]], num_data_ranks: int) -> dict[str, float]:
        """Return the batch's means, by name.

        `sum_over`: returns the sums over all data ranks; a collective.
        """
        names = sorted(self._sums)
        own = float(zlib.crc32("\n".join(names).encode()))
        if sum_over([own])[0] != own * num_data_ranks:
            what = f"this rank's loss reports {names}, another rank's something else"
            raise ConfigError(f"{what}: a loss has to report the same metrics for every pack")
        summed = sum_over([float(part) for name in names for part in self._sums[name]])
        totals, counts = summed[::2], summed[1::2]
        return {name: total / count if count else 0.0 for name, total, count in zip(names, totals, counts, strict=True)}


def _number(value: Any) -> Tensor | float:
    """Return the value in float64 on its device. A GPU continues to work until `means` reads the batch's means."""
    return value.detach().double().reshape(()) if isinstance(value, Tensor) else float(value)
