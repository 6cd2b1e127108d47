"""Processes of a job on a Ray cluster: detached, named actors on reserved devices, and a restartable service.

Detached actors belong to no other process, so they survive the death of the process that started them. Names begin with
the job's name and "/".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle
import ray
from ray._raylet import PlacementGroupID
from ray.exceptions import GetTimeoutError, RayActorError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlite.errors import CallTimeout, ConfigError, JobNotFound, PlacementError, RliteError
from rlite.runtime.cluster.host import Outcome, WorkerKey
from rlite.runtime.cluster.placement import DeviceKind
from rlite.runtime.cluster.ray.host import HostActor, RayHandle
from rlite.runtime.storage.texts import FileStore, MemoryStore, StateStore

NAMESPACE = "rlite"
SERVICE_KEY: WorkerKey = ("service", 0)
ASK_AGAIN_S = 0.2
PATIENCE_S = 60.0
"""seconds that a caller waits for a service that Ray restarts"""
TAKEN = "a job of this name runs on the cluster, or has left processes there; choose another, or end it (rlite stop)"
NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class Reserved:
    """Devices of one node that a job holds."""

    placement: PlacementGroup
    node: str
    ip: str


class Fleet:
    """Actors and devices of one job."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        """Refuse to reserve devices and to start processes from now on, in all threads."""
        with self._lock:
            self._is_closed = True

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold `close` back while something is registered with Ray, so that the end of the job includes it."""
        with self._lock:
            if self._is_closed:
                raise RliteError(f"job {self._job!r} has ended")
            yield

    def reserve(
        self, name: str, bundles: Mapping[int, list[dict[str, float]]], avoid: Sequence[str], timeout: float
    ) -> dict[int, Reserved]:
        """Reserve devices, or find those reserved under this name before. Each part is on one node.

        `timeout`: seconds.
        """
        deadline = time.monotonic() + timeout
        known = self._placements(name)
        selector = [{NODE_LABEL: f"!in({','.join(avoid)})"}] if avoid else []
        names = {number: f"{self._job}/{name}/{number}" for number in bundles}
        for number, part in bundles.items():
            if (full_name := names[number]) not in known:
                selectors = selector * len(part) or None
                with self._open():
                    known[full_name] = placement_group(
                        part, "STRICT_PACK", full_name, lifetime="detached", bundle_label_selector=selectors
                    )
        groups = {number: known[full_name] for number, full_name in names.items()}
        for number, group in groups.items():
            if not group.wait(timeout_seconds=max(1, round(deadline - time.monotonic()))):
                self.release(lambda _: True)
                why = "other jobs hold the devices. Wait for them, or ask for fewer"
                raise PlacementError(f"Ray gave no node with {bundles[number]} within {timeout:g} s: {why}")
        while True:
            ips = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
            nodes = {number: placement_group_table(group)["bundles_to_node_id"][0] for number, group in groups.items()}
            if ips.keys() >= set(nodes.values()):
                return {number: Reserved(group, nodes[number], ips[nodes[number]]) for number, group in groups.items()}
            if time.monotonic() > deadline:
                raise PlacementError(f"a node of the job has died, and Ray gave no other one within {timeout:g} s")
            time.sleep(ASK_AGAIN_S)  # Ray is about to move the devices

    def release(self, is_chosen: Callable[[str], bool]) -> None:
        """Give reservations back, by name."""
        for name, group in self._placements("").items():
            if is_chosen(name.removeprefix(f"{self._job}/")):
                remove_placement_group(group)

    def end(self) -> None:
        """End every process of the job except its master, and return the devices."""
        self.kill(lambda name: name != "master")
        self.release(lambda _: True)

    def start(
        self, name: str, actor_class: Any, place: tuple[Reserved, int] | None, gpu_share: float, env: Mapping[str, str]
    ) -> Any:
        """Start a process.

        `place`: reservation and device; None: any node. Returns the actor handle. The process may not run yet.
        """
        options: dict[str, Any] = {"num_gpus": gpu_share}
        if place is not None:
            reserved, device = place
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(reserved.placement, device)
        if env:
            given = actor_class._default_options.get("runtime_env") or {}
            options["runtime_env"] = {**given, "env_vars": {**given.get("env_vars", {}), **env}}
        with self._open():
            return self._named(name, actor_class, **options).remote()

    def start_on_node(self, name: str, node: str, factory: Callable[[], Any]) -> RayHandle:
        """Start a process that Ray restarts, on a certain node, or find it."""
        actor = self.find(name)
        if actor is None:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            made = self._named(name, HostActor, max_restarts=-1, scheduling_strategy=strategy)
            with self._open():
                actor = made.remote(SERVICE_KEY, cloudpickle.dumps(factory))
        return RayHandle(actor, f"{self._job}/{name}")

    def serve(self, factory: Callable[[], Any]) -> None:
        """Start the job's service, which Ray restarts whenever it dies. `Service` talks to it."""
        made = self._named("master", HostActor, max_restarts=-1)
        try:
            made.remote(SERVICE_KEY, cloudpickle.dumps(factory))
        except ValueError as error:  # names are unique: only one of several submissions gets here
            raise ConfigError(f"job_name={self._job!r}: {TAKEN}") from error

    def names(self) -> list[str]:
        """Return the names of the job's actors."""
        named, prefix = ray.util.list_named_actors(all_namespaces=True), f"{self._job}/"
        ours = [each["name"] for each in named if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)]
        return [name.removeprefix(prefix) for name in ours]

    def find(self, name: str) -> Any | None:
        """Return the actor of a name, or None."""
        with suppress(ValueError):
            return ray.get_actor(f"{self._job}/{name}", NAMESPACE)
        return None

    def kill(self, is_chosen: Callable[[str], bool]) -> None:
        """End actors, by name."""
        for name in self.names():
            if is_chosen(name) and (actor := self.find(name)) is not None:
                ray.kill(actor)

    def _named(self, name: str, actor_class: Any, **options: Any) -> Any:
        return actor_class.options(name=f"{self._job}/{name}", namespace=NAMESPACE, lifetime="detached", **options)

    def _placements(self, name: str) -> dict[str, PlacementGroup]:
        """Return the job's reservations that exist, by their full name."""
        prefix = f"{self._job}/{name}"
        held = {key: each["name"] for key, each in placement_group_table().items() if each["state"] != "REMOVED"}
        groups = ((name, PlacementGroupID(bytes.fromhex(key))) for key, name in held.items() if name.startswith(prefix))
        return {name: PlacementGroup(group) for name, group in groups}


class Service:
    """Client of a job's service. It survives restarts of the service, and travels between processes."""

    def __init__(self, job: str) -> None:
        self._job = job

    @property
    def actor(self) -> Any:
        """Ray actor handle of the service."""
        if (actor := Fleet(self._job).find("master")) is None:
            raise JobNotFound(f"job {self._job!r} does not run on this cluster")
        return actor

    def ask(self, method: str, *args: Any, timeout: float = PATIENCE_S) -> Any:
        """Call a method of the service, again if the service is restarted meanwhile.

        `timeout`: seconds in all.
        """
        deadline, died = time.monotonic() + timeout, None
        while (left := deadline - time.monotonic()) > 0:
            try:
                outcome: Outcome = ray.get(self.actor.host_aside.remote(SERVICE_KEY, method, args, {}), timeout=left)
            except RayActorError as error:  # Ray restarts it, unless its constructor raised
                died = error
                time.sleep(ASK_AGAIN_S)
                continue
            except JobNotFound as error:
                raise error if died is None else JobNotFound(f"{error}: {died}") from died
            except GetTimeoutError:
                break
            return outcome.result(f"{self._job}/master")
        raise CallTimeout(f"the master of job {self._job!r} did not answer {method} within {timeout:g} s")

    def tell(self, method: str, *args: Any) -> None:
        """Call a method of the service without waiting."""
        self.actor.host_aside.remote(SERVICE_KEY, method, args, {})


class RayStore:
    """State store in Ray's key-value store. It lives as long as the cluster's control service."""

    def load(self, name: str) -> str | None:
        """Return the text saved last under a name, or None."""
        found = _internal_kv_get(name, namespace=NAMESPACE)
        return None if found is None else found.decode()

    def save(self, name: str, text: str) -> None:
        """Replace the text of a name."""
        _internal_kv_put(name, text, overwrite=True, namespace=NAMESPACE)

    def remove(self, name: str) -> None:
        """Forget the text of a name, if there is one."""
        _internal_kv_del(name, namespace=NAMESPACE)

    def names(self) -> list[str]:
        """Return all names that have a text."""
        return sorted(key.decode() for key in _internal_kv_list("", namespace=NAMESPACE) if b"/" not in key)


def make_store(kind: str) -> StateStore:
    """Return the state store of a job spec's `store`."""
    if kind == "ray":
        return RayStore()
    return MemoryStore() if kind == "memory" else FileStore(kind)


def keep_plan(job: str, submission: str, plan: Any) -> None:
    """Keep the plan of a submission in Ray's key-value store, for a master that Ray restarts."""
    _internal_kv_put(f"{job}/plan/{submission}", cloudpickle.dumps(plan), namespace=NAMESPACE)


def kept_plan(job: str, submission: str) -> Any:
    """Return the plan of a submission."""
    plan = _internal_kv_get(f"{job}/plan/{submission}", namespace=NAMESPACE)
    if plan is None:
        raise RliteError("Ray's key-value store has lost the plan of the job")
    return cloudpickle.loads(plan)


def drop_plan(job: str, submission: str) -> None:
    """Forget the plan of a submission."""
    _internal_kv_del(f"{job}/plan/{submission}", namespace=NAMESPACE)


def is_restarted() -> bool:
    """Return True in an actor that Ray has restarted."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def capacities(kind: DeviceKind) -> list[int]:
    """Return the number of devices of each living node."""
    resource = "CPU" if kind == "cpu" else "GPU"
    return [int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]]


def living_nodes() -> set[str]:
    """Return the ids of the living nodes."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def own_node() -> str:
    """Return the id of this process's node."""
    return ray.get_runtime_context().get_node_id()


def cluster_address() -> str:
    """Return the address of the cluster, for programs that join it."""
    return ray.get_runtime_context().gcs_address
