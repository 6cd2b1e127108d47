"""The torchrun launcher: rank 0 runs the program, every rank hosts workers, and Ray is not needed.

Rank 0's main thread drives; another thread serves the workers that rank 0 hosts. The other ranks serve in their main
thread until the driver leaves. Messages travel through gloo. Every process runs its calls in the order in which the
driver sent them, which is the same on all ranks, so that collectives of different engines cannot cross.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from rlite.cluster.group import WorkerGroup
from rlite.cluster.guard import end_with_parent
from rlite.cluster.host import Outcome, Whereabouts, WorkerContext, WorkerHost, WorkerKey
from rlite.cluster.placement import Device, DeviceKind
from rlite.errors import PlacementError, WorkerDied, WorkerError
from rlite.parallel.processes import COLLECTIVE_TIMEOUT, backend_for, leave, make_program_a_world

IDLE_TIMEOUT = timedelta(days=365)  # a rank may wait this long for the driver's next call
SHUTDOWN_S = 60.0
"""at shutdown nobody waits for a result any more: a process that is still busy then sits in a collective"""
FAILED_SHUTDOWN_S = 5.0
"""the same where an engine has failed, and a peer that waits for it in a collective will not come back"""
FREE_S = 10.0
"""how long a new engine waits for the calls of engines that were stopped"""
AGENT_S = 60.0
"""how long torchrun's agent may take to accept a connection; where it is gone the answer comes at once"""
LENGTH_TAG, BODY_TAG = 1, 2
LOOK, STOP_LOOKING = b"look", b"stop"

Call = tuple[str, tuple]
"""method of WorkerHost, its arguments"""


def _send(message: bytes, rank: int, group: dist.ProcessGroup) -> None:
    body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    dist.send(torch.tensor([body.numel()]), rank, group=group, tag=LENGTH_TAG)
    dist.send(body, rank, group=group, tag=BODY_TAG)


def _receive(rank: int, group: dist.ProcessGroup) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, rank, group=group, tag=LENGTH_TAG)
    body = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(body, rank, group=group, tag=BODY_TAG)
    return body.numpy().tobytes()


def _refusal(what: str, error: Exception) -> Outcome:
    """Return the answer for a value that cannot be pickled; the process itself is well."""
    reason = WorkerError(f"{what} cannot travel to another process: {type(error).__name__}: {error}")
    return Outcome(error=reason, trace=traceback.format_exc())


class _Process:
    """One rank as the driver sees it: a queue of calls that one thread answers in order."""

    def __init__(
        self, rank: int, perform: Callable[[Call], Outcome], look: Callable[[], Whereabouts], name: str
    ) -> None:
        self.rank = rank
        self._look = look
        self.death: Future[Any] = Future()
        self.dropping: Future[Outcome] | None = None
        """the last worker to be forgotten; not done as long as the process is busy with a call from before"""
        self._name = name
        self._perform = perform
        self._calls: queue.SimpleQueue[tuple[Call, Future[Outcome]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"rlite-rank-{rank}", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> Future[Outcome]:
        """Queue a call.

        Returns:
            The outcome.
        """
        answer: Future[Outcome] = Future()
        self._calls.put((call, answer))
        return answer

    def look(self) -> Future[Whereabouts]:
        """Return the position of the call under way, without waiting for it."""
        answer: Future[Whereabouts] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._look())
            except RuntimeError:  # gloo's, for a lost connection: whoever waits for the call will hear of it
                answer.set_result(Whereabouts())

        threading.Thread(target=ask, daemon=True).start()
        return answer

    def finish(self, deadline: float) -> bool:
        """Wait until the calls are done and the thread has ended.

        Returns:
            False if the thread is stuck.
        """
        self._calls.put(None)
        self._thread.join(max(deadline - time.monotonic(), 0))
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            call, answer = item
            if self.death.done():
                answer.set_exception(self._died())
                continue
            try:
                answer.set_result(self._perform(call))
            except BaseException as error:  # a lost connection is gloo's RuntimeError; here, a method may call exit()
                self.death.set_exception(self._died(error))
                answer.set_exception(self._died(error))

    def _died(self, error: BaseException | None = None) -> WorkerDied:
        return WorkerDied(f"the connection to {self._name} was lost: {error or 'it ended earlier'}", (self._name,))


class TorchrunHandle:
    """Handle of a worker in one of torchrun's processes."""

    def __init__(self, process: _Process) -> None:
        self._process = process
        self.process = process.rank
        self.death = process.death

    def create(self, key: WorkerKey, factory: bytes, context: WorkerContext) -> Future[Outcome]:
        """Make the worker `key`; see `WorkerHandle`.

        Args:
            key: group name and rank.
            factory: pickled function of the context.
            context: the worker's place.

        Returns:
            The outcome, without a value.
        """
        return self._process.submit(("create", (key, factory, context)))

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
        return self._process.submit(("call", (key, method, args, kwargs)))

    def apply(self, keys: tuple[WorkerKey | None, ...], function: bytes, args: tuple) -> Future[Outcome]:
        """Call a pickled function with workers of the process; see `WorkerHandle`.

        Args:
            keys: the workers; None stays None.
            function: the pickled function.
            args: its further arguments.

        Returns:
            The outcome.
        """
        return self._process.submit(("apply", (keys, function, args)))

    def look(self) -> Future[Whereabouts]:
        """Return the position of the call under way."""
        return self._process.look()

    def stop(self, key: WorkerKey) -> None:
        """Forget the worker as soon as the process is free; torchrun's processes live as long as the run."""
        self._process.dropping = self._process.submit(("drop", (key,)))


class TorchrunLauncher:
    """Launcher that every rank builds. On ranks other than 0 the constructor serves and never returns."""

    kind = "torchrun"
    survives_deaths = False

    def __init__(
        self, device: DeviceKind, num_devices: int | None, num_threads: int | None, call_timeout: float
    ) -> None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        if num_devices not in (None, world_size):
            raise PlacementError(
                f"num_devices={num_devices}, but torchrun started {world_size} processes. "
                f"Leave num_devices out, or start torchrun with --nproc_per_node={num_devices}."
            )
        _end_with_agent()
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend_for(device), timeout=COLLECTIVE_TIMEOUT)
        self._control = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        self._looks = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        here = Device(_node_name(), int(os.environ["LOCAL_RANK"]), _node_ip(), device)
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, (here, int(os.environ.get("GROUP_RANK", "0"))), group=self._control)
        places = _told_apart(gathered)
        host = WorkerHost()
        if rank != 0:
            _serve(host, self._control, self._looks)
        self._call_timeout = call_timeout
        self._num_threads = num_threads
        self._rank_of = {place: r for r, place in enumerate(places)}
        self.devices = tuple(sorted(self._rank_of))
        self._processes = [
            _Process(r, self._performer(r, host), self._looker(r, host), f"rank {r} on {place}")
            for r, place in enumerate(places)
        ]
        self._order = threading.RLock()
        self._groups: list[WorkerGroup] = []
        make_program_a_world()

    def _performer(self, rank: int, host: WorkerHost) -> Callable[[Call], Outcome]:
        def here(call: Call) -> Outcome:
            return getattr(host, call[0])(*call[1])

        def there(call: Call) -> Outcome:
            try:
                message = cloudpickle.dumps(call)
            except Exception as error:  # any class of the user's may fail to pickle, in any way
                return _refusal(f"an argument of {call[0]}", error)
            _send(message, rank, self._control)
            answer = _receive(rank, self._control)
            try:
                return cloudpickle.loads(answer)
            except Exception as error:  # as above
                return _refusal(f"the result of {call[0]}", error)

        return here if rank == 0 else there

    def _looker(self, rank: int, host: WorkerHost) -> Callable[[], Whereabouts]:
        def there() -> Whereabouts:
            _send(LOOK, rank, self._looks)
            return cloudpickle.loads(_receive(rank, self._looks))

        return host.look if rank == 0 else there

    def start(self, name: str, devices: Sequence[Device], factory: Callable[[WorkerContext], Any]) -> WorkerGroup:
        """Start a group of workers.

        Args:
            name: name of the group.
            devices: one per worker.
            factory: makes a worker from its context, in its process.

        Returns:
            The group.
        """
        ranks = [self._rank_of[device] for device in devices]
        self._check_free(name, ranks)
        handles = [TorchrunHandle(self._processes[rank]) for rank in ranks]
        group = WorkerGroup(name, devices, handles, self._call_timeout, self._order)
        self._groups.append(group)
        nodes = [device.node for device in devices]
        cores = os.cpu_count() or 1
        contexts = [
            WorkerContext(
                group=name,
                rank=rank,
                world_size=len(devices),
                local_rank=nodes[:rank].count(device.node),
                local_world_size=nodes.count(device.node),
                device=device,
                torch_device="cpu" if device.kind == "cpu" else f"cuda:{device.index}",
                num_threads=self._num_threads or max(1, cores // self._local_world_size),
                world_ranks=tuple(ranks),
            )
            for rank, device in enumerate(devices)
        ]
        group.create(factory, contexts, self._call_timeout)
        return group

    def _check_free(self, name: str, ranks: Sequence[int]) -> None:
        """Check that no process is still in a call of a stopped engine, because nothing can be built there.

        Raises:
            WorkerError: a process is busy.
        """
        dropping = {rank: self._processes[rank].dropping for rank in ranks}
        wait([future for future in dropping.values() if future is not None], timeout=FREE_S)
        busy = [rank for rank, future in dropping.items() if future is not None and not future.done()]
        if busy:
            raise WorkerError(
                f"{name} cannot start on rank {', '.join(map(str, busy))}: a call of a stopped engine is still under "
                "way there, most likely in a collective whose peers are gone. Under torchrun a process cannot be "
                "replaced: end the run and resume it from a checkpoint."
            )

    def shutdown(self) -> None:
        """End the other ranks.

        If a rank is stuck in a collective, the run cannot end well, and this process exits at once.
        """
        for process in self._processes[1:]:
            process.submit(("exit", ()))
            with suppress(RuntimeError):  # that rank is gone
                _send(STOP_LOOKING, process.rank, self._looks)
        has_failed = any(group.failure is not None for group in self._groups)
        deadline = time.monotonic() + (FAILED_SHUTDOWN_S if has_failed else SHUTDOWN_S)
        finished = [process.finish(deadline) for process in self._processes]
        if not all(finished):
            stuck = [process.rank for process, done in zip(self._processes, finished, strict=True) if not done]
            print(f"rlite: rank {stuck} did not finish its last call; the run is ended", file=sys.stderr, flush=True)
            os._exit(1)
        leave()


def _serve(host: WorkerHost, control: dist.ProcessGroup, looks: dist.ProcessGroup) -> None:
    """Answer the driver's calls until it says exit, then end this process: the program runs on rank 0 only."""
    looking = threading.Thread(target=_serve_looks, args=(host, looks), name="rlite-looks", daemon=True)
    looking.start()
    while True:
        message = _receive(0, control)
        try:
            method, args = cloudpickle.loads(message)
        except Exception as error:  # say, a module that is not installed here
            _send(cloudpickle.dumps(_refusal("an argument", error)), 0, control)
            continue
        if method == "exit":
            _send(cloudpickle.dumps(Outcome()), 0, control)
            looking.join()
            leave()
            sys.exit(0)
        _send(_encoded(getattr(host, method)(*args)), 0, control)


def _serve_looks(host: WorkerHost, looks: dist.ProcessGroup) -> None:
    """Tell the driver where this rank's call is, whenever it asks."""
    with suppress(RuntimeError):  # the driver is gone, and so will this process be
        while _receive(0, looks) == LOOK:
            _send(cloudpickle.dumps(host.look()), 0, looks)


def _encoded(answer: Outcome) -> bytes:
    try:
        return cloudpickle.dumps(answer)
    except Exception as error:  # a user's method may return anything
        return cloudpickle.dumps(_refusal("the result", error))


def _end_with_agent() -> None:
    """Make this process end if torchrun's agent is killed.

    Raises:
        WorkerError: the agent is already gone.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return  # whoever set RANK by hand may be gone at any time
    end_with_parent()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # an agent listens there before it starts any rank
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            socket.create_connection(address, timeout=AGENT_S).close()
        except OSError as error:
            raise WorkerError(f"torchrun's agent at {address[0]}:{address[1]} is gone: {error}") from error


def _told_apart(places: Sequence[tuple[Device, int]]) -> list[Device]:
    """Return each rank's device. Several agents on one machine become separate nodes."""
    devices = [device for device, _ in places]
    if len(set(devices)) == len(devices):
        return devices
    return [replace(device, node=f"{device.node}#{agent}") for device, agent in places]


def _node_name() -> str:
    return socket.gethostname()


def _node_ip() -> str:
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1 or master in ("127.0.0.1", "localhost"):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # the address that others see; nothing is sent
        probe.connect((master, int(os.environ["MASTER_PORT"])))
        return probe.getsockname()[0]
