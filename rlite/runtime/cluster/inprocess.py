"""The launcher without processes: workers live in the driver, calls run in the caller's thread, and `pdb` works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rlite.runtime.cluster.group import WorkerGroup, WorkerHandle
from rlite.runtime.cluster.host import CallPosition, Outcome, WorkerHost, WorkerKey
from rlite.runtime.cluster.launcher import GroupRequest, Launcher, SessionOptions
from rlite.runtime.cluster.placement import Device
from rlite.runtime.parallel.processes import join_alone, leave


class InprocessHandle(WorkerHandle):
    """Handle that runs each call at once. A lock keeps calls of different threads (training, generation) apart."""

    process = "driver"

    def __init__(self) -> None:
        self.death: Future[Any] = Future()
        self.notice: Future[Any] = Future()
        self._host = WorkerHost()
        self._lock = threading.RLock()

    def submit(self, method: Callable[..., Outcome], *args: Any) -> Future[Outcome]:
        """Call a method of the host; see `WorkerHandle`.

        Args:
            method: such as `WorkerHost.call`.
            *args: its arguments.

        Returns:
            The outcome.
        """
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

    def start(self, request: GroupRequest) -> WorkerGroup:
        """Return the group of a worker, after making it in this process."""
        (device,) = request.devices
        timeout = self._options.call_timeout
        group = WorkerGroup(request.name, request.devices, [self._handle], timeout)
        group.create(request.factory, [device.torch_name], [self._options.num_threads or 0], [0], timeout)
        return group

    def shutdown(self) -> None:
        """Leave torch.distributed."""
        leave()
