"""Classes of a job: found by name or given, plain or decorated by Ray, and checked before anything starts.

A job's plan holds them as bytes. Only the processes that make their objects unpickle them, so that the master imports
none of the user's libraries.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from rlite.control.spec import RLRoleType
from rlite.control.trainer_process import BaseTrainer
from rlite.control.workload import BaseWorkload
from rlite.errors import ConfigError, did_you_mean
from rlite.runtime.cluster.launcher import Interface, interface_of


@dataclass(frozen=True)
class WorkloadClass:
    """Class of a role's workloads."""

    cls: type[BaseWorkload]
    actor_options: Mapping[str, Any] = field(default_factory=dict)
    """options of `@ray.remote(...)`"""

    @property
    def label(self) -> str:
        """Name of the class: module:Class."""
        return f"{self.cls.__module__}:{self.cls.__qualname__}"


@dataclass(frozen=True)
class JobClasses:
    """All classes of a job."""

    trainer: type[BaseTrainer] | None
    """None: a program, which the job's spec names"""
    workloads: Mapping[RLRoleType, WorkloadClass]

    def packed(self) -> PackedClasses:
        """Return the classes for a plan."""
        trainer = b"" if self.trainer is None else cloudpickle.dumps(self.trainer)
        return PackedClasses(trainer, {role: _packed(each) for role, each in self.workloads.items()})


@dataclass(frozen=True)
class PackedWorkload:
    """Class of a role's workloads, for a process that does not import it."""

    pickled: bytes
    interface: Interface
    actor_options: Mapping[str, Any]


@dataclass(frozen=True)
class PackedClasses:
    """All classes of a job, for a process that imports none of them."""

    trainer: bytes
    """pickled; empty for a program"""
    workloads: Mapping[RLRoleType, PackedWorkload]


def _packed(workload: WorkloadClass) -> PackedWorkload:
    return PackedWorkload(cloudpickle.dumps(workload.cls), interface_of(workload.cls), workload.actor_options)


def workload_class(role: RLRoleType, given: Any) -> WorkloadClass:
    """Return the class of a role's workloads.

    Args:
        role: the role, for messages.
        given: a class, a class under `@ray.remote`, or "module:Class".

    Raises:
        ConfigError: the class cannot be imported, or is no BaseWorkload.
    """
    where = role.lower()
    found, options = _plain(_imported(where, given))
    if not isinstance(found, type) or not issubclass(found, BaseWorkload):
        raise ConfigError(f"{where}: {_name(found)} is not a class that extends rlite.control.BaseWorkload")
    return WorkloadClass(found, options)


def trainer_class(given: Any) -> type[BaseTrainer]:
    """Return the class of a trainer.

    Raises:
        ConfigError: the class cannot be imported, is no BaseTrainer, or lacks `init` or `fit`.
    """
    found, _ = _plain(_imported("trainer", given))
    if not isinstance(found, type) or not issubclass(found, BaseTrainer):
        raise ConfigError(f"trainer: {_name(found)} is not a class that extends rlite.control.BaseTrainer")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"trainer: {found.__name__} does not define {', '.join(missing)}")
    return found


def check_program(module: str) -> None:
    """Check that a trainer's module exists. It is not imported.

    Raises:
        ConfigError: there is no such module.
    """
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"trainer: {module!r} cannot be found: {error}") from error
    if found is None:
        raise ConfigError(
            f"trainer: no module {module!r}; expected a module such as rlite.trainer.ppo, or module:Class"
        )


def _plain(given: Any) -> tuple[Any, dict[str, Any]]:
    if not hasattr(given, "__ray_metadata__"):
        return given, {}
    return importlib.import_module("rlite.runtime.cluster.ray.host").plain_class(given)


def _imported(where: str, given: Any) -> Any:
    if not isinstance(given, str):
        return given
    module_name, _, name = given.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{where}: {given!r}: expected module:Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(f"{where}: {given!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{where}: module {module_name!r} has no {name!r}; {did_you_mean(name, vars(module))}")
    return getattr(module, name)


def _name(found: Any) -> str:
    return getattr(found, "__name__", repr(found))
