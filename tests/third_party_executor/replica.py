"""The driver's end: sends commands, and hands the tokens that arrive to their requests."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from rlite.errors import RliteError, WorkerError
from rlite.runtime.replicas.replica import InFlightRequest, InFlightTable, OnFailure, ServingWorker, WorkerReplica
from rlite.runtime.replicas.workers import Worker, WorkerSet
from rlite.types import PromptLogprobs, TokenChunk


class PushedWorker(ServingWorker, Protocol):
    """A worker that pushes tokens into a socket of the replica."""

    def address(self) -> tuple[int, str]:
        """Return the port that the replica connects to, and what it has to say first. Only the first rank has one."""

    def prompt_logprobs(self, prompts: list[list[int]] | None, num_top: int | None) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens but the first."""


class PushedReplica(WorkerReplica):
    """Listens to one worker. Its thread ends with the connection."""

    def __init__(self, workers: WorkerSet, options: Any, on_failure: OnFailure) -> None:
        super().__init__(workers)
        self._on_failure = on_failure
        self._in_flight = InFlightTable()
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._num_pauses = self._num_paused = 0
        self._is_closing = False
        self._may_score = threading.Event()
        self._may_score.set()
        port, secret = workers.ask(PushedWorker.address)
        self._socket = socket.create_connection((workers.group.devices[workers.ranks[0]].ip, port), timeout=30)
        self._socket.settimeout(None)
        self._send({"secret": secret})
        self._thread = threading.Thread(target=self._listen, name="pushed tokens", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> Exception | None:
        return self._in_flight.failure

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def submit(self, requests: Sequence[InFlightRequest]) -> bool:
        if not self._in_flight.add(requests):
            return False
        self._send({"submit": [asdict(request.remaining_request()) for request in requests]})
        self._send({"cancel": [request.request.request_id for request in requests if request.is_cancelled]})
        return True

    def cancel(self, request_ids: Collection[int] | None) -> None:
        self._send({"cancel": self._in_flight.cancel(request_ids)})

    def pause(self) -> None:
        self._may_score.clear()
        with self._changed:
            self._num_pauses += 1
            number = self._num_pauses
        self._send({"pause": number})
        with self._changed:
            self._changed.wait_for(lambda: self._num_paused >= number or self.failure is not None)

    def resume(self) -> None:
        self._send({"resume": True})
        self._may_score.set()

    def drop(self, error: BaseException) -> None:
        dropped = self._in_flight.clear()
        self._send({"cancel": [request.request.request_id for request in dropped]})
        for request in dropped:
            request.fail(error)

    def prompt_logprobs(self, prompts: Sequence[list[int]], num_top: int) -> list[PromptLogprobs]:
        self._may_score.wait()
        return self.workers.ask(PushedWorker.prompt_logprobs, list(prompts), num_top)

    def close(self) -> None:
        self._is_closing = True
        self._may_score.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=30)
        self._socket.close()

    def _listen(self) -> None:
        try:
            for line in self._socket.makefile():
                self._take(json.loads(line))
        except OSError:
            pass  # as the end of the connection: what is in flight gets an error
        self._end()

    def _take(self, message: dict[str, Any]) -> None:
        if left := self._in_flight.take([TokenChunk(**chunk) for chunk in message.get("chunks", [])]):
            self._send({"cancel": left})
        if "paused" in message:
            with self._changed:
                self._num_paused = message["paused"]
                self._changed.notify_all()

    def _end(self) -> None:
        error: Exception = RliteError("the inference engine was released while this request was in flight")
        if not self._is_closing:
            try:
                self.workers.call(Worker.memory_bytes)  # raises WorkerDied with the name of who died
                error = WorkerError("the worker closed the connection")
            except WorkerError as died:
                error = died
        requests = self._in_flight.fail(error)
        with self._changed:
            self._changed.notify_all()
        self._on_failure(self, requests, error)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the listener notices the end of the connection and says what becomes of the requests
