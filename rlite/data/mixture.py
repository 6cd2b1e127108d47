"""Several sources of data items that are mixed by weights, in an order that resumes exactly."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from rlite.data.prompts import ShuffledOrder
from rlite.data.readers.streaming import check_same
from rlite.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Mixture:
    """Several sources of items, which a table holds end to end."""

    sizes: Mapping[str, int]
    """items of each source, in the table's order"""
    weights: Mapping[str, float]
    """share of each source, in any unit"""

    @property
    def num_items(self) -> int:
        """Items of all sources."""
        return sum(self.sizes.values())

    @cached_property
    def starts(self) -> dict[str, int]:
        """The first item of each source."""
        return dict(zip(self.sizes, accumulate(self.sizes.values(), initial=0), strict=False))

    @cached_property
    def counts(self) -> dict[str, int]:
        """Items of each source in an epoch, which has as many items as all sources hold together.

        The shares are those of the weights, up to one item.
        """
        total, scale = self.num_items, sum(self.weights.values())
        exact = {name: total * self.weights[name] / scale for name in self.sizes}
        counts = {name: int(share) for name, share in exact.items()}
        largest_rest = sorted(exact, key=lambda name: counts[name] - exact[name])
        for name in largest_rest[: total - sum(counts.values())]:
            counts[name] += 1
        if empty := [f"mixture.{name}.weight={self.weights[name]:g}" for name, count in counts.items() if not count]:
            few = f"{empty[0]} of {scale:g} gives no item in an epoch of {total} items"
            raise ConfigError(f"{few}; raise it, or leave the source out")
        return counts

    def source_of(self, item: int) -> tuple[str, int]:
        """Return the source of an item, and the item's number in the source."""
        name = next(name for name in reversed(self.starts) if self.starts[name] <= item)
        return name, item - self.starts[name]

    def __str__(self) -> str:
        """Return the sources with their shares."""
        return ", ".join(f"{name} {count / self.num_items:.1%}" for name, count in self.counts.items())


class MixedOrder(ShuffledOrder):
    """Endless sequence of the items of a mixture. Each epoch has the mixture's counts of each source, in random order.

    Every source yields its items as a ShuffledOrder does, and continues across epochs: an item repeats only after all
    other items of its source.

    `digest`: returns a hash of all items. A state belongs to one hash.
    """

    def __init__(self, mixture: Mixture, seed: int, digest: Callable[[], str] | None = None) -> None:
        super().__init__(mixture.num_items, seed, digest)
        self._mixture = mixture
        self._labels = np.repeat(np.arange(len(mixture.counts)), list(mixture.counts.values()))
        self._orders = {
            name: ShuffledOrder(size, zlib.crc32(f"{seed} {name}".encode())) for name, size in mixture.sizes.items()
        }

    def take(self, count: int) -> list[int]:
        """Return the next `count` numbers; they may span epochs."""
        every = list(self._mixture.counts)
        names = [every[label] for label in self._labels[super().take(count)]]
        return [self._mixture.starts[name] + self._orders[name].take(1)[0] for name in names]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch and in each source."""
        return super().state_dict() | {"sources": {name: order.state_dict() for name, order in self._orders.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another order's position, with its seed. New weights apply from there on."""
        found = list(state.get("sources", ()))
        made = f"with the sources {', '.join(found) or 'of no mixture'}; now there are {', '.join(self._orders)}"
        check_same(found == list(self._orders), made)
        for name, order in self._orders.items():
            try:
                order.load_state_dict(state["sources"][name])
            except CheckpointError as error:
                raise CheckpointError(f"mixture.{name}: {error}") from error
        super().load_state_dict(state)


def shuffled(
    num_items: int, mixture: Mixture | None, seed: int, digest: Callable[[], str] | None = None
) -> ShuffledOrder:
    """Return the order of the items of a table.

    `mixture`: the table's sources; None if there is one.
    """
    if mixture is None:
        return ShuffledOrder(num_items, seed, digest)
    return MixedOrder(mixture, seed, digest)
