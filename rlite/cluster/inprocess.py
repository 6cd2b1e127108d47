"""The launcher without processes: workers live in the driver, calls run in the caller's thread, and `pdb` works."""

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
    """Handle that runs each call at once. A lock keeps calls of different threads (training, generation) apart."""

    process = "driver"

    def __init__(self, host: WorkerHost, lock: threading.RLock) -> None:
        self._host = host
        self._lock = lock
        self.death: Future[Any] = Future()

    def create(self, key: WorkerKey, factory: bytes, context: WorkerContext) -> Future[Outcome]:
        """Make the worker `key`; see `WorkerHandle`.

        Args:
            key: group name and rank.
            factory: pickled function of the context.
            context: the worker's place.

        Returns:
            The outcome, without a value.
        """
        return self._run(self._host.create, key, factory, context)

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
        return self._run(self._host.call, key, method, args, kwargs)

    def apply(self, keys: tuple[WorkerKey | None, ...], function: bytes, args: tuple) -> Future[Outcome]:
        """Call a pickled function with workers of the process; see `WorkerHandle`.

        Args:
            keys: the workers; None stays None.
            function: the pickled function.
            args: its further arguments.

        Returns:
            The outcome.
        """
        return self._run(self._host.apply, keys, function, args)

    def look(self) -> Future[Whereabouts]:
        """Return the position of the call under way."""
        future: Future[Whereabouts] = Future()
        future.set_result(self._host.look())
        return future

    def stop(self, key: WorkerKey) -> None:
        """Forget the worker."""
        self._run(self._host.drop, key)

    def _run(self, act: Callable[..., Outcome], *args: Any) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        with self._lock:
            future.set_result(act(*args))
        return future


class InprocessLauncher:
    """Launcher of one device without another process."""

    kind = "inprocess"
    survives_deaths = False

    def __init__(self, device: DeviceKind, num_threads: int | None, call_timeout: float) -> None:
        self.devices: tuple[Device, ...] = (Device("local", 0, "127.0.0.1", device),)
        self._call_timeout = call_timeout
        self._num_threads = num_threads
        self._handle = InprocessHandle(WorkerHost(), threading.RLock())
        join_alone(device)

    def start(self, name: str, devices: Sequence[Device], factory: Callable[[WorkerContext], Any]) -> WorkerGroup:
        """Make a group of workers in this process.

        Args:
            name: name of the group.
            devices: one per worker.
            factory: makes a worker from its context.

        Returns:
            The group.
        """
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
        """Leave torch.distributed."""
        leave()
