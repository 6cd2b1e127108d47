"""Workers in threads of this process, behind the seam of a launcher."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rlite.errors import WorkerDied
from rlite.runtime.cluster.host import CallPosition, Outcome, WorkerHost, WorkerKey


class ThreadHandle:
    """Handle of a host that serves its calls in one thread."""

    process = "thread"

    def __init__(self) -> None:
        self.host = WorkerHost()
        self.death: Future[Any] = Future()
        self._thread = ThreadPoolExecutor(1)

    def submit(self, method: Callable[..., Outcome], *args: Any) -> Future[Outcome]:
        return self._thread.submit(method, self.host, *args)

    def look(self) -> Future[CallPosition]:
        answer: Future[CallPosition] = Future()
        answer.set_result(self.host.look())
        return answer

    def stop(self, key: WorkerKey) -> None:
        self._thread.shutdown(wait=False)

    def end(self) -> None:
        """Seem to die."""
        self.death.set_exception(WorkerDied("worker process ended", ("worker",)))
