"""Call an algorithm, which may be the user's own function, and check what it returns before computing with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlite.errors import ConfigError, blamed, shortened
from rlite.registry import Table, located

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
        """Return an algorithm with its options. Errors are those of `Table.check`.

        Args:
            table: algorithms of one kind by name.
            algorithm: a name in the table, a function, or either with its options, which is returned.
            options: keyword arguments of the algorithm.
        """
        if isinstance(algorithm, Configured):
            return algorithm
        function, name = table.check(algorithm, options), table.name_of(algorithm)
        what = f"{table.kind} {name!r}: {located(function)}"
        return cls(name, what, function, options, table.needs.get(name, ()))

    def __call__(self, *given: Any, **reserved: Any) -> Any:
        """Return the result of the function, which is blamed for what it raises."""
        with blamed(self.what):
            return self.function(*given, **reserved, **self.options)


def found(value: Any) -> str:
    """Return in words what a function has returned."""
    if not isinstance(value, Tensor):
        return shortened(value)
    return f"a {'complex ' if value.is_complex() else ''}tensor of shape {list(value.shape)}"


def check_result(
    what: str, values: Any, inputs: Sequence[Tensor], mask: Tensor | None = None, is_deep: bool | None = None
) -> Tensor:
    """Return the result of a function if there is a value for each element of its inputs.

    Args:
        what: description of the function.
        values: its result.
        inputs: tensors of the shape that the result has. If the first one carries a gradient, the result has to depend
            on inputs that do.
        mask: elements that count; None for all.
        is_deep: also check the gradient, and that the values are finite if the inputs are, which waits for the device.
            None does so until a result of the function was good, if gradients are computed and some elements count.

    Raises:
        ConfigError: the result is something else.
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
        raise ConfigError(
            f"{what} returned {result[bad][0].item()} for finite inputs ({shown}): look for a logarithm of 0, or for a "
            "division by 0, such as by the deviation of equal rewards"
        )
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
