"""Records the experts that the layers of a mixture choose, beside the keys and values of the tokens."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from rlite.backends.embedded.attention import AttentionPlan
from rlite.backends.models.experts import experts_of
from rlite.data.routing import RoutingShape


class RoutingRecorder:
    """Writes the choices of a model's layers into the cache, if it is asked to keep them."""

    def __init__(self, model: nn.Module, shape: RoutingShape) -> None:
        self.shape = shape
        self._table: Tensor | None = None
        self._places: Tensor | None = None
        for layer, experts in enumerate(experts_of(model).values()):
            experts.register_forward_pre_hook(partial(self._see, layer))

    def begin(self, plan: AttentionPlan) -> None:
        """Record the next forward pass, whose attention this is."""
        self._places = plan.places
        self._table = None if self._places is None else plan.cache.routing

    def _see(self, layer: int, experts: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self._table is not None:
            self._table[:, layer][self._places] = args[1].to(self._table.dtype)
