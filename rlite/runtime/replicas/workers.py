"""Workers, one per device, which every executor has, and the driver's handle of the workers that hold one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from rlite.errors import WorkerError
from rlite.runtime.cluster.group import WorkerGroup, apply_on_processes
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.parallel.shards import ParameterShard
from rlite.runtime.parallel.shared_memory import SharedArena

Kind = Literal["train", "inference"]
Part = Literal["all", "weights", "kv_cache"]
P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class Worker(Protocol):
    """One process's part of a model: the methods that residency and weight sync need."""

    def to_device(self, what: Part) -> None:
        """Move a part to the device. Weights that were released come back as unwritten memory."""

    def to_cpu(self) -> None:
        """Keep the weights and the optimizer state in host memory alone. Drop the KV cache."""

    def to_meta(self) -> None:
        """Free all memory, on the device and on the host. The weights are gone."""

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """Return this worker's boxes of the parameters, by Hugging Face name. Tied parameters appear once.

        Weight sync writes into these tensors. A worker whose kernels need another layout returns staging tensors, and
        converts them in `weights_changed`.
        """

    def weights_changed(self, version: int) -> None:
        """Serve the weights that were written into `parameter_shards()`. They have this policy version."""

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that this worker holds, by part: weights, kv_cache, optimizer."""


@runtime_checkable
class StagingWorker(Worker, Protocol):
    """A target whose `parameter_shards` are memory on the way into another program."""

    def stage(self, is_near: bool) -> None:
        """Begin a sync with unwritten memory. `is_near` says that the weights come from devices of this engine."""


class SourceWorker(Worker, Protocol):
    """A worker that can be the source of a weight sync."""

    arena: SharedArena | None
    """memory of the parameters on CPU, for other processes to read"""
    staged: Any
    """objects that weight sync keeps alive between two calls"""

    def served_shards(self, has_values: bool = True) -> dict[str, ParameterShard]:
        """Return this worker's boxes under the names and with the values that leave the engine.

        A collective of this worker's copy of the model. Without `has_values` the values are undefined, and the call
        costs neither time nor memory.
        """

    def aliases(self) -> dict[str, str]:
        """Return the other names of tied tensors, each with the name under which the tensor is served."""

    def full_tensor(self, name: str) -> Tensor:
        """Return a served tensor whole. A collective of all ranks."""


@runtime_checkable
class GatheringWorker(SourceWorker, Protocol):
    """A source that gathers a tensor where another process reads it, without a whole copy of its own."""

    def gather_into(self, name: str, out: Tensor) -> None:
        """Write a served tensor whole into `out`, converted to its dtype. A collective of all ranks.

        A rank whose `out` is on meta takes part, and keeps nothing.
        """


@dataclass(frozen=True)
class RankChoice:
    """Ranks, among the workers that compute one thing together, that receive its arguments and return its result.

    Ranks count within these workers. Negative ranks count from the end: a pipeline says `RankChoice((0,), -1)`.
    """

    receives: tuple[int, ...] | None = None
    """ranks that receive the arguments; None is all. The others are called too, with None for each argument"""
    returns: int = 0
    """rank whose result counts"""

    def deal(self, arguments: tuple, size: int) -> list[tuple]:
        """Return the arguments of each of `size` workers."""
        ranks = range(size)
        chosen = set(ranks if self.receives is None else [ranks[rank] for rank in self.receives])
        return [arguments if rank in chosen else (None,) * len(arguments) for rank in ranks]


EVERY_RANK = RankChoice()


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The options and workers of an executor.

    `InferenceBackend` and `TrainBackend` add the fields that their engines need.
    """

    options: type
    """a class, usually `rlite.config.Options`; its fields are the keywords that `build` accepts beside its own"""
    worker: Callable[[WorkerContext, Any, Any, int], Worker]
    """worker(context, source, options, num_workers) returns the worker of one of the `num_workers` that hold a copy;
    runs in the worker process"""
    ranks: RankChoice = EVERY_RANK
    """ranks that receive arguments and return results, among the workers that share one part of the data"""


class Resident(Protocol):
    """Workers that move together and take weights into use together."""

    def check(self) -> None:
        """Raise the failure of workers that no longer serve."""

    def call(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call a declared method on all workers with the same arguments.

        Returns the workers' results, in rank order.
        """

    def to_device(self, what: Part) -> None:
        """Move a part to the device on all workers; see `Worker.to_device`."""
        self.call(Worker.to_device, what)

    def to_cpu(self) -> None:
        """Offload all workers to host memory; see `Worker.to_cpu`."""
        self.call(Worker.to_cpu)

    def to_meta(self) -> None:
        """Free the memory of all workers; see `Worker.to_meta`."""
        self.call(Worker.to_meta)

    def weights_changed(self, version: int) -> None:
        """Serve newly written weights on all workers; see `Worker.weights_changed`."""
        self.call(Worker.weights_changed, version)

    def memory_bytes(self) -> list[dict[str, int]]:
        """Return the bytes that each worker holds, by part."""
        return self.call(Worker.memory_bytes)


@dataclass(frozen=True)
class WorkerSet(Resident):
    """Neighbouring workers of a group that hold one copy of a model: ranks [index * size, (index + 1) * size).

    Workers are called by a method that a protocol declares: `workers.call(Worker.to_device, "weights")`.
    """

    index: int
    group: WorkerGroup
    size: int
    choice: RankChoice = EVERY_RANK
    timeout: float | None = None
    """seconds for each call; None is the session's `call_timeout`"""
    is_shared: bool = False
    """the model is elsewhere, and the first workers of the group stand for each copy"""

    @property
    def ranks(self) -> range:
        """Ranks of the workers in the group."""
        first = 0 if self.is_shared else self.index * self.size
        return range(first, first + self.size)

    def mark_lost(self, error: WorkerError) -> None:
        """Note that the workers are lost, unless they stand for other copies too."""
        if not self.is_shared:
            self.group.mark_lost(self.ranks, error)

    def call(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call a declared method on all workers with the same arguments."""
        return self.group.call(method.__name__, [(args, kwargs)] * self.size, self.ranks, self.timeout)

    def ask(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a declared method once, with the arguments on the ranks that `choice` names."""
        assert not kwargs, "a rank that receives nothing gets None for each positional argument"
        calls: list[Any] = [(each, {}) for each in self.choice.deal(args, self.size)]
        return self.group.call(method.__name__, calls, self.ranks, self.timeout)[self.choice.returns]

    def ask_each(
        self,
        method: Callable[..., Any],
        calls: Sequence[tuple],
        num_peers: int,
        what: str | None = None,
        timeout: float | None = None,
        has_own_statistics: bool = False,
    ) -> list[Any]:
        """Call a declared method on all workers, where each `num_peers` neighbours do the same work.

        `num_peers`: number of neighbours; `choice` names the ranks among them with arguments and results. `timeout`:
        seconds; None is the session's `call_timeout`. Returns one result for each group of peers.
        """
        size = self.size // len(calls)
        dealt: list[Any] = [(args, {}) for call in calls for args in self.choice.deal(call, size)]
        reporters = range(0, self.size, size) if has_own_statistics else None
        results = self.group.call(method.__name__, dealt, timeout=timeout, what=what, reporters=reporters)
        return results[range(num_peers)[self.choice.returns] :: num_peers]

    def check(self) -> None:
        """Raise the failure of workers that no longer serve."""
        self.group.check(self.ranks)


def on_each_process(
    workers: Iterable[tuple[WorkerGroup, int]],
    function: Callable[..., Any],
    args: tuple,
    what: str,
    timeout: float | None = None,
) -> None:
    """Call a function once in every process that hosts one of the workers.

    `timeout`: seconds; None is the session's `call_timeout`.
    """
    hosts = {group.handles[rank].process: (group, rank) for group, rank in workers}
    groups = list(dict.fromkeys(group for group, _ in hosts.values()))
    calls = [(*host, (), args) for host in hosts.values()]
    if groups:
        apply_on_processes(calls, function, groups, what, groups[0].call_timeout if timeout is None else timeout)


def together(residents: Iterable[R], act: Callable[[R], T]) -> list[T]:
    """Run an action on several residents in parallel and wait for all.

    `act`: action; runs in a separate thread for each resident.
    """
    residents = list(residents)
    if len(residents) == 1:
        return [act(residents[0])]
    with ThreadPoolExecutor(len(residents) or 1) as pool:
        results = [pool.submit(copy_context().run, act, resident) for resident in residents]
    return [result.result() for result in results]
