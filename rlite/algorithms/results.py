"""Check what an algorithm returns, which may be the user's own function, before anything is computed with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlite.algorithms.shapes import Mask
from rlite.errors import ConfigError, shortened


def found(value: Any) -> str:
    """Return in words what a function has returned."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else shortened(value)


def check_values(what: str, values: Any, like: Tensor) -> Tensor:
    """Return the values if there is one for each element of an input.

    Args:
        what: description of the function that returned the values.
        values: result of the function.
        like: the input.

    Raises:
        ConfigError: the values are no tensor, or a tensor of another shape.
    """
    if not isinstance(values, Tensor) or values.shape != like.shape:
        raise ConfigError(
            f"{what} returned {found(values)}; expected a tensor of shape {list(like.shape)}, a value for each input"
        )
    return values


def check_metrics(what: str, metrics: Mapping[str, Any], like: Tensor) -> None:
    """Check that metrics are tensors of the shape of the loss, or of one element.

    Args:
        what: description of the function that returned the metrics.
        metrics: result of the function.
        like: the loss.

    Raises:
        ConfigError: a metric is something else.
    """
    for name, value in metrics.items():
        if not isinstance(value, Tensor) or value.shape not in (like.shape, ()):
            raise ConfigError(
                f"{what} returned {found(value)} as the metric {name!r}; expected a tensor of shape {list(like.shape)}"
            )


def check_learns(what: str, loss: Tensor, learnt: Tensor) -> None:
    """Check that a loss carries a gradient if its input does.

    Args:
        what: description of the function that returned the loss.
        loss: result of the function.
        learnt: the input that carries the gradient.

    Raises:
        ConfigError: the loss carries no gradient.
    """
    is_wanted = learnt.requires_grad and torch.is_grad_enabled()
    if is_wanted and not loss.requires_grad:
        raise ConfigError(
            f"{what} returned a loss without a gradient, from which nothing is learnt; compute the loss from the "
            "log-probabilities, without detach(), no_grad() or numbers of Python"
        )


def check_finite(what: str, values: Tensor, inputs: Sequence[Tensor | None], mask: Mask | None = None) -> None:
    """Check that values are finite if the inputs are.

    Args:
        what: description of the function that returned the values.
        values: result of the function.
        inputs: the inputs, of the shape of the values.
        mask: elements that count; None for all.

    Raises:
        ConfigError: a value is NaN or infinite.
    """
    chosen = slice(None) if mask is None else mask.bool()
    bad = ~values.detach()[chosen].isfinite()
    known = [x.detach()[chosen] for x in inputs if x is not None]
    if bad.any() and all(x.isfinite().all() for x in known):
        given = ", ".join(f"{x[bad][0].item():.4g}" for x in known)
        raise ConfigError(
            f"{what} returned {values.detach()[chosen][bad][0].item()} for finite inputs ({given}): look for a "
            "logarithm of 0, or for a division by 0, such as by the deviation of equal rewards"
        )
