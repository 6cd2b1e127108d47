"""Copies of a model, each held by workers, one per device, that are placed, moved and released: what all engines are.

Engines live in the driver, with one `WorkerSet` for each copy. Workers live in the processes that the launcher
starts. An engine's life:

    Engine(...) ── build() ──> on the device ── cpu() ──> offloaded ── cuda() ──> on the device
                                    └────────── meta() ─> released: memory is free, weights are gone;
                                                          cuda("weights") allocates, a sync or load() fills
    release() ends the workers and frees the devices, from any state.
"""

from __future__ import annotations

import inspect
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch

from rlite.errors import ConfigError, ResidencyError, RliteError, UnknownOptionError, did_you_mean
from rlite.runtime.cluster.group import WorkerGroup, apply_on_processes
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.cluster.placement import PlacementRequest
from rlite.runtime.cluster.session import Session, current_session, default_options
from rlite.runtime.parallel.host_memory import give_back_cached_memory
from rlite.runtime.parallel.processes import set_up_device
from rlite.runtime.parallel.shared_memory import check_gpu_sharing
from rlite.runtime.replicas.workers import Backend, Kind, Part, T, Worker, WorkerSet, on_each_process


class Weights(Enum):
    """Location of an engine's weights."""

    DEVICE = "on the device"
    HOST = "offloaded by cpu()"
    EMPTY = "allocated, but not written yet"
    RELEASED = "released by meta()"


class Engine:
    """The base of train and inference engines: building, placement, residency, release.

    Args:
        backend: the executor.
        executor: its name.
    """

    kind: ClassVar[Kind]
    has_independent_replicas: ClassVar[bool] = False
    """no collective joins two replicas, so a replica survives the death of another"""

    def __init__(self, backend: Backend, executor: str) -> None:
        self._backend, self.executor_name, self.name = backend, executor, ""
        self.role = ""
        """purpose of the engine, by which traces and messages name its workers; "": its kind"""
        self.copies: list[WorkerSet] = []
        self._group: WorkerGroup | None = None
        self._session: Session | None = None
        self.weights = Weights.RELEASED
        self.options: Any = None
        self._version = 0
        self._base: str | None = None
        self.proof: tuple[str, Any] | None = None
        """digest of the weights of the last verified sync, and the workers' own checksums; None if there was none"""
        self._factory: Any = None
        """makes a worker from its context, in its process"""
        self._copy_size = 1
        self.sending = threading.Lock()
        """held while a weight sync reads this engine's weights, for which there is one staging memory"""
        self._receiving = threading.Lock()
        """held while a weight sync writes this engine's weights"""

    # -- building ------------------------------------------------------------------------------------------------

    def build(
        self,
        *,
        tensor_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        colocate_with: Engine | Sequence[Engine] | None = None,
        not_colocate_with: Engine | Sequence[Engine] | None = None,
        acceptable_node_ips: Sequence[str] | None = None,
        exclusive: bool = False,
        **executor_options: Any,
    ) -> None:
        """Place the engine and start its workers, with the weights on the device.

        If it raises, no process of this engine is left running.

        Args:
            tensor_parallel_size: number of workers that hold one copy of the model.
            data_parallel_size: number of copies; None is as many as the placement allows.
            colocate_with: share the devices of these engines. Without it an engine takes free devices only.
            not_colocate_with: never share a device with these engines.
            acceptable_node_ips: use only these nodes.
            exclusive: let no other engine share this engine's devices.
            **executor_options: fields of the executor's options. Others are those of `rlite.init(engine_options=...)`,
                or defaults.

        Raises:
            UnknownOptionError: the executor does not know an option. No process was started.
            ConfigError: an option's value, or the checkpoint, cannot be used. No process was started.
            PlacementError: the devices are not available. No process was started.
            Exception: a worker's constructor raised it.
        """
        if self._group is not None and self._group.failure is None:
            raise ConfigError(f"{self.name} is built already; call release() first")
        self.release()  # its workers are gone; building again is the remedy that the failure names
        self.options = self._parse_options(executor_options)
        for name, size in (("tensor_parallel_size", tensor_parallel_size), ("data_parallel_size", data_parallel_size)):
            if size is not None and (not isinstance(size, int) or size < 1):
                raise ConfigError(f"{name}={size!r}: expected a whole number of at least 1")
        self._validate(tensor_parallel_size)
        data_parallel_size = self._num_copies(data_parallel_size)
        colocated, apart = _names(colocate_with), _names(not_colocate_with)
        session = current_session()
        owner = session.new_name(self.role or self.kind)
        placed = session.place(
            PlacementRequest(
                owner=owner,
                executor_size=tensor_parallel_size,
                num_executors=data_parallel_size,
                colocate_with=colocated,
                not_colocate_with=apart,
                acceptable_node_ips=None if acceptable_node_ips is None else tuple(acceptable_node_ips),
                exclusive=exclusive,
            )
        )
        self._copy_size, self.name, self._session = tensor_parallel_size, owner, session
        self._set_factory(self._source())
        try:
            make_room(session, owner)
            replica_size = tensor_parallel_size if self.has_independent_replicas else 0
            self._group = group = session.start(owner, list(chain(*placed)), self._factory, replica_size)
            check_neighbours(session, owner, group)
            self.copies = [self._copy(index) for index in range(len(placed))]
            self._choose_reporters()
            self.weights, self._base = Weights.DEVICE, None
            self._built()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """End the workers and free the devices. The engine can be built again."""
        if self._session is not None:
            self._session.release(self.name)
        self._group, self.copies, self.weights = None, [], Weights.RELEASED

    def _set_factory(self, source: Any) -> None:
        """Let workers that are started from now on be made of this model."""
        self._factory = partial(make_worker, self._backend.worker, source, self.options, self._copy_size)

    def _where(self) -> str:
        """Return the devices, the executor, and the location of the weights, in words."""
        kind = self._session.device if self._session is not None else "cpu"
        return f"{len(self.group)} x {kind}, executor {self.executor_name}, weights {self.weights.value}"

    def _parse_options(self, given: dict[str, Any]) -> Any:
        known = set(inspect.signature(self._backend.options).parameters)
        for key in given.keys() - known:
            everything = known | set(inspect.signature(self.build).parameters) - {"executor_options"}
            hint = did_you_mean(key, everything)
            raise UnknownOptionError(f"executor {self.executor_name!r} does not know the option {key!r}; {hint}")
        defaults = {key: value for key, value in default_options(self.executor_name).items() if key in known}
        return self._backend.options(**defaults | given)

    def _validate(self, copy_size: int) -> None:
        """Refuse a configuration that cannot work, before anything is placed."""

    def _num_copies(self, asked: int | None) -> int | None:
        """Return the number of copies to place; None is as many as the placement allows."""
        return asked

    def _source(self) -> Any:
        """Return the model as the worker's constructor takes it. It is sent to every worker."""

    def _num_peers(self) -> int:
        """Return the number of neighbouring workers that do the same work on the same data."""
        return self.copies[0].size

    def _copy(self, index: int) -> WorkerSet:
        """Return the workers of one copy of the model."""
        return WorkerSet(index, self.group, self._copy_size, self._backend.ranks)

    def _choose_reporters(self) -> None:
        """Let one of the workers that do the same work report its statistics."""
        num_peers = self._num_peers()
        self.group.reporters = range(range(num_peers)[self._backend.ranks.returns], len(self.group), num_peers)

    def _built(self) -> None:
        """Finish building after the workers are ready."""

    @property
    def _workers(self) -> WorkerSet:
        """All workers of the engine together."""
        return WorkerSet(0, self.group, len(self.group), self._backend.ranks)

    def _each(self, act: Callable[[Any], T]) -> list[T]:
        """Return the results of an action on each part of the engine that moves by itself: all workers, or a replica.

        If a part has failed, its failure is raised.
        """
        self._workers.check()
        return [act(self._workers)]

    # -- residency -----------------------------------------------------------------------------------------------

    def cuda(self, *parts: Part | Sequence[Part], **options: Any) -> None:
        """Move everything, or only the named parts, to the device. On a CPU slot the device is CPU.

        Args:
            *parts: "weights", "kv_cache" or both, as arguments or in a list; without any, or with "all", everything.
            **options: refused; `build` places the engine on its devices.

        Raises:
            ConfigError: a part or an option is unknown.
            ResidencyError: there is nothing to move.
        """
        named: list[Any] = list(chain(*(each if isinstance(each, list | tuple | set) else [each] for each in parts)))
        if options or any(part not in ("all", "weights", "kv_cache") for part in named):
            told = ", ".join([*map(repr, parts), *(f"{name}={value!r}" for name, value in options.items())])
            raise ConfigError(f'cuda({told}): expected "weights", "kv_cache", both, or nothing')
        wanted: list[Any] = ["all"] if not named or "all" in named else sorted({*named}, reverse=True)  # weights first
        for part in wanted:
            self._move_to_device(part)

    def _move_to_device(self, what: Part) -> None:
        self.group.check()
        if what == "all" and self.weights is Weights.RELEASED:
            raise ResidencyError(
                f"{self.name} was released by meta(): its weights are gone. Call load() to read them again, or "
                'cuda("weights") and p2p_weight_sync into it, then cuda("kv_cache").'
            )
        with self._moving(what, resident=True):
            make_room(self._session, self.name)
            self._each(lambda resident: resident.to_device(what))
            if what != "kv_cache":
                moved = {Weights.HOST: Weights.DEVICE, Weights.RELEASED: Weights.EMPTY}
                self.weights = moved.get(self.weights, self.weights)

    def cpu(self) -> None:
        """Offload everything to host memory, including optimizer state. A KV cache is dropped."""
        if self.weights in (Weights.EMPTY, Weights.RELEASED):
            return self.meta()  # there is nothing to keep
        self._leave_device(lambda resident: resident.to_cpu(), Weights.HOST)

    def meta(self) -> None:
        """Free all memory, on the device and on the host. The weights are gone."""
        self._leave_device(lambda resident: resident.to_meta(), Weights.RELEASED)

    def _leave_device(self, leave: Callable[[Any], None], weights: Weights) -> None:
        with self._moving("all", resident=False):
            self._each(leave)
            self.weights = weights

    def to(self, device: str | torch.device) -> None:
        """Move everything, as in PyTorch: `to("cuda")`, `to("cpu")`, `to("meta")`.

        Raises:
            ConfigError: the device is unknown.
        """
        moves: dict[str, Callable[[], None]] = {"cuda": self.cuda, "cpu": self.cpu, "meta": self.meta}
        if str(device) not in moves:
            raise ConfigError(f"to({device!r}): expected one of {', '.join(map(repr, moves))}")
        moves[str(device)]()

    @contextmanager
    def _moving(self, what: Part, resident: bool) -> Iterator[None]:
        """Wrap every move of a part to the device or away from it, whether it succeeds or not."""
        yield

    def memory_bytes(self) -> list[dict[str, int]]:
        """Return the bytes that each worker holds, by part: weights, kv_cache, optimizer."""
        return list(chain(*self._each(lambda resident: resident.memory_bytes())))

    # -- access --------------------------------------------------------------------------------------------------

    @property
    def group(self) -> WorkerGroup:
        """The engine's workers.

        Raises:
            RliteError: the engine is not built.
        """
        if self._group is None:
            raise RliteError(f"this {self.kind} engine is not built: call build() first")
        return self._group

    @property
    def is_built(self) -> bool:
        """True while the engine has workers."""
        return self._group is not None

    @property
    def base_id(self) -> str:
        """Text that engines with equal weights share, so far as it is known: adapters belong to one of them."""
        if not self._base:
            self._base = self._fingerprint() if self._base is None else uuid.uuid4().hex
        return self._base

    @base_id.setter
    def base_id(self, text: str) -> None:
        """Set the text. "" stands for weights that no other engine has."""
        self._base = text

    def _fingerprint(self) -> str:
        """Return `base_id` of the weights that the engine has read itself."""
        return uuid.uuid4().hex

    def get_version(self) -> int:
        """Return the policy version of the engine's weights: the number of updates since the start."""
        return self._version

    def set_version(self, version: int) -> None:
        """Set the policy version of the engine's weights, for example after a resume."""
        self._version = version

    @contextmanager
    def receiving_weights(self, on_inflight: str) -> Iterator[None]:
        """Wrap a weight sync into this engine. A second one waits for the first.

        Args:
            on_inflight: "continue" or "abort" generation in flight.

        Raises:
            ResidencyError: the engine has no memory for weights.
        """
        with self._receiving:
            self._need_memory()
            with self._new_weights():
                yield

    @contextmanager
    def _new_weights(self) -> Iterator[None]:
        """Wrap a write of weights from outside. The engine is unusable until all weights have arrived."""
        self.weights = Weights.EMPTY
        yield
        version = self._version + 1
        self._each(lambda resident: resident.weights_changed(version))
        self.weights = Weights.DEVICE
        self._version = version

    def _need_memory(self) -> None:
        if not self.is_built or self.weights not in (Weights.DEVICE, Weights.EMPTY):
            target = f"the target {self.name or self.kind}"
            raise ResidencyError(f'{target} has no memory for weights: call build(), or cuda("weights"), first')

    def has_lost_some_of(self, members: Sequence[WorkerSet]) -> bool:
        """Return whether some of these copies are no longer members, so that a call on the others may succeed."""
        return False

    @property
    def members(self) -> list[WorkerSet]:
        """The copies that take part in calls on all copies."""
        return self.copies

    def _need_weights(self, what: str) -> None:
        """Check that the engine is built and its weights are written and on the device."""
        self.group.check()
        remedy = {
            Weights.HOST: "call cuda() first",
            Weights.EMPTY: "sync weights into it (p2p_weight_sync) or call load() first",
            Weights.RELEASED: 'call load(), or cuda("weights") and p2p_weight_sync into it, first',
        }
        if self.weights is not Weights.DEVICE:
            raise ResidencyError(f"{what}: the weights of {self.name} are {self.weights.value}; {remedy[self.weights]}")


def make_worker(worker: Callable[..., Worker], source: Any, options: Any, size: int, context: WorkerContext) -> Worker:
    """Return the backend's worker, after setting up this worker process."""
    set_up_device(context.torch_device, context.num_threads)
    return worker(context, source, options, size)


def make_room(session: Session | None, owner: str) -> None:
    """Ask all processes on this owner's GPUs to free cached memory, because the owner is about to allocate there."""
    if session is not None and session.device == "cuda":
        on_each_process(session.neighbours(owner), give_back_cached_memory, (), "give back cached memory")


def check_neighbours(session: Session, owner: str, group: WorkerGroup) -> None:
    """Check that this owner's processes can exchange weights with other processes on the same GPUs."""
    if session.device != "cuda":
        return
    ranks = {device: rank for rank, device in enumerate(group.devices)}
    pairs = [(ranks[other.devices[rank]], other, rank) for other, rank in session.neighbours(owner)]
    pairs = [pair for pair in pairs if group.handles[pair[0]].process != pair[1].handles[pair[2]].process]
    if not pairs:
        return
    others = list(dict.fromkeys(other for _, other, _ in pairs))
    calls: list[Any] = [(other, rank, (), ()) for _, other, rank in pairs]
    pids = apply_on_processes(calls, os.getpid, others, "look for a process id", group.call_timeout)
    calls = [(group, own, (), (pid,)) for (own, _, _), pid in zip(pairs, pids, strict=True)]
    apply_on_processes(calls, check_gpu_sharing, [group], "look whether memory can be shared", group.call_timeout)


def _names(engines: Engine | Sequence[Engine] | None) -> tuple[str, ...]:
    engines = [engines] if isinstance(engines, Engine) else engines or []
    if not all(engine.is_built for engine in engines):
        raise ConfigError("an engine named in colocate_with or not_colocate_with is not built; build it first")
    return tuple(engine.name for engine in engines)
