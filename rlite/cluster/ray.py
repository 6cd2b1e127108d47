"""The Ray launcher: one actor per worker, and one placement group that holds the devices. No other module knows Ray."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlite.cluster.group import WorkerGroup
from rlite.cluster.guard import Guard, end_at_sigterm
from rlite.cluster.host import (
    Outcome,
    Whereabouts,
    WorkerContext,
    WorkerHost,
    WorkerKey,
    default_cpu_slots,
    worker_name,
)
from rlite.cluster.placement import Device, DeviceKind
from rlite.errors import ConfigError, PlacementError, WorkerDied, WorkerError
from rlite.parallel.processes import join, keep_for_ever, open_store

logger = logging.getLogger(__name__)

GPU_SHARE = 0.02  # of a device's Ray resource per worker, so that up to fifty workers can share it in turns
STOP_TIMEOUT_S = 10.0
AUTHENTICATES_SINCE = (2, 59)
"""Ray's first version whose local clusters ask for a token unless RAY_AUTH_MODE says otherwise"""
TOKEN = Path.home() / ".ray" / "auth_token"
VISIBILITY = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
CONTROL_PATIENCE_S = 30.0
"""A cluster that rlite did not start may start its control service again. After 60 s Ray itself ends the driver."""
RECONNECT_S = 0.2
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""where `ray start` writes its address; the file outlives a cluster that was killed"""


@ray.remote(max_restarts=0, num_cpus=0, concurrency_groups={"pulse": 1, "look": 1})
class RayHost(WorkerHost):
    """A worker process. Calls run one at a time, in order. `pulse` never returns, so its end signals the death."""

    def __init__(self) -> None:
        super().__init__()
        end_at_sigterm()  # Ray's own handler waits for all calls to return, and `pulse` does not

    @ray.method(concurrency_group="pulse")
    def pulse(self) -> None:
        """Block for ever."""
        threading.Event().wait()

    @ray.method(concurrency_group="look")
    def look(self) -> Whereabouts:
        """Return the position of the call under way, in a concurrency group of its own."""
        return super().look()

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()


class RayHandle:
    """Handle of a worker that is an actor: calls are its tasks, and its death is the end of `pulse`."""

    def __init__(self, actor: Any, name: str, control: ControlService) -> None:
        self._actor = actor
        self._name = name
        self._control = control
        self.process = actor._actor_id.hex()
        self.death = self._future(actor.pulse.remote())

    def create(self, key: WorkerKey, factory: bytes, context: WorkerContext) -> Future[Outcome]:
        """Make the worker `key`; see `WorkerHandle`.

        Args:
            key: group name and rank.
            factory: pickled function of the context.
            context: the worker's place.

        Returns:
            The outcome, without a value.
        """
        return self._future(self._actor.create.remote(key, factory, context))

    def call(self, key: WorkerKey, method: str, args: tuple, kwargs: dict) -> Future[Outcome]:
        """Call a method of a worker; see `WorkerHandle`.

        Args:
            key: group name and rank.
            method: name of the method.
            args: positional arguments.
            kwargs: keyword arguments.

        Returns:
            The outcome.
        """
        return self._future(self._actor.call.remote(key, method, args, kwargs))

    def apply(self, keys: tuple[WorkerKey | None, ...], function: bytes, args: tuple) -> Future[Outcome]:
        """Call a pickled function with workers of the process; see `WorkerHandle`.

        Args:
            keys: the workers; None stays None.
            function: the pickled function.
            args: its further arguments.

        Returns:
            The outcome.
        """
        return self._future(self._actor.apply.remote(keys, function, args))

    def look(self) -> Future[Whereabouts]:
        """Return the position of the call under way."""
        return self._future(self._actor.look.remote())

    def stop(self, key: WorkerKey) -> None:
        """End the process and wait until it is gone, so that its memory is free again."""
        if self._control.is_gone:  # and the call would wait for it
            return
        with suppress(RayError):  # Ray itself may be gone
            ray.kill(self._actor)
        with suppress(WorkerDied, FutureTimeout):
            self.death.result(timeout=STOP_TIMEOUT_S)

    def abandon(self, why: str) -> None:
        """Fail all calls on this worker with WorkerDied."""
        with suppress(InvalidStateError):
            self.death.set_exception(WorkerDied(why, (self._name,)))

    def _future(self, ref: ray.ObjectRef) -> Future[Any]:
        answer: Future[Any] = Future()

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            with suppress(InvalidStateError):  # it was abandoned
                if error is None:
                    answer.set_result(done.result())
                elif isinstance(error, RayActorError):
                    answer.set_exception(WorkerDied(f"worker process ended: {self._name}", (self._name,)))
                else:
                    answer.set_exception(WorkerError(f"Ray could not deliver a call to {self._name}: {error}"))

        ref.future().add_done_callback(settle)
        return answer


class ControlService:
    """Ray's control service (GCS), watched through a connection that ends with it."""

    def __init__(self, address: str, patience_s: float, on_end: Callable[[], None]) -> None:
        host, port = address.rsplit(":", 1)
        self._address = (host.strip("[]"), int(port))
        self._patience_s = patience_s
        self._on_end = on_end
        self._line: socket.socket | None = None
        self._is_closed = False
        self.is_gone = False
        threading.Thread(target=self._watch, name="rlite-ray-control", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._is_closed = True
        if self._line is not None:
            with suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        heard = time.monotonic()
        while not self._is_closed:
            with suppress(OSError), socket.create_connection(self._address, timeout=RECONNECT_S * 10) as self._line:
                self._line.settimeout(None)
                while self._line.recv(4096):  # nothing is asked: it ends the connection now and then, or ends itself
                    pass
                heard = time.monotonic()
                continue
            if not self._is_closed and time.monotonic() - heard >= self._patience_s:
                self.is_gone = True
                self._on_end()
                return
            time.sleep(RECONNECT_S)


class RayLauncher:
    """Launcher that attaches to a Ray cluster, or starts one on this machine, and holds `num_devices` devices of it."""

    kind = "ray"
    survives_deaths = True

    def __init__(
        self,
        device: DeviceKind,
        num_devices: int | None,
        address: str | None,
        num_threads: int | None,
        call_timeout: float,
        start_timeout: float,
    ) -> None:
        self._call_timeout = call_timeout
        self._start_timeout = start_timeout
        self._num_threads = num_threads
        self._placement: Any = None
        self._guard: Guard | None = None
        self._control: ControlService | None = None
        self._started: list[tuple[WorkerGroup, list[RayHandle]]] = []
        check_version(ray.__version__)
        self._is_connected = not ray.is_initialized()
        try:
            if self._is_connected and not _join(address):
                self._guard = Guard()
                with self._guard.marking():
                    _start(device, num_devices)
            address = ray.get_runtime_context().gcs_address
            patience_s = CONTROL_PATIENCE_S if self._guard is None else 0.0
            self._control = ControlService(address, patience_s, self._lose_control)
            self._placement = _reserve("CPU" if device == "cpu" else "GPU", num_devices, start_timeout)
        except BaseException:
            self.shutdown()
            raise
        table = placement_group_table(self._placement)["bundles_to_node_id"]
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        seen: dict[str, int] = {}
        devices: dict[Device, int] = {}
        for bundle, node_id in sorted(table.items()):
            index = seen[node_id] = seen.get(node_id, -1) + 1
            devices[Device(node_id, index, nodes[node_id]["NodeManagerAddress"], device)] = bundle
        self._bundles = devices
        self._per_node = {node_id: last + 1 for node_id, last in seen.items()}
        self._cores = {node_id: int(node["Resources"].get("CPU", 1)) for node_id, node in nodes.items()}
        self.devices = tuple(sorted(devices))

    def start(self, name: str, devices: Sequence[Device], factory: Callable[[WorkerContext], Any]) -> WorkerGroup:
        """Start one actor per device, join them in one torch.distributed world, and make every worker.

        Args:
            name: name of the group.
            devices: one per worker.
            factory: makes a worker from its context, in its process.

        Returns:
            The group.
        """
        assert self._control is not None  # since the constructor
        handles = [
            RayHandle(
                RayHost.options(  # type: ignore[attr-defined]
                    num_gpus=0 if device.kind == "cpu" else GPU_SHARE,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=self._placement,
                        placement_group_bundle_index=self._bundles[device],
                        placement_group_capture_child_tasks=False,
                    ),
                ).remote(),
                worker_name(name, rank, device),
                self._control,
            )
            for rank, device in enumerate(devices)
        ]
        group = WorkerGroup(name, devices, handles, self._call_timeout)
        self._started.append((group, handles))
        try:
            self._meet(group)
            group.create(factory, self._contexts(group), self._start_timeout)
        except BaseException:
            group.stop()
            raise
        return group

    def _meet(self, group: WorkerGroup) -> None:
        blob = cloudpickle.dumps(check_visibility)
        checked = {
            rank: handle.apply((), blob, (device.kind, str(device)))
            for rank, (handle, device) in enumerate(zip(group.handles, group.devices, strict=True))
        }
        group.gather(checked, what="look for the device", timeout=self._start_timeout)
        is_one_node = len({device.node for device in group.devices}) == 1
        ip = "127.0.0.1" if is_one_node else group.devices[0].ip
        opened = group.handles[0].apply((), cloudpickle.dumps(open_store), (ip,))
        (port,) = group.gather({0: opened}, what="open a rendezvous", timeout=self._start_timeout)
        blob = cloudpickle.dumps(join)
        joined = {}
        for rank, (handle, device) in enumerate(zip(group.handles, group.devices, strict=True)):
            own_ip = ip if is_one_node else device.ip
            args = (rank, len(group), ip, port, own_ip, device.kind, self._start_timeout)
            joined[rank] = handle.apply((), blob, args)
        group.gather(joined, what="meet", timeout=self._start_timeout)

    def _contexts(self, group: WorkerGroup) -> list[WorkerContext]:
        nodes = [device.node for device in group.devices]
        contexts = []
        for rank, device in enumerate(group.devices):
            threads = max(1, self._cores[device.node] // self._per_node[device.node])
            if device.kind == "cpu":
                threads = max(1, (os.cpu_count() or 1) // self._per_node[device.node])
            contexts.append(
                WorkerContext(
                    group=group.name,
                    rank=rank,
                    world_size=len(group),
                    local_rank=nodes[:rank].count(device.node),
                    local_world_size=nodes.count(device.node),
                    device=device,
                    torch_device="cpu" if device.kind == "cpu" else "cuda:0",
                    num_threads=self._num_threads or threads,
                    world_ranks=tuple(range(len(group))),
                )
            )
        return contexts

    def _lose_control(self) -> None:
        why = (
            "Ray's control service (GCS) has ended: no worker can be started, stopped or replaced any more. End this "
            "run, start Ray again if it is not rlite's own, and resume from a checkpoint."
        )
        logger.error(why)
        sys.excepthook = sys.__excepthook__  # Ray's asks the control service to note the error
        for group, handles in self._started:
            group.lose(range(len(group)), WorkerError(why))
            for handle in handles:
                handle.abandon(why)

    def shutdown(self) -> None:
        """Return the devices and, if rlite started Ray, end it."""
        is_sound = self._control is None or not self._control.is_gone
        if self._control is not None:
            self._control.close()
        if self._placement is not None and is_sound:
            with suppress(RayError):
                remove_placement_group(self._placement)
        if self._guard is not None and not is_sound:
            self._guard.close(patience_s=0.0)  # Ray would wait for each of them
        if self._is_connected:
            ray.shutdown()
        if self._guard is not None and is_sound:
            self._guard.close()


def _leave_to_parent() -> None:
    """Detach a forked child from Ray.

    Ray's threads do not exist there, so nothing may wait for them or be destroyed.
    """
    if ray.is_initialized():
        atexit.unregister(ray.shutdown)
        atexit.register(_keep_native_objects)
        sys.excepthook = sys.__excepthook__  # Ray's sends the error to the cluster
        if sys.platform == "linux":  # the first of the handlers that exit() calls: the destructors behind it would wait
            libc = ctypes.CDLL(None)
            libc.on_exit(libc._exit, None)


def _keep_native_objects() -> None:
    keep_for_ever(*(each for each in gc.get_referents(*gc.get_objects()) if type(each).__module__ == "ray._raylet"))


os.register_at_fork(after_in_child=_leave_to_parent)


def check_version(version: str) -> None:
    """Refuse a Ray whose local clusters serve anyone who reaches their ports.

    Raises:
        ConfigError: the version is too old.
    """
    if tuple(map(int, version.split(".")[:2])) < AUTHENTICATES_SINCE:
        since = ".".join(map(str, AUTHENTICATES_SINCE))
        raise ConfigError(
            f"Ray {version}: its local clusters do not authenticate, so anyone who reaches this machine could run code "
            f"here. rlite needs ray>={since}: pip install -U 'rlite[ray]'"
        )


def check_visibility(kind: DeviceKind, device: str, environment: Mapping[str, str] = os.environ) -> None:
    """Check in a worker process that its GPU is the only one it sees.

    Args:
        kind: kind of the device.
        device: the device's name for the message.
        environment: the process's environment.

    Raises:
        ConfigError: the process sees all GPUs.
    """
    if kind == "cuda" and environment.get(VISIBILITY, "").lower() in ("1", "true"):
        raise ConfigError(
            f"{device}: {VISIBILITY} is set, so Ray does not restrict a worker to its GPU and every worker would take "
            "the first. Unset it, on every node before `ray start`."
        )


def _join(address: str | None) -> bool:
    """Connect to the cluster at `address`, in RAY_ADDRESS or started on this machine.

    Returns:
        False if there is no cluster.

    Raises:
        ConfigError: no cluster answers at the address.
    """
    address = address or os.environ.get("RAY_ADDRESS") or _cluster_here()
    if address:
        try:
            ray.init(address=address, logging_level=logging.ERROR)
        except (ConnectionError, RayError) as error:
            raise ConfigError(f"no Ray cluster answers at address={address!r}: {error}") from error
    return bool(address)


def _cluster_here() -> str | None:
    """Return the address that `ray start` left on this machine, if a cluster still answers there."""
    with suppress(OSError, ValueError):
        address = CURRENT_CLUSTER.read_text().strip()
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=5.0):
            return address
    return None


def _start(device: DeviceKind, num_devices: int | None) -> None:
    """Start Ray for this program only."""
    cpus = (num_devices or default_cpu_slots(os.cpu_count() or 1)) if device == "cpu" else None
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.ERROR)
    with suppress(OSError):  # there is none if the token comes from the environment
        TOKEN.chmod(0o600)  # Ray lets everyone read it who may enter the home folder


def _reserve(resource: str, num_devices: int | None, timeout: float) -> Any:
    """Return one placement group with a bundle per device.

    Raises:
        PlacementError: the cluster has too few devices, or other jobs hold them.
    """
    by_node = [int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]]
    present = sum(by_node)
    usable = sum(map(default_cpu_slots, by_node)) if resource == "CPU" else present
    count = usable if num_devices is None else num_devices
    if count == 0 or count > present:
        raise PlacementError(
            f"{count or 'some'} devices were asked for (Ray resource {resource}), the cluster has {present}. "
            f"Ask for fewer (num_devices=), or start Ray with more."
        )
    group = placement_group([{resource: 1}] * count, strategy="PACK")
    if not group.wait(timeout_seconds=timeout):
        remove_placement_group(group)
        raise PlacementError(
            f"Ray did not give {count} x {resource} within {timeout:g} s: another job holds them. "
            f"Free now: {ray.available_resources().get(resource, 0):g}. Ask for fewer (num_devices=) or wait for it."
        )
    return group
