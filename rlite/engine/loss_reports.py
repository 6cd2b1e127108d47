"""Loss calls on packs, and the sums that combine packs' means into the batch's means over any number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rlite.algorithms.reduce import Mean
from rlite.engine.train_executor import Loss
from rlite.errors import ConfigError


def call_loss(loss_fn: Loss, outputs: Any, data: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """Return the loss of a pack and the means that loss_fn reports.

    Args:
        loss_fn: the loss.
        outputs: logits [T, V], or a TokenLogprobs of [T].
        data: the pack.

    Raises:
        ConfigError: loss_fn returned another type.
    """
    result = loss_fn(outputs, data)
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    loss, report = result if is_pair else (result, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ConfigError(
            f"loss_fn returned {found}; expected a mean, one number in a tensor, or (mean, dict of means)"
        )
    return loss, report


class LossSums:
    """Sums of a batch's loss and of the means that its loss_fn reports, on one rank."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, Any]] = {}
        """total and count of each mean"""

    def add(self, means: Mapping[str, Any], weight: float) -> None:
        """Add the means of a pack.

        A `Mean` counts its own elements; a number counts `weight`. If `weight` is 0 the means may be NaN.

        Args:
            means: means of the pack, by name.
            weight: weight of the pack.
        """
        for key, mean in means.items():
            total, count = self._sums.get(key, (0.0, 0.0))
            if weight:
                own = (mean.total, mean.count) if isinstance(mean, Mean) else (_number(mean) * weight, weight)
                total, count = total + _number(own[0]), count + _number(own[1])
            self._sums[key] = total, count

    def means(self, sum_over: Callable[[list[float]], list[float]], num_data_ranks: int) -> dict[str, float]:
        """Return the batch's means, by name.

        Args:
            sum_over: returns the sums over all data ranks; a collective.
            num_data_ranks: number of data ranks.

        Raises:
            ConfigError: the ranks have different names. Every rank raises it.
        """
        names = sorted(self._sums)
        own = float(zlib.crc32("\n".join(names).encode()))
        if sum_over([own])[0] != own * num_data_ranks:
            raise ConfigError(
                f"this rank's loss reports {names}, another rank's something else: a loss has to report the same "
                "metrics for every pack"
            )
        summed = sum_over([float(part) for name in names for part in self._sums[name]])
        return {
            name: total / count if count else 0.0
            for name, total, count in zip(names, summed[::2], summed[1::2], strict=True)
        }


def _number(value: Any) -> Tensor | float:
    """Return the value in float64 on its device. A GPU continues to work until `means` reads the batch's means."""
    return value.detach().double().reshape(()) if isinstance(value, Tensor) else float(value)
