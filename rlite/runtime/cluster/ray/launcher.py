"""The Ray launcher: one actor per worker, and one placement group that holds the devices."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import InvalidStateError, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlite.errors import CallTimeout, ConfigError, PlacementError, WorkerDied, WorkerError
from rlite.runtime.cluster.group import WorkerGroup, apply_on_processes, worker_name
from rlite.runtime.cluster.host import WorkerContext, WorkerFactory
from rlite.runtime.cluster.launcher import SessionOptions, default_cpu_slots
from rlite.runtime.cluster.placement import Device, DeviceKind
from rlite.runtime.cluster.ray.connection import ControlService, RayConnection
from rlite.runtime.cluster.ray.fleet import capacities
from rlite.runtime.cluster.ray.host import HostActor, RayHandle
from rlite.runtime.parallel.processes import join, keep_for_ever, open_store

logger = logging.getLogger(__name__)

GPU_SHARE = 0.02  # of a device's Ray resource per worker, so that up to fifty workers can share it in turns
VISIBILITY = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
GRACE_S = 30.0
"""seconds from SIGTERM to the end of a worker, in which its replica can leave; the default of Kubernetes"""
CONTROL_PATIENCE_S = 30.0
"""A cluster that rlite did not start may start its control service again. After 60 s Ray itself ends the driver."""


class RayLauncher:
    """Launcher that attaches to a Ray cluster, or starts one on this machine, and holds `num_devices` devices of it."""

    kind = "ray"
    survives_deaths = True

    def __init__(self, options: SessionOptions) -> None:
        self._options = options
        self._placement: Any = None
        self._control: ControlService | None = None
        self._groups: list[WorkerGroup] = []
        self._grace_s: dict[str, float] = {}
        """by group, how long its workers go on after SIGTERM"""
        self._moving = threading.Lock()
        self._connection = RayConnection(options.device, options.num_devices, options.address)
        try:
            address = ray.get_runtime_context().gcs_address
            patience_s = 0.0 if self._connection.is_own else CONTROL_PATIENCE_S
            self._control = ControlService(address, patience_s, self._lose_control)
            self._placement = _reserve(options)
        except BaseException:
            self.shutdown()
            raise
        table = placement_group_table(self._placement)["bundles_to_node_id"]
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        seen: Counter[str] = Counter()
        self._bundles: dict[Device, int] = {}
        for bundle, node_id in sorted(table.items()):
            device = Device(node_id, seen[node_id], nodes[node_id]["NodeManagerAddress"], options.device)
            self._bundles[device] = bundle
            seen[node_id] += 1
        self.devices = tuple(sorted(self._bundles))
        self._num_threads = {
            node_id: options.num_threads or max(1, _cores(nodes[node_id], options.device) // num_devices)
            for node_id, num_devices in seen.items()
        }

    def start(self, name: str, devices: Sequence[Device], factory: WorkerFactory, replica_size: int = 0) -> WorkerGroup:
        """Return a group of one actor per device, after joining each replica in a torch.distributed world.

        `replica_size`: workers of a replica; 0: all.
        """
        grace_s = self._grace_s[name] = GRACE_S if replica_size else 0.0
        handles = self._actors(name, 0, devices, grace_s)
        group = WorkerGroup(name, devices, handles, self._options.call_timeout, replica_size=replica_size)
        self._groups.append(group)
        try:
            self._make_workers(group, range(len(group)), factory)
        except BaseException:
            group.stop()
            raise
        return group

    def start_replica(self, group: WorkerGroup, first: int, devices: Sequence[Device], factory: WorkerFactory) -> None:
        """Start the workers of one replica beside the others; see `Launcher.start_replica`."""
        handles = self._actors(group.name, first, devices, self._grace_s[group.name])
        ranks = range(first, first + len(devices))
        try:
            devices = self._located(devices, handles)
            self._make_workers(group.with_replica(first, devices, handles), ranks, factory)
            group.take_replica(first, devices, handles)
        except BaseException:
            why = WorkerError(f"{group.name}: this replica could not be started")
            group.with_replica(first, devices, handles).mark_lost(ranks, why)
            raise

    def _located(self, devices: Sequence[Device], handles: Sequence[RayHandle]) -> list[Device]:
        """Return the devices that processes have. Ray gives them others if their node has died."""
        timeout = self._options.start_timeout
        looks = [handle.look() for handle in handles]
        wait(looks, timeout)
        if late := [str(device) for device, look in zip(devices, looks, strict=True) if not look.done()]:
            remedy = "If its node has died, the cluster needs another one with as many free devices"
            raise CallTimeout(f"no process started for {', '.join(late)} within {timeout:g} s. {remedy}")
        with self._moving:
            return [self._moved(device, look.result().node) for device, look in zip(devices, looks, strict=True)]

    def _moved(self, device: Device, node: str) -> Device:
        """Return the device that a bundle has now, after noting it if Ray has moved the bundle to another node."""
        if node == device.node:
            return device
        bundle = self._bundles[device]
        known = [each for each, its_bundle in self._bundles.items() if each.node == node and its_bundle == bundle]
        if known:  # another owner's worker came first
            return known[0]
        assert self._control is not None  # since the constructor
        with self._control.using():
            (ip,) = [each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node]
        index = 1 + max((each.index for each in self._bundles if each.node == node), default=-1)
        moved = replace(device, node=node, index=index, ip=ip)
        self._bundles[moved] = bundle
        self._num_threads.setdefault(node, self._num_threads[device.node])
        logger.warning("%s is at %s now, because Ray moved it to another node", device, moved)
        return moved

    def _actors(self, name: str, first: int, devices: Sequence[Device], grace_s: float) -> list[RayHandle]:
        assert self._control is not None  # since the constructor
        handles = []
        with self._control.using():
            for rank, device in enumerate(devices, first):
                num_gpus = 0 if device.kind == "cpu" else GPU_SHARE
                strategy = PlacementGroupSchedulingStrategy(self._placement, self._bundles[device], False)
                actor = HostActor.options(num_gpus=num_gpus, scheduling_strategy=strategy).remote(grace_s=grace_s)
                handles.append(RayHandle(actor, worker_name(name, rank, device), self._control, grace_s > 0))
        return handles

    def _make_workers(self, group: WorkerGroup, ranks: Sequence[int], factory: WorkerFactory) -> None:
        torch_device = "cpu" if self._options.device == "cpu" else "cuda:0"
        world_ranks = tuple(rank % group.replica_size for rank in range(len(group)))
        contexts = [
            WorkerContext(rank, len(group), device, torch_device, self._num_threads[device.node], world_ranks)
            for rank, device in enumerate(group.devices)
            if rank in ranks
        ]
        self._meet(group, ranks)
        group.create(factory, contexts, self._options.start_timeout)

    def _meet(self, group: WorkerGroup, ranks: Sequence[int]) -> None:
        """Join each replica among these ranks in a world of its own."""
        devices, size, timeout = group.devices, group.replica_size, self._options.start_timeout
        calls: list[Any] = [(group, rank, (), (devices[rank].kind, str(devices[rank]))) for rank in ranks]
        apply_on_processes(calls, check_visibility, [group], "look for the device", timeout)
        is_one_node = len({device.node for device in devices}) == 1
        ips = ["127.0.0.1" if is_one_node else device.ip for device in devices]
        firsts = ranks[::size]
        calls = [(group, rank, (), (ips[rank],)) for rank in firsts]
        opened = apply_on_processes(calls, open_store, [group], "open a rendezvous", timeout)
        ports = dict(zip(firsts, opened, strict=True))
        calls = []
        for rank in ranks:
            first = rank - rank % size
            meeting = (rank % size, size, ips[first], ports[first], ips[rank], devices[rank].kind, timeout)
            calls.append((group, rank, (), meeting))
        apply_on_processes(calls, join, [group], "meet", timeout)

    def _lose_control(self) -> None:
        why = (
            "Ray's control service (GCS) has ended: no worker can be started, stopped or replaced any more. End this "
            "run, start Ray again if it is not rlite's own, and resume from a checkpoint."
        )
        logger.error(why)
        sys.excepthook = sys.__excepthook__  # Python's own: Ray's asks the control service, which is gone
        for group in self._groups:
            group.mark_lost(range(len(group)), WorkerError(why))
            for rank, handle in enumerate(group.handles):
                with suppress(InvalidStateError):  # it is dead already
                    handle.death.set_exception(WorkerDied(why, (group.describe(rank),)))

    def shutdown(self) -> None:
        """Return the devices and, if rlite started Ray, end it."""
        is_sound = self._control is None or not self._control.is_gone
        if self._control is not None:
            self._control.close()
        if self._placement is not None and is_sound:
            with suppress(RayError):
                remove_placement_group(self._placement)
        self._connection.close(is_sound)


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


def check_visibility(kind: DeviceKind, device: str, environment: Mapping[str, str] = os.environ) -> None:
    """Check in a worker process that its GPU is the only one it sees."""
    if kind == "cuda" and environment.get(VISIBILITY, "").lower() in ("1", "true"):
        raise ConfigError(
            f"{device}: {VISIBILITY} is set, so Ray does not restrict a worker to its GPU and every worker would take "
            "the first. Unset it, on every node before `ray start`."
        )


def _cores(node: Mapping[str, Any], device: DeviceKind) -> int:
    """Return the cores of a node. For CPU slots Ray's resource counts the slots."""
    return (os.cpu_count() or 1) if device == "cpu" else int(node["Resources"].get("CPU", 1))


def _reserve(options: SessionOptions) -> Any:
    """Return one placement group with a bundle per device."""
    resource = "CPU" if options.device == "cpu" else "GPU"
    by_node = capacities(options.device)
    present = sum(by_node)
    usable = sum(map(default_cpu_slots, by_node)) if resource == "CPU" else present
    count = usable if options.num_devices is None else options.num_devices
    if count == 0 or count > present:
        told = f"{count or 'some'} devices were asked for (Ray resource {resource}), the cluster has {present}"
        raise PlacementError(f"{told}. Ask for fewer (num_devices=), or start Ray with more.")
    group = placement_group([{resource: 1}] * count, strategy="PACK")
    if not group.wait(timeout_seconds=options.start_timeout):
        remove_placement_group(group)
        raise PlacementError(
            f"Ray did not give {count} x {resource} within {options.start_timeout:g} s: another job holds them. "
            f"Free now: {ray.available_resources().get(resource, 0):g}. Ask for fewer (num_devices=) or wait for it."
        )
    return group
