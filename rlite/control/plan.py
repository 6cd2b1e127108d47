"""`JobPlan`: everything that a job's master needs, with the job's classes, and the names of the job's processes.

Classes are found by name or given, plain or decorated by Ray, and checked before anything starts. A plan holds
them as bytes. Only the processes that make their objects unpickle them, so that the master imports none of the user's
libraries.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from rlite.control.spec import JobSpec, Layout, RLRoleType
from rlite.control.workers import BaseTrainer, BaseWorkload
from rlite.errors import ConfigError, did_you_mean
from rlite.runtime.cluster.launcher import Interface, interface_of
from rlite.services.recovery.failover import FailoverPolicy, JobState, WorkloadId


@dataclass(frozen=True)
class WorkloadClass:
    """Class of a role's workloads, for processes that do not import it."""

    label: str
    """module:Class"""
    pickled: bytes
    interface: Interface
    actor_options: Mapping[str, Any]
    """options of `@ray.remote(...)`"""


@dataclass(frozen=True)
class JobClasses:
    """All classes of a job."""

    trainer: bytes
    """pickled; empty for a program, which the job's spec names"""
    workloads: Mapping[RLRoleType, WorkloadClass]


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
    return WorkloadClass(label_of(found), cloudpickle.dumps(found), interface_of(found), options)


def label_of(cls: type) -> str:
    """Return the name of a class: module:Class."""
    return f"{cls.__module__}:{cls.__qualname__}"


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


TRAINER = "TRAINER"
"""role of the trainer's process, in identities and names"""


@dataclass(frozen=True)
class JobPlan:
    """A job that was checked and named."""

    name: str
    submission: str
    """unique id of this submission"""
    spec: JobSpec
    classes: JobClasses
    layout: Layout
    policy: FailoverPolicy
    folder: str
    """working folder of the submitter"""

    def bundles(self) -> dict[int, list[dict[str, float]]]:
        """Return the resources to reserve for each device, by node. Nodes without workloads are left out.

        A program's devices are one bundle.
        """
        kind: str = self.spec.device_type
        if self.spec.is_program:
            return {0: [{kind: float(self.spec.device_per_node)}]}
        bundles = {
            node: [{kind: 1.0} for _ in range(count)] for node, count in enumerate(self.layout.num_devices) if count
        }
        for role, seats in self.layout.seats.items():
            more = {name: amount for name, amount in self.spec.resource_of(role).items() if name != kind and amount}
            for seat in seats if more else ():
                bundle = bundles[seat.node][seat.device]
                bundle |= {name: bundle.get(name, 0.0) + amount for name, amount in more.items()}
        return bundles

    def lives(self, state: JobState) -> dict[RLRoleType, list[WorkloadId]]:
        """Return the current life of every workload."""
        seats = self.layout.seats
        return {role: [state.life(str(role), rank) for rank in range(len(seats[role]))] for role in seats}

    def env(self, role: RLRoleType | None = None) -> dict[str, str]:
        """Return the environment variables of a role's workloads, or of the trainer."""
        own = {} if role is None else self.spec.roles()[role].env
        return {name: str(value) for name, value in {**self.spec.global_env, **own}.items()}


def actor_name(life: WorkloadId) -> str:
    """Return the name of a process within its job: "2.0.1/ACTOR-3"."""
    return f"{life.attempt}.{life.epoch}.{life.incarnation}/{life.role}-{life.rank}"


def trainer_life(run: int) -> WorkloadId:
    """Return the identity of a trainer's process."""
    return WorkloadId(TRAINER, 0, incarnation=run)
