"""Adapters that the embedded executor serves: versions of several adapters, and the products of one forward pass.

Tokens of several adapters and of the base share a forward pass. Each linear layer is computed once for all tokens, and
each adapter adds its own product to the rows of its tokens. Adapters may have different ranks and layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rlite.backends.embedded.scheduler import ServedAdapter
from rlite.backends.models import batch_invariant
from rlite.backends.models.lora import stored_layers
from rlite.runtime.parallel.shards import Box
from rlite.runtime.replicas.adapters import AdapterWeights, check_fit


class LocalFactors(NamedTuple):
    """The adapter of one layer on one rank."""

    down: Tensor
    """[rank, in], the columns of this rank's inputs"""
    up: Tensor
    """[out, rank], whole"""
    own: slice
    """rows of `up` of this rank's outputs"""
    is_part: bool
    """other ranks have the other inputs"""


class AdapterLayers:
    """The layers of a model beside which adapters are served, and the adapters of the forward pass under way.

    Args:
        model: the model, with this rank's parameters.
        boxes: this rank's box of each parameter, by name.
        shapes: shape of each whole parameter, by name.
        group: ranks that share the layers; None is one rank.
        is_invariant: products have bits that do not depend on the batch.
    """

    def __init__(
        self,
        model: Any,
        boxes: Mapping[str, Box],
        shapes: Mapping[str, tuple[int, ...]],
        group: dist.ProcessGroup | None,
        is_invariant: bool,
    ) -> None:
        self._layers = stored_layers(model)
        self._boxes = {stored: boxes[f"{name}.weight"] for stored, (name, _) in self._layers.items()}
        self._shapes = {stored: shapes[f"{name}.weight"] for stored, (name, _) in self._layers.items()}
        self._group = group
        self._linear = batch_invariant.linear if is_invariant else F.linear
        self._rows: list[tuple[ServedAdapter, Tensor | None]] = []
        """the adapters of the forward pass, and the rows of their tokens; None is all rows"""
        self._hooked: set[nn.Module] = set()

    def make(
        self, name: str | None, given: AdapterWeights, version: int, device: torch.device, dtype: torch.dtype
    ) -> ServedAdapter:
        """Return an adapter on the device.

        Args:
            name: name of the adapter.
            given: its values.
            version: its version.
            device: device of the model.
            dtype: dtype of the factors.

        Raises:
            ConfigError: the adapter belongs to another base model.
        """
        check_fit(given, f"the adapter {name!r}", self._shapes)
        factors = {}
        for stored, (down, up) in given.factors.items():
            box, whole = self._boxes[stored], self._shapes[stored]
            is_part = box[1].stop - box[1].start < whole[1]
            own = LocalFactors(down[:, box[1]].to(device, dtype).contiguous(), up.to(device, dtype), box[0], is_part)
            factors[self._layers[stored][1]] = own
        return ServedAdapter(name, version, given.scale, factors)

    def hook(self, adapter: ServedAdapter) -> None:
        """Let the layers of an adapter add it to their outputs when they are called."""
        for layer in adapter.factors.keys() - self._hooked:
            layer.register_forward_hook(self._add_hooked)
            self._hooked.add(layer)

    def begin(self, adapters: Sequence[ServedAdapter | None], device: torch.device) -> bool:
        """Set the adapters of the next forward passes.

        Args:
            adapters: of each token, in order.
            device: device of the model.

        Returns:
            Whether any token has one.
        """
        found = dict.fromkeys(adapter for adapter in adapters if adapter is not None)
        is_alone = len(found) == 1 and None not in adapters
        self._rows = [
            (each, None if is_alone else torch.tensor([i for i, a in enumerate(adapters) if a is each], device=device))
            for each in found
        ]
        return bool(found)

    def add(self, x: Tensor, output: Tensor, *layers: nn.Module) -> Tensor:
        """Add the adapters of the forward pass to a product, in place.

        Args:
            x: inputs [tokens, in].
            output: outputs [tokens, out] of the layers, side by side.
            *layers: the layers.

        Returns:
            `output`.
        """
        for adapter, rows in self._rows:
            start = 0
            for layer in layers:
                width = len(layer.weight) if len(layers) > 1 else output.shape[-1]  # type: ignore[arg-type]
                if (factors := adapter.factors.get(layer)) is not None:
                    part = x if rows is None else x[rows]
                    made = self._product(factors, part, width) * adapter.scale
                    columns = output[:, start : start + width]
                    if rows is None:
                        columns += made
                    else:
                        columns[rows] += made
                start += width
        return output

    def _product(self, factors: LocalFactors, x: Tensor, width: int) -> Tensor:
        hidden = self._linear(x.to(factors.down.dtype), factors.down)
        if factors.is_part:
            dist.all_reduce(hidden, group=self._group)
        up = factors.up if width == len(factors.up) else factors.up[factors.own].contiguous()
        return self._linear(hidden, up)

    def _add_hooked(self, layer: nn.Module, args: tuple, output: Tensor) -> Tensor:
        if not self._rows:
            return output
        x, rows = args[0], output.reshape(-1, output.shape[-1]).clone()
        return self.add(x.reshape(-1, x.shape[-1]), rows, layer).view_as(output)
