"""Methods of a user's module that become methods of the engine, and checks of the module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from rlite.errors import ConfigError
from rlite.nn.base import BaseTrainModule, is_on_meta


def check_train_module(module: nn.Module, own_names: Collection[str]) -> BaseTrainModule:
    """Return the module if an engine can serve it.

    Args:
        module: the user's module.
        own_names: names of the engine's methods that a module must not define.

    Raises:
        ConfigError: the module has the wrong class, hides engine methods, takes `timeout`, or holds real weights.
    """
    name = type(module).__name__
    if not isinstance(module, BaseTrainModule):
        raise ConfigError(
            f"expected a rlite.nn.BaseTrainModule, found {name}: "
            "subclass it beside your model class, and move the algorithm into its methods"
        )
    own = user_methods(type(module))
    if hidden := sorted(own.keys() & own_names):
        raise ConfigError(
            f"{name} defines {', '.join(hidden)}, which the engine has itself, so that yours "
            "would never be called; give your methods other names"
        )
    if taken := sorted(name for name, method in own.items() if "timeout" in inspect.signature(method).parameters):
        raise ConfigError(
            f"{name}: {', '.join(taken)} has a parameter 'timeout', which every call on an engine "
            "understands as seconds to wait for its workers; give yours another name"
        )
    if not is_on_meta(module):
        raise ConfigError(
            f"{name} holds real weights; a train module travels to its workers without any. "
            "Build it inside `with accelerate.init_empty_weights():`"
        )
    return module


def user_methods(module: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return the public methods that the user's own classes define.

    Methods of every module (`forward`, `train`, `state_dict`) are left out: users may override them, and workers and
    torch call them.
    """
    own = [cls for cls in module.__mro__ if cls.__module__.partition(".")[0] not in ("torch", "transformers", "rlite")]
    defined = {name: value for cls in reversed(own) for name, value in vars(cls).items() if callable(value)}
    return {
        name: value
        for name, value in defined.items()
        if not name.startswith("_") and not hasattr(BaseTrainModule, name)
    }
