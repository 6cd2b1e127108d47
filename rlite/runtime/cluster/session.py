"""A program's one session, with its launcher and its ledger of devices, and its end by `rlite.shutdown()`.

The launcher without processes is here, too: workers live in the driver, calls run in the caller's thread, and `pdb`
works.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import count
from typing import Any, Literal, get_args

import torch

from rlite.errors import FORKED, RliteError, WorkerError, refuse
from rlite.runtime.cluster.group import WorkerGroup, WorkerHandle
from rlite.runtime.cluster.host import CallPosition, Outcome, WorkerContext, WorkerFactory, WorkerHost, WorkerKey
from rlite.runtime.cluster.launcher import Launcher, SessionOptions, default_cpu_slots
from rlite.runtime.cluster.placement import Device, Ledger, PlacementRequest
from rlite.runtime.cluster.torchrun import TorchrunLauncher
from rlite.runtime.parallel.processes import join_alone, keep_for_ever, leave

LauncherName = Literal["inprocess", "torchrun", "ray"]
EngineOptions = Mapping[str, Mapping[str, Any]]
"""options of executors, by the name of the executor"""


class InprocessHandle(WorkerHandle):
    """Handle that runs each call at once. A lock keeps calls of different threads (training, generation) apart."""

    process = "driver"

    def __init__(self) -> None:
        self.death: Future[Any] = Future()
        self.notice: Future[Any] = Future()
        self._host = WorkerHost()
        self._lock = threading.RLock()

    def submit(self, method: Callable[..., Outcome], *args: Any) -> Future[Outcome]:
        """Call a method of the host; see `WorkerHandle`."""
        with self._lock:
            return _done(method(self._host, *args))

    def look(self) -> Future[CallPosition]:
        """Return the position of the call under way."""
        return _done(self._host.look())

    def stop(self, key: WorkerKey) -> None:
        """Forget the worker."""
        self.submit(WorkerHost.drop, key)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class InprocessLauncher(Launcher):
    """Launcher of one device without another process."""

    kind = "inprocess"
    survives_deaths = False

    def __init__(self, options: SessionOptions) -> None:
        self.devices: tuple[Device, ...] = (Device("local", 0, "127.0.0.1", options.device),)
        self._options = options
        self._handle = InprocessHandle()
        join_alone(options.device)

    def start(self, name: str, devices: Sequence[Device], factory: WorkerFactory, replica_size: int = 0) -> WorkerGroup:
        """Return the group of a worker, after making it in this process."""
        (device,) = devices
        timeout, num_threads = self._options.call_timeout, self._options.num_threads or 0
        group = WorkerGroup(name, devices, [self._handle], timeout)
        group.create(factory, [WorkerContext(0, 1, device, device.torch_name, num_threads, (0,))], timeout)
        return group

    def shutdown(self) -> None:
        """Leave torch.distributed."""
        leave()


class Session:
    """Devices and their owners. Engines place and release themselves here."""

    def __init__(self, launcher: Launcher, device: str, engine_options: EngineOptions | None) -> None:
        self.launcher, self.device = launcher, device
        self.engine_options = engine_options or {}
        """defaults of the executors' options, by the name of the executor"""
        self._ledger = Ledger(launcher.devices)
        self._groups: dict[str, WorkerGroup] = {}
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(count)
        self._lock = threading.Lock()
        self._closing: dict[str, ExitStack] = {}
        """acts before an owner's release; all of them run, even if one raises"""
        self._pid = os.getpid()

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices."""
        return self._ledger.devices

    @property
    def owners(self) -> tuple[str, ...]:
        """Names of the engines that have workers, oldest first."""
        return tuple(self._groups)

    def new_name(self, kind: str) -> str:
        """Make a name that no other owner in this session has.

        Returns "train-0", "train-1", ...
        """
        with self._lock:
            return f"{kind}-{next(self._numbers[kind])}"

    def place(self, request: PlacementRequest) -> tuple[tuple[Device, ...], ...]:
        """Take devices. If the request is refused, nothing is taken.

        Returns the devices of each executor.
        """
        with self._lock:
            self._ledger, executors = self._ledger.place(request)
        return executors

    def start(self, name: str, devices: Sequence[Device], factory: WorkerFactory, replica_size: int = 0) -> WorkerGroup:
        """Return an owner's workers, after starting them; see `Launcher.start`."""
        self._groups[name] = group = self.launcher.start(name, devices, factory, replica_size)
        return group

    def restart(self, owner: str, replica: int, factory: WorkerFactory) -> None:
        """Start the workers of a lost replica again, on their devices, or on others if their node has died."""
        group = self._groups[owner]
        ranks = group.replica_of(replica * group.replica_size)
        before = [group.devices[rank] for rank in ranks]
        self.launcher.start_replica(group, ranks[0], before, factory)
        after = [group.devices[rank] for rank in ranks]
        if moved := {old: new for old, new in zip(before, after, strict=True) if old != new}:
            with self._lock:  # other owners' workers on the old devices have died with the node, too
                self._ledger = self._ledger.moved(moved)
                for each in self._groups.values():
                    each.devices = tuple(moved.get(device, device) for device in each.devices)

    def grow(self, owner: str, replicas: Sequence[int]) -> None:
        """Take devices for further replicas of an owner. `restart` starts their workers."""
        with self._lock:
            self._ledger, executors = self._ledger.grow(owner, len(replicas))
        for replica, devices in zip(replicas, executors, strict=True):
            self._groups[owner].offer(replica, devices)

    def shrink(self, owner: str, replica: int, why: WorkerError) -> None:
        """Stop the workers of a replica and return its devices."""
        group = self._groups[owner]
        ranks = group.replica_of(replica * group.replica_size)
        group.mark_lost(ranks, why)
        with self._lock:
            self._ledger = self._ledger.shrink(owner, [tuple(group.devices[rank] for rank in ranks)])

    def neighbours(self, owner: str) -> list[tuple[WorkerGroup, int]]:
        """Return the serving workers of other owners on this owner's devices, as (group, rank)."""
        held = set(self._ledger.placements[owner].devices)
        return [
            (group, rank)
            for name, group in self._groups.items()
            for rank, device in enumerate(group.devices)
            if name != owner and device in held and group.is_serving(rank)
        ]

    def before_release(self, owner: str, act: Callable[[], None]) -> None:
        """Call `act` once before the owner's workers end, also at shutdown; engines end their threads there.

        The latest registered act runs first.
        """
        self._closing.setdefault(owner, ExitStack()).callback(act)

    def release(self, owner: str) -> None:
        """Stop the owner's workers and return its devices. Safe to call again, and in a forked child."""
        if os.getpid() != self._pid:
            return
        self._closing.pop(owner, ExitStack()).close()
        if (group := self._groups.pop(owner, None)) is not None:
            group.stop()
        with self._lock:
            if owner in self._ledger.placements:
                self._ledger = self._ledger.release(owner)

    def close(self) -> None:
        """Release every owner, newest first, and end the launcher."""
        with ExitStack() as stack:  # all of it, even if a part raises
            stack.callback(self.launcher.shutdown)
            for owner in self._groups:
                stack.callback(self.release, owner)


_session: Session | None = None
_at_shutdown = ExitStack()
"""ends connections that belong to no session"""
_is_forked = False
"""true if this process was forked from a process with a session"""


def _leave_to_parent() -> None:
    """Detach a forked child: the session and its end belong to the parent."""
    global _session, _is_forked
    _at_shutdown.pop_all()
    if _session is not None:
        keep_for_ever(_session)
        _session, _is_forked = None, True


os.register_at_fork(after_in_child=_leave_to_parent)


def open_session(
    options: SessionOptions, launcher: LauncherName | None, engine_options: EngineOptions | None
) -> Session:
    """Return the program's session, after starting it for `rlite.init`.

    `launcher`: name of the launcher, or None. `engine_options`: defaults of the executors' options, by the name of the
    executor.
    """
    global _session
    if _is_forked:
        raise RliteError(f"rlite.init() {FORKED}")
    device, num_devices = options.device, options.num_devices
    kind = launcher or _default_launcher(device, num_devices)
    has_several = kind == "inprocess" and num_devices not in (None, 1)
    has_no_rank = kind == "torchrun" and "RANK" not in os.environ
    refuse(
        {
            "rlite.init() was called before in this process; call rlite.shutdown() first": _session,
            f"device={device!r}: expected 'cpu' or 'cuda'": device not in ("cpu", "cuda"),
            f"num_devices={num_devices}: expected at least 1": num_devices is not None and num_devices < 1,
            f"launcher={launcher!r}: expected 'inprocess', 'torchrun' or 'ray'": kind not in get_args(LauncherName),
            f"launcher='inprocess' has one device, not {num_devices}; use launcher='ray' or torchrun": has_several,
            "launcher='torchrun' works under `torchrun --nproc_per_node=N program.py`": has_no_rank,
            "more than one device needs Ray (pip install 'rlite[ray]') or torchrun (torchrun --nproc_per_node=N "
            "program.py); num_devices=1 uses one": kind == "ray" and importlib.util.find_spec("ray") is None,
        }
    )
    if kind == "ray":
        started: Launcher = importlib.import_module("rlite.runtime.cluster.ray.launcher").RayLauncher(options)
    else:
        started = InprocessLauncher(options) if kind == "inprocess" else TorchrunLauncher(options)
    _session = Session(started, device, engine_options)
    _shut_down_at_exit()
    return _session


def _default_launcher(device: str, num_devices: int | None) -> LauncherName:
    if "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ:
        return "torchrun"
    if num_devices is None:
        num_devices = torch.cuda.device_count() if device == "cuda" else default_cpu_slots(os.cpu_count() or 1)
    return "inprocess" if num_devices == 1 else "ray"


def has_session() -> bool:
    """Return whether this program has a session."""
    return _session is not None


def current_session() -> Session:
    """Return the session of this program.

    Raises:
        RliteError: the program has no session.
    """
    if _is_forked:
        raise RliteError(f"rlite {FORKED}")
    if _session is None:
        raise RliteError("rlite is not initialised: call rlite.init() first")
    return _session


def has_gpus() -> bool:
    """Return whether this program has a session, and its devices are GPUs."""
    return _session is not None and _session.device == "cuda"


def default_options(executor: str) -> Mapping[str, Any]:
    """Return the defaults that the session has for an executor's options; none without a session."""
    return {} if _session is None else _session.engine_options.get(executor, {})


def at_shutdown(act: Callable[[], None]) -> None:
    """Call `act` once in `rlite.shutdown()`, after the end of the session. The latest registered act runs first."""
    _at_shutdown.callback(act)
    _shut_down_at_exit()


def _shut_down_at_exit() -> None:
    atexit.unregister(shutdown)
    atexit.register(shutdown)  # before Ray's own end, which was registered when Ray was imported


def shutdown() -> None:
    """End the session, stop every worker and return all devices. Safe to call again."""
    global _session
    with _at_shutdown.pop_all():
        if _session is not None:
            session, _session = _session, None
            session.close()
