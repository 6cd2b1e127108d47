"""The seam to a kind of cluster: a launcher starts worker processes, delivers calls, and detects deaths."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

from rlite.errors import ConfigError
from rlite.runtime.cluster.group import WorkerGroup
from rlite.runtime.cluster.host import WorkerFactory
from rlite.runtime.cluster.placement import Device, DeviceKind


@dataclass(frozen=True)
class SessionOptions:
    """Options of `rlite.init`, which documents them, for a launcher."""

    device: DeviceKind
    num_devices: int | None
    address: str | None
    num_threads: int | None
    call_timeout: float
    start_timeout: float


class Launcher(Protocol):
    """Starter of worker processes."""

    kind: str
    devices: tuple[Device, ...]
    survives_deaths: bool
    """the other workers live on when one dies"""

    def start(self, name: str, devices: Sequence[Device], factory: WorkerFactory, replica_size: int = 0) -> WorkerGroup:
        """Start a group of workers.

        `replica_size`: number of neighbouring workers that no collective joins with others; 0: all. A launcher that
        survives deaths makes such workers a replica of the group.
        """

    def start_replica(self, group: WorkerGroup, first: int, devices: Sequence[Device], factory: WorkerFactory) -> None:
        """Start the workers of one replica, in the place of a lost replica or beside the others.

        `first`: first rank of the replica; the number of ranks appends a replica.
        """
        raise ConfigError(f"{group.name}: launcher={self.kind!r} has fixed processes; replicas come and go under Ray")

    def shutdown(self) -> None:
        """End all workers and the launcher's own processes."""


def default_cpu_slots(cores: int) -> int:
    """Return how many CPU devices a node has by default."""
    return min(cores, 8)


@dataclass(frozen=True)
class Interface:
    """Public synchronous methods of a class. It pickles without a reference to the class or its module."""

    name: str
    module: str
    methods: Mapping[str, Mapping[str, Any]]
    """attributes of each method: the signature, without annotations and with None as each default, and those that
    `@ray.method` set"""


def interface_of(cls: type) -> Interface:
    """Return the interface of a class."""
    names = [name for name in dir(cls) if isinstance(inspect.getattr_static(cls, name), FunctionType)]
    functions = {name: getattr(cls, name) for name in names if not name.startswith("_")}
    methods = {name: _method(each) for name, each in functions.items() if not inspect.iscoroutinefunction(each)}
    return Interface(cls.__name__, cls.__module__, methods)


def _method(function: FunctionType) -> dict[str, Any]:
    given, empty = inspect.signature(function).parameters.values(), inspect.Parameter.empty
    bare = [each.replace(annotation=empty, default=empty if each.default is empty else None) for each in given]
    marks = {name: value for name, value in vars(function).items() if name.startswith("__ray_")}
    return {"__signature__": inspect.Signature(bare), **marks}
