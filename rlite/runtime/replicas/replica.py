"""The seam between an inference engine and its executors: a replica is one served copy of the model.

    generate / agenerate ──> router ──submit(requests)──> replica ──> whatever generates
              ^                                              │
              └───── InFlightRequest.take(chunk), as tokens are made, in a thread of the replica's

A replica is an object in the driver. It may pump synchronous workers, as the embedded executor does, or let an
asynchronous engine or a server push tokens at it. The engine sees no difference.

The module also holds the options that inference executors share.
"""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, Concatenate, Literal, NamedTuple, Protocol

from annotated_types import Ge, Gt, Le
from transformers import PreTrainedConfig

from rlite.config import Count, Options
from rlite.errors import ConfigError, DataError, NonFiniteError
from rlite.runtime.parallel.tensor import attention_shape
from rlite.runtime.replicas.adapters import AdapterWeights
from rlite.runtime.replicas.workers import Backend, P, Resident, T, Worker, WorkerSet
from rlite.types import LLMRequest, LLMResponse, PromptLogprobs, SequenceRequest, StopReason, TokenChunk


class ExecutorOptions(Options):
    """Options that every inference executor has."""

    max_model_len: Annotated[int, Ge(2)] | None = None
    """longest sequence, prompt and completion together; default: the model's own limit, with executor torch at most
    4096"""
    max_num_seqs: Count = 128
    """sequences decoded together"""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.9
    """fraction of a GPU's memory for weights and KV cache. On CPU, executor torch does not use it, and executor vllm
    takes at most this fraction of the free memory for the KV cache"""
    dtype: Literal["float32", "float16", "bfloat16", "float64"] | None = None
    """type of weights and KV cache; default: the checkpoint's"""
    seed: int = 0
    """seed of requests without a seed of their own"""


class WrappedOptions(ExecutorOptions):
    """Options of an executor that wraps another program, beside the program's own arguments."""

    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """type of weights and KV cache; default: the checkpoint's"""


class RoutedOptions(WrappedOptions):
    """Options of a program that can return the experts that a mixture of experts chose."""

    enable_return_routed_experts: bool = False
    """let requests ask for `routed_experts`, the experts that a mixture of experts chose; routing replay sets it"""


def annotated_names(source: Path, classes: Collection[str] = ()) -> frozenset[str]:
    """Return the public annotated names in the bodies of classes, from a source file that is not imported.

    `classes`: names of the classes; () is all.
    """
    tree = ast.parse(source.read_text(encoding="utf-8"), str(source))
    found = [c for c in tree.body if isinstance(c, ast.ClassDef) and (not classes or c.name in classes)]
    targets = [node.target for c in found for node in c.body if isinstance(node, ast.AnnAssign)]
    return frozenset(t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_"))


class _Signature:
    """The signature of a class of options: its fields, and every argument that it passes on."""

    def __get__(self, instance: object, owner: type[PassingOptions]) -> Signature:
        own = owner.fields.model_fields
        names = [*own, *sorted(owner.arguments() - own.keys())]
        return Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])


class PassingOptions:
    """Options of an executor that passes arguments on to another program as they are."""

    __signature__ = _Signature()
    executor: ClassVar[str]
    fields: ClassVar[type[WrappedOptions]] = WrappedOptions
    reserved: ClassVar[Mapping[str, str]]
    """arguments of the program that rlite sets, with the reason or the option to use instead"""

    max_model_len: int | None
    max_num_seqs: int
    gpu_memory_utilization: float
    dtype: str | None
    seed: int

    def __init__(self, **values: Any) -> None:
        for name in self.reserved.keys() & values.keys():
            raise ConfigError(f"executor {self.executor!r} does not take {name}: {self.reserved[name]}")
        names = type(self).arguments() - self.fields.model_fields.keys()
        self.passed_on = {name: value for name, value in values.items() if name in names}
        """arguments of the program"""
        own = self.fields(**{name: value for name, value in values.items() if name not in names})
        vars(self).update(own.model_dump())

    @classmethod
    def arguments(cls) -> frozenset[str]:
        """Return the names of the installed program's arguments that may be given."""
        raise NotImplementedError


class OptionalColumn(NamedTuple):
    """A column that an executor returns if an option of `build` is true."""

    option: str
    obstacle: Callable[[Mapping[str, Any]], str]
    """obstacle(options): why the option cannot be true beside others; "" if it can"""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Optional abilities of an inference executor. The engine refuses a call that needs a missing one."""

    has_prompt_logprobs: bool = False
    """`Replica.prompt_logprobs` works"""
    has_residency: bool = True
    """weights and KV cache can leave the device and come back while the replica lives"""
    has_weight_sync: bool = True
    """weight sync may write into `Worker.parameter_shards()` of the replica's workers"""
    sync_obstacle: Callable[[Mapping[str, Any]], str] = lambda options: ""
    """sync_obstacle(options): why the options of `build` do not allow weight sync; "" if they do"""
    has_shared_weights: bool = False
    """engines with the same options serve the same weights"""
    has_readable_weights: bool = False
    """`parameter_shards()` holds the served weights at any time, so a replica that joins can copy them; otherwise it
    joins at the next weight sync"""
    adapter_obstacle: Callable[[Mapping[str, Any], int], str] | None = None
    """adapter_obstacle(options, rank): why the options of `build` do not let replicas serve adapters of this rank; ""
    if they do, and the workers are `AdapterWorker`s of a `PumpedReplica`. None: the executor serves none"""
    extras: frozenset[str] = frozenset()
    """names of the columns beside tokens and log-probabilities that a request may ask for"""
    optional_extras: Mapping[str, OptionalColumn] = field(default_factory=dict)
    """columns that a request may ask for if the engine is built with an option"""

    def extras_with(self, options: Mapping[str, Any]) -> frozenset[str]:
        """Return the columns that a request may ask for if the engine is built with these options."""
        return self.extras | {name for name, column in self.optional_extras.items() if options.get(column.option)}

    def options_for(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of `build` that let a request ask for a column."""
        if name in self.extras:
            return {}
        if (column := self.optional_extras.get(name)) is None or (obstacle := column.obstacle(options)):
            raise ConfigError(f"it has no {name}" if column is None else obstacle)
        return {column.option: True}


class OutstandingTokens:
    """Counter of the tokens that one replica may still have to read or write."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, num: int) -> None:
        """Add tokens, or remove them if `num` is negative."""
        with self._lock:
            self.count += num


@dataclass(eq=False)
class InFlightRequest:
    """A request in flight: the tokens that have arrived, and the future of its caller."""

    request: SequenceRequest
    on_chunk: Callable[[TokenChunk], object] | None = None
    """called with every chunk in the thread that delivers it; an exception ends this request"""
    done: Future[InFlightRequest] = field(default_factory=Future)
    started: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0
    ended: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """columns with an entry for each token"""
    finish_reason: StopReason = "abort"
    is_cancelled: bool = False
    """the caller no longer waits for tokens"""
    _outstanding: OutstandingTokens | None = None

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()  # else a task that stops waiting would cancel it

    def remaining_request(self) -> SequenceRequest:
        """Return the request for a replica, with the tokens that a lost replica has generated, if there are any."""
        return replace(self.request, output_ids=list(self.token_ids)) if self.token_ids else self.request

    @property
    def cost(self) -> int:
        """Number of tokens that this request may still need."""
        return len(self.request.input_ids) + self.request.gconfig.max_new_tokens - len(self.token_ids)

    def count_at(self, outstanding: OutstandingTokens | None) -> None:
        """Add the cost to this replica's counter, and remove it from the previous replica's counter."""
        if self._outstanding is not None:
            self._outstanding.add(-self.cost)
        self._outstanding = outstanding
        if outstanding is not None:
            outstanding.add(self.cost)

    def take(self, chunk: TokenChunk) -> bool:
        """Append a chunk.

        Returns whether the request has ended.
        """
        chunk = _over_kept_ids(chunk)
        num = len(chunk.token_ids)
        if num and not self.token_ids:
            self.first_token = time.perf_counter()
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.sampling_logprobs += chunk.sampling_logprobs
        self.versions += [chunk.version] * num
        for name, column in chunk.extras.items():
            self.extras.setdefault(name, []).extend(column)
        if self._outstanding is not None:
            self._outstanding.add(-num)
        if (on_chunk := self.on_chunk) is not None:  # another thread may end the request
            try:
                on_chunk(chunk)
            except Exception as error:  # any error belongs to this request; the replica serves others too
                self.fail(error)
                return True
        if chunk.error is not None:
            self.fail((NonFiniteError if chunk.is_nonfinite else DataError)(chunk.error))
        elif chunk.finish_reason is not None and not self.done.done():
            self.finish_reason = chunk.finish_reason
            self._end()
            self.done.set_result(self)
        return self.done.done()

    def response(self, request: LLMRequest) -> LLMResponse:
        """Return the completion, which has ended, as the answer to `request`."""
        return LLMResponse(
            input_tokens=list(request.input_ids),
            output_tokens=self.token_ids,
            output_logprobs=self.logprobs,
            output_versions=self.versions,
            stop_reason=self.finish_reason,
            latency=self.ended - self.started,
            ttft=(self.first_token or self.ended) - self.started,
            sampling_logprobs=self.sampling_logprobs,
            metadata=dict(request.metadata),
            extras={name: self.extras.get(name, []) for name in request.extras},
        )

    def abort(self) -> None:
        """End the request with the tokens that have arrived, without asking the replica."""
        version = self.versions[-1] if self.versions else 0
        self.take(TokenChunk(request_id=self.request.request_id, version=version, finish_reason="abort"))

    def fail(self, error: BaseException) -> None:
        """End the request with an error, unless it has ended."""
        if not self.done.done():
            self._end()
            self.done.set_exception(error)

    def _end(self) -> None:
        # the future holds this request, and the caller's function its episode: both would wait for a garbage collection
        self.ended, self.on_chunk = time.perf_counter(), None
        self.count_at(None)


class InFlightTable:
    """The requests of one replica that have not ended, by number. Its methods are thread-safe."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        """the reason why no further request is accepted"""
        self._requests: dict[int, InFlightRequest] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, requests: Sequence[InFlightRequest]) -> bool:
        """Add requests.

        Returns False, with nothing added, if the replica has failed.
        """
        with self._lock:
            if self.failure is None:
                self._requests.update({request.request.request_id: request for request in requests})
            return self.failure is None

    def take(self, chunks: Sequence[TokenChunk]) -> list[int]:
        """Pass chunks to their requests.

        Returns numbers of requests that ended here while the worker still runs them.
        """
        left = []
        for chunk in chunks:
            is_last = chunk.finish_reason is not None or chunk.error is not None
            # the request leaves before its last chunk arrives: its waiting caller finds it gone
            request = self._pop(chunk.request_id) if is_last else self._requests.get(chunk.request_id)
            if request is not None and request.take(chunk) and not is_last:
                self._pop(chunk.request_id)
                left.append(chunk.request_id)
        return left

    def _pop(self, number: int) -> InFlightRequest | None:
        with self._lock:
            return self._requests.pop(number, None)

    def cancel(self, request_ids: Collection[int] | None) -> list[int]:
        """Mark requests as cancelled; None marks all.

        Returns the numbers of marked requests.
        """
        with self._lock:
            here = [n for n in (self._requests if request_ids is None else request_ids) if n in self._requests]
            for number in here:
                self._requests[number].is_cancelled = True
            return here

    def clear(self, failure: Exception | None = None) -> list[InFlightRequest]:
        """Remove all requests. With a failure, accept no further requests."""
        with self._lock:
            self.failure = self.failure or failure
            requests, self._requests = list(self._requests.values()), {}
            return requests

    def fail(self, error: Exception) -> list[InFlightRequest]:
        """Accept no further requests and end cancelled requests with their tokens.

        Returns the other requests, which have not ended.
        """
        requests = self.clear(error)
        for request in (request for request in requests if request.is_cancelled):
            request.abort()
        return [request for request in requests if not request.done.done()]


def _over_kept_ids(chunk: TokenChunk) -> TokenChunk:
    """Return a chunk whose log-probabilities are over the kept ids, for the tokens that have any."""
    kept_ids = chunk.extras.get("kept_ids")
    if not kept_ids:
        return chunk
    values = zip(kept_ids, chunk.sampling_logprobs, chunk.logprobs, strict=True)
    return replace(chunk, logprobs=[sampling if ids else whole for ids, sampling, whole in values])


class Replica(Resident, Protocol):
    """One served copy of the model, as the engine sees it.

    The engine calls `pause` before it moves the replica, writes its weights or drops its requests. Slow calls return
    when they are done. The engine calls several replicas in parallel.

    Weight sync receives weights in the workers' processes, so that no weight passes through the driver:

        Replica.pause  ->  Worker.parameter_shards, to plan and then to write  ->  Replica.weights_changed  ->  resume
    """

    workers: WorkerSet
    """workers of the protocol `Worker`: `parameter_shards()` describes their shards and receives weights.
    The engine also learns from them where the replica runs, and which of its processes have died"""

    @property
    def failure(self) -> Exception | None:
        """The error by which this replica was lost; None as long as it serves."""

    @property
    def num_in_flight(self) -> int:
        """Number of requests that have not ended."""

    def submit(self, requests: Sequence[InFlightRequest]) -> bool:
        """Start requests, each after its `output_ids`, and return at once; return False if the replica has failed.

        Every chunk of tokens goes to `InFlightRequest.take`. The last chunk has a finish_reason or an error. Requests
        that are submitted while the replica is paused wait.
        """

    def cancel(self, request_ids: Collection[int] | None) -> None:
        """Ask for requests to end with their tokens so far and the reason "abort"; return at once.

        `request_ids`: request numbers. Unknown numbers are ignored; None is all requests.
        """

    def pause(self) -> None:
        """Rest at a token boundary. Return when no token is being generated and cancelled requests have ended."""

    def resume(self) -> None:
        """Continue after `pause`. Requests continue from their tokens. After new weights their cache is recomputed."""

    def drop(self, error: BaseException) -> None:
        """End every request with this error. The replica is paused and stays usable."""

    def load_weights(self, path: str | None) -> None:
        """Read weights from a checkpoint of the same model; None is the engine's own."""

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on."""

    def prompt_logprobs(self, prompts: Sequence[list[int]], num_top: int) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens; requires `has_prompt_logprobs`.

        While the replica is paused, the call waits, so that no prompt is computed with half-written weights.

        `prompts`: token ids, at most `max_model_len - 1` each. `num_top`: number of most likely tokens at each place.
        """

    def close(self) -> None:
        """Stop generating and end requests in flight with an error. The workers end afterwards."""


OnFailure = Callable[[Replica, list[InFlightRequest], Exception], None]
"""on_failure(replica, requests, error): the replica is lost; these requests were in flight and have not ended"""


class ServingWorker(Worker, Protocol):
    """One process of a replica whose weights are in workers that rlite has started."""

    def load_weights(self, path: str | None) -> None:
        """Read weights from a checkpoint of the same model; None is the engine's own."""

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on."""


class AdapterWorker(ServingWorker, Protocol):
    """One process of a replica that serves adapters."""

    def stage_adapter(self, name: str | None, given: AdapterWeights, version: int) -> bool | None:
        """Make a version of an adapter ready, which replaces an earlier one that is not used yet.

        `name`: name of the adapter; None is the adapter of requests that name none. Returns whether it changes a logit
        of some prompt; None on a worker that does not know.
        """

    def use_adapter(self, name: str | None, is_kept: bool) -> None:
        """Serve the version that was staged.

        `is_kept`: let requests in flight end with the version with which they began. Otherwise they continue from their
        tokens with the new version, and their cache is recomputed.
        """

    def drop_adapter(self, name: str | None) -> None:
        """Forget an adapter, and a version that was staged; nothing if there is none.

        Requests in flight end with an adapter that has a name. Requests that name none go on with the base.
        """

    def adapter_logprobs(self, prompts: list[list[int]], num_top: int, adapter: str) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens with an adapter."""


class WorkerReplica(Resident):
    """The part of a replica that calls its workers, for replicas whose workers are `ServingWorker`s."""

    def __init__(self, workers: WorkerSet) -> None:
        self.workers = workers
        self._in_flight = InFlightTable()

    @property
    def failure(self) -> Exception | None:
        """The error by which this replica was lost; None as long as it serves."""
        return self._in_flight.failure

    @property
    def num_in_flight(self) -> int:
        """Number of requests that have not ended."""
        return len(self._in_flight)

    def call(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Return the results of a declared method on all workers; see `WorkerSet.call`."""
        return self.workers.call(method, *args, **kwargs)

    def check(self) -> None:
        """Raise the failure of workers that no longer serve."""
        self.workers.check()

    def load_weights(self, path: str | None) -> None:
        """Read weights from a checkpoint."""
        self.call(ServingWorker.load_weights, path)

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on."""
        self.call(ServingWorker.set_version, version)

    def prompt_logprobs(self, prompts: Sequence[list[int]], num_top: int) -> list[PromptLogprobs]:
        """Refuse: replicas with prompt log-probabilities override this method."""
        raise NotImplementedError(f"{type(self).__name__} has no prompt log-probabilities")


@dataclass(frozen=True, kw_only=True)
class InferenceBackend(Backend):
    """An inference executor, as `register_executor("inference", NAME, ...)` takes it.

    `options` has at least the fields of `ExecutorOptions`. `worker` makes a process's part from the checkpoint's path.
    A protocol beside the replica, or the class of the worker, declares the methods that it adds to `ServingWorker`.
    """

    replica: Callable[[WorkerSet, Any, OnFailure], Replica]
    """replica(workers, options, on_failure) in the driver, after the workers are ready"""
    check: Callable[[str, int], None] | None = None
    """check(path, tensor_parallel_size) in the driver, before any process starts; raises ConfigError for a checkpoint
    that the executor cannot serve"""
    num_replicas: Callable[[Any], int | None] | None = None
    """num_replicas(options): number of replicas that the options fix, such as one for each running server; None leaves
    it to `build`"""
    is_elsewhere: bool = False
    """the options name servers that others start and end: one worker stands for all of them"""
    capabilities: Capabilities = Capabilities()

    def check_options(self, executor: str) -> None:
        """Check that the options have the fields that the options of every executor have."""
        if missing := ExecutorOptions.model_fields.keys() - signature(self.options).parameters:
            raise ConfigError(f"executor {executor!r}: its options lack {sorted(missing)}, which every executor has")

    def check_checkpoint(self, path: str, config: PreTrainedConfig, copy_size: int) -> None:
        """Check that the executor can serve a checkpoint."""
        if copy_size > 1 and (heads := attention_shape(config)[2]) % copy_size:
            raise ConfigError(f"tensor_parallel_size={copy_size} does not divide the model's {heads} key-value heads")
        if self.check is not None:
            self.check(path, copy_size)

    def num_copies(self, asked: int | None, options: Any) -> int | None:
        """Return the number of replicas: as asked, or as the options fix it; None if neither says it."""
        if self.is_elsewhere:
            return 1
        fixed = None if self.num_replicas is None else self.num_replicas(options)
        if asked is not None and fixed is not None and asked != fixed:
            raise ConfigError(f"data_parallel_size={asked}: the executor's options name {fixed} replicas; leave it out")
        return asked if fixed is None else fixed


def check_lengths(prompts: Sequence[list[int]], max_tokens: int) -> None:
    """Check that no prompt is too long.

    `max_tokens`: most tokens of a prompt.
    """
    for index, num in enumerate(map(len, prompts)):
        if num > max_tokens:
            room = f"max_model_len={max_tokens + 1} leaves room for {max_tokens}"
            raise DataError(f"prompt {index} has {num} tokens, {room}")
