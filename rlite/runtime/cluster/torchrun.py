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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from rlite.errors import PlacementError, WorkerDied, WorkerError
from rlite.runtime.cluster.group import WorkerGroup, WorkerHandle
from rlite.runtime.cluster.guard import end_with_parent
from rlite.runtime.cluster.host import CallPosition, Outcome, WorkerContext, WorkerFactory, WorkerHost, WorkerKey
from rlite.runtime.cluster.launcher import Launcher, SessionOptions
from rlite.runtime.cluster.placement import Device
from rlite.runtime.parallel.processes import COLLECTIVE_TIMEOUT, backend_for, leave, make_program_a_world, unnumbered

IDLE_TIMEOUT = timedelta(days=365)  # a rank may wait this long for the driver's next call
SHUTDOWN_S = 60.0
"""seconds that a busy process may take at shutdown. No call waits for a result then, so the process is stuck in a
collective"""
FAILED_SHUTDOWN_S = 5.0
"""the same if an engine has failed: a peer that waits for the engine in a collective will not return"""
FREE_S = 10.0
"""seconds that a new engine waits for the calls of engines that were stopped"""
AGENT_S = 60.0
"""seconds that torchrun's agent may take to accept a connection; a dead agent refuses at once"""
LOOK, STOP_LOOKING = b"look", b"stop"

Call = tuple[Callable[..., Outcome], tuple] | None
"""method of WorkerHost and its arguments; None ends a process"""


def _send(message: bytes, rank: int, group: dist.ProcessGroup) -> None:
    dist.send_object_list([message], rank, group=group)


def _receive(rank: int, group: dist.ProcessGroup) -> bytes:
    messages: list[Any] = [None]
    dist.recv_object_list(messages, rank, group=group)
    return messages[0]


@contextmanager
def _travelling(what: str) -> Iterator[None]:
    """Explain an exception of pickling or unpickling inside the block. The process itself is unaffected."""
    try:
        yield
    except Exception as error:
        raise WorkerError(f"{what} cannot travel to another process: {type(error).__name__}: {error}") from error


class RemoteHost:
    """The `WorkerHost` of another rank, reached through gloo."""

    def __init__(self, rank: int, control: dist.ProcessGroup, looks: dist.ProcessGroup) -> None:
        self._rank, self._control, self._looks = rank, control, looks

    def perform(self, call: Call) -> Outcome:
        """Send a call; None ends the process."""
        name = "exit" if call is None else call[0].__name__
        try:
            with _travelling(f"an argument of {name}"):
                message = cloudpickle.dumps(call)
            _send(message, self._rank, self._control)
            answer = _receive(self._rank, self._control)
            if call is None:
                _send(STOP_LOOKING, self._rank, self._looks)
            with _travelling(f"the result of {name}"):
                return cloudpickle.loads(answer)
        except WorkerError as error:
            return _refusal(error)

    def look(self) -> CallPosition:
        """Return the position of the call under way."""
        _send(LOOK, self._rank, self._looks)
        return cloudpickle.loads(_receive(self._rank, self._looks))


class LocalHost(WorkerHost):
    """The host of this rank."""

    def perform(self, call: Call) -> Outcome:
        """Perform a call; None does nothing."""
        if call is None:
            return Outcome()
        method, args = call
        return method(self, *args)


class RankProcess(WorkerHandle):
    """One rank as the driver sees it: a queue of calls that one thread performs in order."""

    def __init__(self, rank: int, name: str, host: LocalHost | RemoteHost) -> None:
        self.process, self._name, self._host = rank, name, host
        self.death: Future[Any] = Future()
        self.notice: Future[Any] = Future()
        self.dropping: Future[Outcome] | None = None
        """the last worker to be forgotten; not done as long as the process is busy with a call from before"""
        self._calls: queue.SimpleQueue[tuple[Call, Future[Outcome]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"rlite-rank-{rank}", daemon=True)
        self._thread.start()

    def submit(self, method: Callable[..., Outcome], *args: Any) -> Future[Outcome]:
        """Queue a call; see `WorkerHandle`."""
        answer: Future[Outcome] = Future()
        self._calls.put(((method, args), answer))
        return answer

    def look(self) -> Future[CallPosition]:
        """Return the position of the call under way, without waiting for it."""
        answer: Future[CallPosition] = Future()

        def ask() -> None:
            with suppress(RuntimeError):  # gloo's, for a lost connection: the waiting call reports it
                answer.set_result(self._host.look())

        threading.Thread(target=ask, daemon=True).start()
        return answer

    def stop(self, key: WorkerKey) -> None:
        """Forget the worker as soon as the process is free; torchrun's processes live as long as the run."""
        self.dropping = self.submit(WorkerHost.drop, key)

    def end(self) -> None:
        """End the thread, and the process if it is another one than the driver's, after all calls."""
        self._calls.put((None, Future()))

    def has_ended(self, deadline: float) -> bool:
        """Wait until the calls are done and the thread has ended.

        Returns False if the thread is stuck.
        """
        self._thread.join(max(deadline - time.monotonic(), 0))
        return not self._thread.is_alive()

    def _serve(self) -> None:
        is_ending = False
        while not is_ending:
            call, answer = self._calls.get()
            is_ending = call is None
            if self.death.done():
                answer.set_exception(self._died())
                continue
            try:
                answer.set_result(self._host.perform(call))
            except BaseException as error:  # a lost connection is gloo's RuntimeError; here, a method may call exit()
                self.death.set_exception(self._died(error))
                answer.set_exception(self._died(error))

    def _died(self, error: BaseException | None = None) -> WorkerDied:
        return WorkerDied(f"the connection to {self._name} was lost: {error or 'it ended earlier'}", (self._name,))


class TorchrunLauncher(Launcher):
    """Launcher that every rank builds. On ranks other than 0 the constructor serves and never returns."""

    kind = "torchrun"
    survives_deaths = False

    def __init__(self, options: SessionOptions) -> None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if options.num_devices not in (None, world_size):
            raise PlacementError(
                f"num_devices={options.num_devices}, but torchrun started {world_size} processes. "
                f"Leave num_devices out, or start torchrun with --nproc_per_node={options.num_devices}."
            )
        _end_with_agent()
        local_rank = int(os.environ["LOCAL_RANK"])
        if options.device == "cuda":
            torch.cuda.set_device(local_rank)
        with unnumbered() if world_size == 1 else nullcontext():
            dist.init_process_group(backend_for(options.device), timeout=COLLECTIVE_TIMEOUT)
        control, looks = (dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT) for _ in range(2))
        here = Device(socket.gethostname(), local_rank, _node_ip(), options.device)
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, (here, int(os.environ.get("GROUP_RANK", "0"))), group=control)
        places = _told_apart(gathered)
        host = LocalHost()
        if rank != 0:
            _serve(host, control, looks)
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        self._num_threads = options.num_threads or max(1, (os.cpu_count() or 1) // local_world_size)
        self._call_timeout = options.call_timeout
        self._rank_of = {place: r for r, place in enumerate(places)}
        self.devices = tuple(sorted(self._rank_of))
        self._processes = [
            RankProcess(r, f"rank {r} on {place}", RemoteHost(r, control, looks) if r else host)
            for r, place in enumerate(places)
        ]
        self._order = threading.RLock()
        self._groups: list[WorkerGroup] = []
        make_program_a_world()

    def start(self, name: str, devices: Sequence[Device], factory: WorkerFactory, replica_size: int = 0) -> WorkerGroup:
        """Return a group of workers. They are one replica: when a process dies, torchrun ends all of them."""
        ranks = [self._rank_of[device] for device in devices]
        self._check_free(name, ranks)
        group = WorkerGroup(name, devices, [self._processes[rank] for rank in ranks], self._call_timeout, self._order)
        self._groups.append(group)
        contexts = [
            WorkerContext(rank, len(devices), device, device.torch_name, self._num_threads, tuple(ranks))
            for rank, device in enumerate(devices)
        ]
        group.create(factory, contexts, self._call_timeout)
        return group

    def _check_free(self, name: str, ranks: Sequence[int]) -> None:
        """Check that no process is still in a call of a stopped engine, because nothing can be built there."""
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
        for process in self._processes:
            process.end()
        has_failed = any(group.failure is not None for group in self._groups)
        deadline = time.monotonic() + (FAILED_SHUTDOWN_S if has_failed else SHUTDOWN_S)
        if stuck := [process.process for process in self._processes if not process.has_ended(deadline)]:
            print(f"rlite: rank {stuck} did not finish its last call; the run is ended", file=sys.stderr, flush=True)
            os._exit(1)
        leave()


def _serve(host: LocalHost, control: dist.ProcessGroup, looks: dist.ProcessGroup) -> None:
    """Answer the driver's calls until it says exit, then end this process: the program runs on rank 0 only."""
    looking = threading.Thread(target=_serve_looks, args=(host, looks), name="rlite-looks", daemon=True)
    looking.start()
    is_ending = False
    while not is_ending:
        try:
            message = _receive(0, control)
            with _travelling("an argument"):  # say, of a module that is not installed here
                call = cloudpickle.loads(message)
            is_ending = call is None
            outcome = host.perform(call)
            with _travelling("the result"):
                answer = cloudpickle.dumps(outcome)
        except WorkerError as error:
            answer = cloudpickle.dumps(_refusal(error))
        _send(answer, 0, control)
    looking.join()
    leave()
    sys.exit(0)


def _refusal(error: WorkerError) -> Outcome:
    return Outcome(error=error, trace=traceback.format_exc())


def _serve_looks(host: WorkerHost, looks: dist.ProcessGroup) -> None:
    """Tell the driver where this rank's call is, whenever it asks."""
    with suppress(RuntimeError):  # the driver is gone, and so will this process be
        while _receive(0, looks) == LOOK:
            _send(cloudpickle.dumps(host.look()), 0, looks)


def _end_with_agent() -> None:
    """Make this process end if torchrun's agent is killed."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return  # the process that set RANK by hand may be gone at any time
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


def _node_ip() -> str:
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1 or master in ("127.0.0.1", "localhost"):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # the address that others see; nothing is sent
        probe.connect((master, int(os.environ["MASTER_PORT"])))
        return probe.getsockname()[0]
