"""`RoleGroup`: calls on all workloads of a role, through the worker groups and the dispatch of the engines.

`@trainer_invocation`: how a role group calls a method of a workload.

Rendezvous of the workloads of each role: the address and the port at which the process of rank 0 listens.
"""

from __future__ import annotations

import inspect
import math
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from rlite.control.spec import RLRoleType
from rlite.data.dispatch import deal
from rlite.errors import CallTimeout, ConfigError, RliteError, UnknownOptionError, WorkerDied, did_you_mean
from rlite.runtime.cluster.group import WorkerGroup, apply_on_processes

Target = Literal["ALL", "RANK0"]
_FLAGS = ("blocking", "is_async", "auto_shard")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """Options of a call from the trainer. Creating one checks them."""

    blocking: bool = True
    """wait for the results; False returns Ray's object references at once"""
    is_async: bool = False
    """if blocking, wait at most `timeout` seconds"""
    timeout: float = 10
    """seconds, for `is_async`; then CallTimeout names the late workloads"""
    target: Target = "ALL"
    """ALL returns one result for each workload, RANK0 the result of rank 0"""
    auto_shard: bool = True
    """split lists that have one item for each target"""
    pre_func: Callable[..., Any] | None = None
    """called in the trainer with the arguments; returns the new argument, or a tuple of new arguments"""
    post_func: Callable[[Any], Any] | None = None
    """called in the trainer with what the call would return; returns what the call returns instead"""

    def __post_init__(self) -> None:
        is_number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        targets = get_args(Target)
        functions = {"pre_func": self.pre_func, "post_func": self.post_func}
        expected = {
            **{name: ("True or False", isinstance(getattr(self, name), bool)) for name in _FLAGS},
            "timeout": ("a number of seconds above 0", is_number and 0 < self.timeout < math.inf),
            "target": (f"'ALL' or 'RANK0'; {did_you_mean(str(self.target), targets)}", self.target in targets),
            **{name: ("a function", made is None or callable(made)) for name, made in functions.items()},
        }
        for name, (what, is_given) in expected.items():
            if not is_given:
                raise ConfigError(f"trainer_invocation({name}={getattr(self, name)!r}): expected {what}")
        if not self.blocking and (self.is_async or self.post_func):
            other = "is_async=True" if self.is_async else "post_func"
            raise ConfigError(f"trainer_invocation(blocking=False, {other}): without blocking there is no result yet")


DEFAULT = Invocation()


def trainer_invocation(**options: Any) -> Callable[[Function], Function]:
    """Return a decorator that states how role groups call a workload's method; `Invocation` has the options.

    Raises:
        UnknownOptionError: an unknown option.
        ConfigError: an option's value cannot work.
    """
    known = Invocation.__dataclass_fields__
    for name in options:
        if name not in known:
            raise UnknownOptionError(f"trainer_invocation({name}=...): unknown option; {did_you_mean(name, known)}")
    invocation = Invocation(**options)

    def mark(function: Function) -> Function:
        function.__rlite_invocation__ = invocation  # type: ignore[attr-defined]
        return function

    return mark


def invocation_of(function: Callable[..., Any]) -> Invocation:
    """Return how role groups call a method."""
    return getattr(function, "__rlite_invocation__", DEFAULT)


LateReport = Callable[[RLRoleType, list[int], str, float], None]
"""takes role, ranks, method and time-out of a call that was not answered in its declared time"""


class RoleGroup:
    """Workloads of one role. Each public method of their class is a method of the group."""

    def __init__(self, role: RLRoleType, cls: type, group: WorkerGroup, on_late: LateReport) -> None:
        """Group workloads.

        Args:
            role: their role.
            cls: their class.
            group: their processes.
            on_late: called before CallTimeout is raised.
        """
        self._role, self._cls, self._group, self._on_late = role, cls, group, on_late
        self._is_whole = threading.Event()
        self._is_whole.set()

    def __len__(self) -> int:
        return len(self._group)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = None if name.startswith("_") else getattr(self._cls, name, None)
        if not callable(function):
            methods = [each for each, _ in inspect.getmembers(self._cls, callable) if not each.startswith("_")]
            told = did_you_mean(name, methods)
            raise AttributeError(f"{self._cls.__name__} ({self._role}) has no method {name!r}; {told}")
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"{self._cls.__name__}.{name} is async; a workload's methods are synchronous")
        return partial(self._invoke, name, invocation_of(function))

    def wait_until_whole(self, timeout: float) -> None:
        """Wait until all workloads serve again, after a call raised WorkerDied.

        Raises:
            CallTimeout: a workload is still missing after `timeout` seconds.
        """
        if not self._is_whole.wait(timeout):
            raise CallTimeout(f"{self._role}: not all of its workloads serve again after {timeout:g} s")

    def _renew(self, group: WorkerGroup) -> None:
        """Call the workloads of another group from now on."""
        self._group = group
        self._is_whole.set()

    def _invoke(self, name: str, how: Invocation, *args: Any, **kwargs: Any) -> Any:
        group = self._group
        if how.pre_func is not None:
            made = how.pre_func(*args, **kwargs)
            args, kwargs = made if isinstance(made, tuple) else (made,), {}
        ranks = [0] if how.target == "RANK0" else list(range(len(group)))
        calls = deal(args, kwargs, len(ranks), how.auto_shard)
        if how.blocking:
            results = self._wait(group, name, calls, ranks, how)
        else:
            group.check(ranks)
            with group.order:
                methods = [getattr(group.handles[rank].actor, name) for rank in ranks]  # type: ignore[attr-defined]
                results = [method.remote(*call[0], **call[1]) for method, call in zip(methods, calls, strict=True)]
        answer = results[0] if how.target == "RANK0" else results
        return answer if how.post_func is None else how.post_func(answer)

    def _wait(self, group: WorkerGroup, name: str, calls: Any, ranks: list[int], how: Invocation) -> list[Any]:
        timeout = how.timeout if how.is_async else None
        try:
            return group.call(name, calls, ranks, timeout, f"{self._role}.{name}")
        except WorkerDied as error:
            if group is self._group:
                self._is_whole.clear()
            raise WorkerDied(
                f"{self._role}.{name}: no result, workloads ended: {'; '.join(error.workers)}. The job's policy "
                "decides what happens. To go on without this call, catch WorkerDied and call wait_until_whole().",
                error.workers,
            ) from None
        except CallTimeout as error:
            if how.is_async:
                late = [rank for rank in ranks if group.describe(rank) in error.late]
                self._on_late(self._role, late, name, how.timeout)
            raise


def role_groups(groups: Iterable[RoleGroup]) -> dict[str, RoleGroup]:
    """Return groups by their name on a trainer."""
    return {group._role.group: group for group in groups}


class UnboundGroup(RliteError, AttributeError):
    """A role group was used before it exists, or belongs to a role that the job does not have."""


class StaleRendezvous(RliteError):
    """A workload cannot be restarted beside its peers, because their rendezvous is no longer valid."""


class Rendezvous:
    """Rendezvous of all roles.

    `timeout`: seconds for a process to hold a port.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.known: dict[RLRoleType, tuple[str, int]] = {}
        """address and port, by role"""

    def make(self, role: RLRoleType, group: WorkerGroup) -> None:
        """Let the process of rank 0 hold a free port for new workloads of a role."""
        address = "127.0.0.1" if _is_on_one_node(group) else group.devices[0].ip
        self.known[role] = (address, self._hold(group, address, 0))

    def keep(self, role: RLRoleType, group: WorkerGroup, rank: int) -> None:
        """Check that the rendezvous which the peers of a new workload know is valid, and hold its port for rank 0."""
        if role not in self.known:
            raise StaleRendezvous(f"no workload of {role} knows the rendezvous of its peers")
        address, port = self.known[role]
        now = group.devices[0].ip
        if address != now and not (address == "127.0.0.1" and _is_on_one_node(group)):
            raise StaleRendezvous(f"the peers of {role} expect rank 0 at {address}:{port}, and it is at {now} now")
        if rank != 0:
            return
        try:
            self._hold(group, address, port)
        except OSError as error:
            raise StaleRendezvous(f"the peers of {role} expect rank 0 at {address}:{port}: {error}") from error

    def _hold(self, group: WorkerGroup, address: str, port: int) -> int:
        """Return a port that the process of rank 0 holds: this one, or a free one for 0."""
        calls = [(group, 0, (), (address, port))]
        (held,) = apply_on_processes(calls, hold_port, [group], "hold a port", self._timeout)
        return held


def _is_on_one_node(group: WorkerGroup) -> bool:
    return len({device.node for device in group.devices}) == 1


_held: list[socket.socket] = []
"""sockets that keep the rendezvous ports of this process's workloads"""


def hold_port(address: str, port: int = 0) -> int:
    """Keep a port of this process for a later rendezvous.

    The socket is bound and does not listen. Linux then gives the port to no program that asks for a free port, and
    still lets a server with SO_REUSEADDR (torch's store) bind it.

    `port`: a certain port; 0 takes a free one.
    """
    line = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    line.bind(("", port))
    _held.append(line)
    return line.getsockname()[1]
