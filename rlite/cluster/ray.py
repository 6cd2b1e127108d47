"""The Ray launcher: one actor per worker, one placement group that holds the devices. The only place that knows Ray."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
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
from rlite.cluster.guard import Guard
from rlite.cluster.host import Outcome, WorkerContext, WorkerHost, WorkerKey, default_cpu_slots, worker_name
from rlite.cluster.placement import Device, DeviceKind
from rlite.errors import ConfigError, PlacementError, WorkerDied, WorkerError
from rlite.parallel.processes import join, open_store

GPU_SHARE = 0.02  # of a device's Ray resource per worker, so that up to fifty workers can share it in turns
STOP_TIMEOUT_S = 10.0
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""where `ray start` writes its address; the file outlives a cluster that was killed"""


@ray.remote(max_restarts=0, num_cpus=0, concurrency_groups={"pulse": 1})
class RayHost(WorkerHost):
    """A worker process. Calls run one at a time, in order; `pulse` never returns, so its end tells of a death."""

    @ray.method(concurrency_group="pulse")
    def pulse(self) -> None:
        threading.Event().wait()

    def pid(self) -> int:
        return os.getpid()


class RayHandle:
    """A worker as an actor: calls are its tasks, and its death is the end of `pulse`."""

    def __init__(self, actor: Any, name: str) -> None:
        self._actor = actor
        self._name = name
        self.process = actor._actor_id.hex()
        self.death = self._future(actor.pulse.remote())

    def create(self, key: WorkerKey, factory: bytes, context: WorkerContext) -> Future[Outcome]:
        return self._future(self._actor.create.remote(key, factory, context))

    def call(self, key: WorkerKey, method: str, args: tuple, kwargs: dict) -> Future[Outcome]:
        return self._future(self._actor.call.remote(key, method, args, kwargs))

    def apply(self, keys: tuple[WorkerKey | None, ...], function: bytes, args: tuple) -> Future[Outcome]:
        return self._future(self._actor.apply.remote(keys, function, args))

    def stop(self, key: WorkerKey) -> None:
        """End the process and wait until it is gone, so that its memory is free again."""
        with suppress(RayError):  # Ray itself may be gone
            ray.kill(self._actor)
        with suppress(WorkerDied, FutureTimeout):
            self.death.result(timeout=STOP_TIMEOUT_S)

    def _future(self, ref: ray.ObjectRef) -> Future[Any]:
        answer: Future[Any] = Future()

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            elif isinstance(error, RayActorError):
                answer.set_exception(WorkerDied(f"worker process ended: {self._name}", (self._name,)))
            else:
                answer.set_exception(WorkerError(f"Ray could not deliver a call to {self._name}: {error}"))

        ref.future().add_done_callback(settle)
        return answer


class RayLauncher:
    """Attaches to a Ray cluster, or starts one on this machine, and holds `num_devices` devices of it."""

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
        self._is_connected = not ray.is_initialized()
        try:
            if self._is_connected and not _join(address):
                self._guard = Guard()
                with self._guard.marking():
                    _start(device, num_devices)
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
        """One actor per device; they meet in one torch.distributed world; then every worker is made."""
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
            )
            for rank, device in enumerate(devices)
        ]
        group = WorkerGroup(name, devices, handles, self._call_timeout)
        try:
            self._meet(group)
            group.create(factory, self._contexts(group), self._start_timeout)
        except BaseException:
            group.stop()
            raise
        return group

    def _meet(self, group: WorkerGroup) -> None:
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

    def shutdown(self) -> None:
        if self._placement is not None:
            with suppress(RayError):
                remove_placement_group(self._placement)
        if self._is_connected:
            ray.shutdown()
        if self._guard is not None:
            self._guard.close()


def _join(address: str | None) -> bool:
    """Connect to the cluster at `address`, in RAY_ADDRESS or started on this machine; False: there is none."""
    address = address or os.environ.get("RAY_ADDRESS") or _cluster_here()
    if address:
        try:
            ray.init(address=address, logging_level=logging.ERROR)
        except (ConnectionError, RayError) as error:
            raise ConfigError(f"no Ray cluster answers at address={address!r}: {error}") from error
    return bool(address)


def _cluster_here() -> str | None:
    """The address that `ray start` left on this machine, if something still answers there."""
    with suppress(OSError, ValueError):
        address = CURRENT_CLUSTER.read_text().strip()
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=5.0):
            return address
    return None


def _start(device: DeviceKind, num_devices: int | None) -> None:
    """Start Ray for this program alone."""
    cpus = (num_devices or default_cpu_slots(os.cpu_count() or 1)) if device == "cpu" else None
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.ERROR)


def _reserve(resource: str, num_devices: int | None, timeout: float) -> Any:
    """One placement group with a bundle per device."""
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
