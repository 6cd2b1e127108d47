"""Repairs of vLLM's reload of weights, which leaves some parameters with old or unpacked values without a word.

vLLM moves parameters to meta, collects what their weight loaders are given, and then processes each layer.

    gpt-oss     copies experts and sinks into parameters without a weight loader, so the values are lost on meta
    CPU         packs the weights of experts at the first load alone, and later computes with unpacked ones as if packed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlite.errors import WeightSyncError


class DirectCopies(TorchFunctionMode):
    """Writes copies into parameters on meta to the parameters that they stand for, unless a weight loader makes one."""

    def __init__(self, model: nn.Module, held: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.written: set[str] = set()
        """names of the parameters that were written"""
        self._held, self._is_loading = held, False
        self._names: dict[int, tuple[str, Tensor]] = {}
        for name, parameter in model.named_parameters():
            if parameter.is_meta and name in held:
                self._names[parameter.untyped_storage()._cdata] = name, parameter
                load = getattr(parameter, "weight_loader", None)  # an attribute, or a property of vLLM's class
                if load is not None:
                    parameter.weight_loader = self._entered(load)  # type: ignore[attr-defined]

    def _entered(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(load)
        def entered(*args: Any, **kwargs: Any) -> Any:
            outer, self._is_loading = self._is_loading, True
            try:
                return load(*args, **kwargs)
            finally:
                self._is_loading = outer

        return entered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.copy_ or self._is_loading or not args[0].is_meta:
            return func(*args, **(kwargs or {}))
        to, values = args[:2]
        if (known := self._names.get(to.untyped_storage()._cdata)) is not None:
            name, parameter = known
            place = self._held[name].data
            if (place.shape, place.stride()) != (parameter.shape, parameter.stride()):
                raise WeightSyncError(f"vLLM keeps {name} in another form than it loads it; it cannot be synced")
            place.as_strided(to.shape, to.stride(), to.storage_offset()).copy_(values)
            self.written.add(name)
        return to


@contextmanager
def processed_again(model: nn.Module, written: Set[str]) -> Iterator[None]:
    """Process layers at the end of the block that were written directly, and pack experts on CPU if vLLM did not."""
    kernels = {layer: getattr(getattr(layer, "quant_method", None), "moe_kernel", None) for layer in model.modules()}
    on_cpu = ((layer, kernel) for layer, kernel in kernels.items() if kernel is not None and layer.w13_weight.is_cpu)
    layers = {kernel.fused_experts: layer for layer, kernel in on_cpu}
    packed: set[Any] = set()

    def noting(experts: Any) -> Any:
        pack = experts.process_weights_after_loading

        def noted(layer: Any) -> None:
            packed.add(experts)
            pack(layer)

        return noted

    for experts in layers:
        experts.process_weights_after_loading = noting(experts)
    try:
        yield
        for layer in {model.get_submodule(name.rpartition(".")[0]) for name in written}:
            if (method := getattr(layer, "quant_method", None)) is not None:
                method.process_weights_after_loading(layer)
    finally:
        for experts in layers:
            del experts.process_weights_after_loading
    for experts, layer in layers.items():
        if experts not in packed:
            experts.process_weights_after_loading(layer)
