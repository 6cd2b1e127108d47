"""The table of executors: a backend for each kind of engine and name."""

from __future__ import annotations

import importlib
from typing import TypeVar, get_args

from rlite.errors import ConfigError, did_you_mean
from rlite.runtime.replicas.workers import Backend, Kind

B = TypeVar("B", bound=Backend)
_backends: dict[tuple[str, str], Backend | str] = {
    ("train", "fsdp2"): "rlite.backends.fsdp2.backend:BACKEND",
    ("inference", "torch"): "rlite.backends.embedded.backend:BACKEND",
    ("inference", "sglang"): "rlite.backends.sglang.backend:BACKEND",
    ("inference", "vllm"): "rlite.backends.vllm.backend:BACKEND",
}


def register_executor(kind: Kind, name: str, backend: Backend | str) -> None:
    """Register an executor, so that `executor=name` finds it.

    Args:
        kind: kind of engine that may use the executor.
        name: name of the executor.
        backend: an `InferenceBackend` or `TrainBackend`, or "module:attribute", imported on first use.
    """
    _backends[kind, name] = backend


def registered_executors(kind: Kind) -> list[str]:
    """Return the names of the executors of a kind, in the order of their registration."""
    return [name for of, name in _backends if of == kind]


def kinds_of(name: str) -> list[Kind]:
    """Return the kinds of engines that have an executor of this name."""
    return [kind for kind in get_args(Kind) if (kind, name) in _backends]


def find_backend(kind: str, name: str, expected: type[B]) -> B:
    """Return the backend that was registered under a name.

    Args:
        kind: "train" or "inference".
        name: the executor's name.
        expected: class of this kind's backends.

    Raises:
        ConfigError: the name is not registered, or its backend has another class.
    """
    if (kind, name) not in _backends:
        known = [n for k, n in _backends if k == kind]
        raise ConfigError(f"unknown {kind} executor {name!r}; {did_you_mean(name, known)}")
    backend = _backends[kind, name]
    if isinstance(backend, str):
        module, attribute = backend.split(":")
        backend = _backends[kind, name] = getattr(importlib.import_module(module), attribute)
    if not isinstance(backend, expected):
        raise ConfigError(
            f"{kind} executor {name!r} is registered with {backend!r:.100}; expected a {expected.__name__}"
        )
    return backend
