"""The launcher without processes: every worker lives in the driver, calls run in the caller's thread, `pdb` works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rlite.cluster.group import WorkerGroup
from rlite.cluster.host import Outcome, Whereabouts, WorkerContext, WorkerHost, WorkerKey
from rlite.cluster.placement import Device, DeviceKind
from rlite.parallel.processes import join_alone, leave


class InprocessHandle:
    """Runs each call at once; a lock keeps calls of different threads (training, generation) apart."""

    process = "driver"

    def __init__(self, host: WorkerHost, lock: threading.RLock) -> None:
        self._host = host
        self._lock = lock
        self.death: Future[Any] = Future()

    def create(self, key: WorkerKey, factory: bytes, context: WorkerContext) -> Future[Outcome]:
        return self._run(self._host.create, key, factory, context)

    def call(self, key: WorkerKey, method: str, args: tuple, kwargs: dict) -> Future[Outcome]:
        return self._run(self._host.call, key, method, args, kwargs)

    def apply(self, keys: tuple[WorkerKey | None, ...], function: bytes, args: tuple) -> Future[Outcome]:
        return self._run(self._host.apply, keys, function, args)

    def look(self) -> Future[Whereabouts]:
        future: Future[Whereabouts] = Future()
        future.set_result(self._host.look())
        return future

    def stop(self, key: WorkerKey) -> None:
        self._run(self._host.drop, key)

    def _run(self, act: Callable[..., Outcome], *args: Any) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        with self._lock:
            future.set_result(act(*args))
        return future


class InprocessLauncher:
    """One device, no other process."""

    kind = "inprocess"
    survives_deaths = False

    def __init__(self, device: DeviceKind, num_threads: int | None, call_timeout: float) -> None:
        self.devices: tuple[Device, ...] = (Device("local", 0, "127.0.0.1", device),)
        self._call_timeout = call_timeout
        self._num_threads = num_threads
        self._handle = InprocessHandle(WorkerHost(), threading.RLock())
        join_alone(device)

    def start(self, name: str, devices: Sequence[Device], factory: Callable[[WorkerContext], Any]) -> WorkerGroup:
        group = WorkerGroup(name, devices, [self._handle] * len(devices), self._call_timeout)
        contexts = [
            WorkerContext(
                group=name,
                rank=rank,
                world_size=len(devices),
                local_rank=rank,
                local_world_size=len(devices),
                device=device,
                torch_device="cpu" if device.kind == "cpu" else f"cuda:{device.index}",
                num_threads=self._num_threads or 0,
                world_ranks=(0,),
            )
            for rank, device in enumerate(devices)
        ]
        group.create(factory, contexts, self._call_timeout)
        return group

    def shutdown(self) -> None:
        leave()
