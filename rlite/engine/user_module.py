"""The class of a user's train module: what an engine can serve, and new methods for a module that is already built.

A cell of a notebook that is run again defines a new class, and objects of the earlier class keep the earlier methods.
So the class of a module is replaced by the definition that now has its name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

import cloudpickle
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlite.errors import ConfigError
from rlite.nn.base import BaseTrainModule, is_on_meta

RUN_ONCE = ("__init__", "on_weights_materialized")
"""methods that have run when an engine is built, and whose results stay"""
LIBRARIES = ("torch", "transformers", "rlite", "builtins")


def check_train_module(module: nn.Module, own_names: Collection[str]) -> BaseTrainModule:
    """Return the module if an engine can serve it."""
    name = type(module).__name__
    if not isinstance(module, BaseTrainModule):
        raise ConfigError(
            f"expected a rlite.nn.BaseTrainModule, found {name}: "
            "subclass it beside your model class, as in `class Mine(rlite.nn.HuggingFaceFsdp2TrainModule, "
            "Qwen3ForCausalLM)`; rlite's examples/sft_from_engine.py is a whole program"
        )
    own = user_methods(type(module))
    if hidden := sorted(own.keys() & own_names):
        told = f"{name} defines {', '.join(hidden)}, which the engine has itself, so that yours would never be called"
        raise ConfigError(f"{told}; give your methods other names")
    if taken := sorted(name for name, method in own.items() if "timeout" in inspect.signature(method).parameters):
        told = "which every call on an engine understands as seconds to wait for its workers; give yours another name"
        raise ConfigError(f"{name}: {', '.join(taken)} has a parameter 'timeout', {told}")
    if not is_on_meta(module):
        problem = f"{name} holds real weights; a train module travels to its workers without any"
        raise ConfigError(f"{problem}. Build it inside `with accelerate.init_empty_weights():`")
    return module


def user_methods(module: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return the public methods that the user's own classes define.

    Methods of every module (`forward`, `train`, `state_dict`) are left out: users may override them, and workers and
    torch call them.
    """
    own = own_methods(module).items()
    return {name: value for name, value in own if not (name.startswith("_") or hasattr(BaseTrainModule, name))}


def redefined(cls: type) -> type:
    """Return a class with the current definitions of the user's classes; the class itself if none was redefined."""
    current = _current(cls)
    if current is not cls:
        return current
    bases = tuple(redefined(base) for base in cls.__bases__)
    if bases == cls.__bases__:
        return cls
    own = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, own)


def changed_methods(old: type, new: type) -> list[str]:
    """Return the names of the methods of the user's classes that two definitions of a class do not share."""
    if _library_bases(old) != _library_bases(new):
        before, after = (", ".join(base.__name__ for base in _library_bases(cls)) for cls in (old, new))
        problem = f"reload_methods: {new.__name__} is now a subclass of {after}, and was a subclass of {before}"
        remedy = "release() the engine, and build an engine of a new module"
        raise ConfigError(f"{problem}. The weights belong to {before}: {remedy}")
    prints = [{name: _fingerprint(method) for name, method in own_methods(cls).items()} for cls in (old, new)]
    changed = sorted(name for name in {*prints[0], *prints[1]} if prints[0].get(name) != prints[1].get(name))
    if once := [name for name in RUN_ONCE if name in changed]:
        told = f"reload_methods: {new.__name__}.{', '.join(once)} was changed, which ran when the engine was built"
        remedy = "Undo the change, or release() the engine and build one of a new module"
        raise ConfigError(f"{told}, and the weights and the optimizer stay. {remedy}")
    return changed


def take_class(module: nn.Module, new: type) -> None:
    """Make a module an object of a new class. Its attributes, weights and FSDP's sharding stay."""
    if isinstance(module, FSDPModule):  # fully_shard has put FSDP's class before the module's own
        wrapped = type(module)
        new = type(wrapped.__name__, (FSDPModule, new), {"__deepcopy__": wrapped.__deepcopy__})  # type: ignore[attr-defined]
    try:
        module.__class__ = new
    except TypeError as error:
        raise ConfigError(f"reload_methods: {new.__name__} cannot replace its earlier class: {error}") from error


@contextmanager
def sent_by_value(cls: type) -> Iterator[None]:
    """Let cloudpickle send the user's classes by value inside of the block, also from modules that others can import.

    Other processes have imported these modules as they were before.
    """
    names = {base.__module__ for base in cls.__mro__ if not _is_of_library(base)} - {"__main__"}
    with ExitStack() as stack:
        for name in names & sys.modules.keys():
            cloudpickle.register_pickle_by_value(sys.modules[name])
            stack.callback(cloudpickle.unregister_pickle_by_value, sys.modules[name])
        yield


@contextmanager
def with_class(module: nn.Module, new: type, own_names: Collection[str]) -> Iterator[list[str]]:
    """Give a module a class for good, unless the block raises. The block may send it to other processes.

    Yields the names of the methods that are new, changed or gone.
    """
    old = type(module)
    changed = changed_methods(old, new)
    take_class(module, new)
    try:
        check_train_module(module, own_names)
        with sent_by_value(new):
            yield changed
    except BaseException:
        take_class(module, old)
        raise


def _current(cls: type) -> type:
    """Return the class that has the name of a user's class now; the class itself if there is none."""
    found: Any = None if _is_of_library(cls) else sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) else cls


def _is_of_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in LIBRARIES


def _library_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if _is_of_library(base) and _is_importable(base)]


def _is_importable(cls: type) -> bool:
    """Return whether a class is an attribute of its module; a class that was put together for a checkpoint is not."""
    return getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls


def own_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the methods that the user's own classes define, by name."""
    own = [base for base in reversed(cls.__mro__) if not _is_of_library(base)]
    return {name: value for base in own for name, value in vars(base).items() if callable(value)}


def _fingerprint(method: Callable[..., Any]) -> Any:
    """Return the identity of a method: its code, defaults and marks; not its line numbers."""
    function = inspect.unwrap(method)
    if (code := getattr(function, "__code__", None)) is None:
        return method
    marks = {name: value for name, value in vars(method).items() if name != "__wrapped__"}
    return _of_code(code), repr(getattr(function, "__defaults__", None)), repr(marks)


def _of_code(code: CodeType) -> tuple[Any, ...]:
    constants = [_of_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, tuple(constants)
