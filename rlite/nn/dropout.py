"""Dropout of transformers models, in their layers and in configs that a forward may read."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import reduce

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig

DropoutRates = Mapping[tuple[str, ...], float]
"""rates that were switched off: where each stands in the config -> what it was"""


def disable_dropout(config: PretrainedConfig) -> DropoutRates:
    """Set every dropout rate of a config to 0, before a model is made of it.

    Returns:
        The rates that were set to 0.
    """
    rates = dict(_rates(config))
    for path, rate in rates.items():
        setattr(reduce(getattr, path[:-1], config), path[-1], type(rate)(0))  # some configs insist on the type
    return rates


def with_dropout(config: PretrainedConfig, rates: DropoutRates) -> PretrainedConfig:
    """Return a copy of a config with the rates that `disable_dropout` returned."""
    config = copy.deepcopy(config)
    for path, rate in rates.items():
        setattr(reduce(getattr, path[:-1], config), path[-1], rate)
    return config


def disable_dropout_layers(module: nn.Module) -> None:
    """Switch off dropout layers, including those whose rate is no option of the config."""
    for child in module.modules():
        if isinstance(child, _DropoutNd):
            child.p = 0.0


def _rates(config: PretrainedConfig, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from _rates(value, (*path, name))
        elif "drop" in name and isinstance(value, int | float) and not isinstance(value, bool) and value:
            yield (*path, name), value
