"""An engine whose copies are replicas that serve requests: when they rest and move, and how new weights reach them.

An engine sends requests to its replicas, waits for their ends, and cancels requests that nobody awaits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from rlite.errors import CallTimeout, ConfigError, DataError, ResidencyError, WeightSyncError
from rlite.observability import trace
from rlite.runtime.event_loop import result_of
from rlite.runtime.parallel.shards import CheckpointReader
from rlite.runtime.parallel.tensor import max_positions
from rlite.runtime.replicas.engine import Engine, Weights
from rlite.runtime.replicas.replica import Capabilities, InferenceBackend, InFlightRequest, Replica, check_lengths
from rlite.runtime.replicas.replica_set import ReplicaReplaced, ReplicaSet, ScalingPolicy
from rlite.runtime.replicas.router import Policy, ReplicaLost
from rlite.runtime.replicas.weight_moves import copy_weights
from rlite.runtime.replicas.workers import Kind, Part, T, WorkerSet, together
from rlite.types import MAX_TOP_LOGPROBS, PromptLogprobs
from rlite.wording import counted


async def complete(replicas: ReplicaSet, request: InFlightRequest, affinity: str | None) -> None:
    """Send a request to a replica, and wait beside the event loop until it has ended. A cancelled task ends it."""
    with trace.task("generate", engine=replicas.name, prompt_tokens=len(request.request.input_ids)):
        replicas.router.route([[request]], affinity)
        try:
            await result_of(request.done)
        except asyncio.CancelledError:
            replicas.router.cancel([request])
            raise
    replicas.note_truncation(request)


def complete_all(replicas: ReplicaSet, groups: Sequence[Sequence[InFlightRequest]], timeout: float) -> None:
    """Send groups of siblings to replicas, and wait until all have ended. On an error or a time-out, cancel the rest.

    `timeout`: seconds.
    """
    with trace.span("generate", num_prompts=len(groups)):
        replicas.router.route(groups)
        requests = list(itertools.chain(*groups))
        done, late = wait([request.done for request in requests], timeout=timeout, return_when=FIRST_EXCEPTION)
        if late:
            replicas.router.cancel([request for request in requests if request.done in late])
        for request in requests:
            if request.done in done:
                request.done.result()
        if late:
            at_work = [replica.workers for replica in replicas.all if replica.num_in_flight]
            busy = tuple(workers.group.describe(workers.ranks[0]) for workers in at_work)
            raise CallTimeout(
                f"generate: {len(late)} of {len(requests)} completions were not done within {timeout:g} s, on "
                f"{'; '.join(busy)}. Give it more time (timeout=) or ask for fewer tokens (max_new_tokens).",
                busy,
            )
    for request in requests:
        replicas.note_truncation(request)


def score(
    replicas: ReplicaSet, prompts: Sequence[list[int]], num_top: int, max_tokens: int, adapter: str | None = None
) -> list[PromptLogprobs]:
    """Return the log-probabilities of each prompt's tokens. Prompts are distributed to the replicas in turn.

    `max_tokens`: most tokens of a prompt.
    """
    if not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise ConfigError(f"num_top={num_top}: expected a number from 0 to {MAX_TOP_LOGPROBS}")
    check_lengths(prompts, max_tokens)
    serving: list[Any] = replicas.serving  # with adapters, they are `PumpedReplica`s
    num = len(serving)
    shares = {replica: prompts[index::num] for index, replica in enumerate(serving)}
    chosen = () if adapter is None else (adapter,)
    results = together(serving, lambda replica: replica.prompt_logprobs(shares[replica], num_top, *chosen))
    return [results[index % num][index // num] for index in range(len(prompts))]


def workers_of_replicas(copies: list[WorkerSet], backend: InferenceBackend, options: Any) -> list[WorkerSet]:
    """Return the workers of each replica. For servers elsewhere it is one worker, which asks all of them.

    `copies`: the engine's copies.
    """
    if not backend.is_elsewhere or backend.num_replicas is None:
        return copies
    (worker,) = copies
    return [replace(worker, index=index, is_shared=True) for index in range(backend.num_replicas(options) or 0)]


def check_tokens(ids: Sequence[int], vocab_size: int, where: str) -> list[int]:
    """Return the tokens of a prompt if it has some, all of the model's vocabulary."""
    if not ids:
        raise DataError(f"{where} is empty: expected at least one token")
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise DataError(f"{where} holds token id {wrong[0]}; the model's vocabulary has {vocab_size} tokens")
    return list(ids)


logger = logging.getLogger(__name__)


class ServingEngine(Engine):
    """The base of the inference engine: everything but prompts, texts and rollouts. It has a set of replicas.

    Args:
        backend: the executor.
        executor: its name.
        path: folder of a Hugging Face checkpoint.
        config: the checkpoint's config, of the language model.
        max_replacements: most replacements of lost replicas in an hour; 0: lost replicas stay lost.
        routing: chooses the replica of a request.
    """

    kind: ClassVar[Kind] = "inference"
    has_independent_replicas: ClassVar[bool] = True
    _backend: InferenceBackend

    def __init__(
        self,
        backend: InferenceBackend,
        executor: str,
        path: str,
        config: PreTrainedConfig,
        max_replacements: int,
        routing: Policy,
    ) -> None:
        super().__init__(backend, executor)
        backend.check_options(executor)
        if max_replacements < 0:
            raise ConfigError(f"max_replacements={max_replacements}: expected 0 or more")
        self.path, self._config = path, config
        self._read_from = path
        """folder of the weights that were read last"""
        self._make_replicas = partial(ReplicaSet, routing, max_replacements, self._start_again, self._adopt)
        self._replicas = self._make_replicas(executor, None)
        self.left_replicas = self._replicas.left
        """replicas that have left since the engine was built"""
        self._ids = itertools.count()
        self._is_paused = self._is_receiving = self._has_cache = False
        self._is_as_loaded = True
        """the weights are those of the engine's own checkpoint"""

    def __repr__(self) -> str:
        if not self.is_built:
            return f"{type(self).__name__}({self.path}, executor {self.executor_name}, not built)"
        replicas = f"{counted(len(self.copies), 'replica')} of {self.copies[0].size}"
        return f"{type(self).__name__}({self.path}, {replicas}, {self._where()}, version {self.get_version()})"

    @property
    def capabilities(self) -> Capabilities:
        """Optional abilities of the executor."""
        return self._backend.capabilities

    @property
    def extras(self) -> frozenset[str]:
        """Names of the columns that a request may ask for."""
        return self.capabilities.extras_with(vars(self.options) if self.is_built else {})

    @property
    def context_length(self) -> int:
        """The most tokens of prompt and completion together. Workers may allow fewer.

        Raises:
            RliteError: the engine is not built.
        """
        self.group.check()
        return self.options.max_model_len or max_positions(self._config)[1]

    @property
    def seed(self) -> int:
        """Seed of requests without a seed of their own."""
        return self.options.seed

    # -- replicas ------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Number of requests that have not ended."""
        return self._replicas.num_in_flight

    @property
    def num_replicas(self) -> int:
        """Number of replicas that serve."""
        return len(self._replicas.serving)

    @property
    def lost_replicas(self) -> list[ReplicaLost]:
        """Replicas that were lost since the engine was built, in the order of their loss."""
        return self._replicas.router.lost

    @property
    def replaced_replicas(self) -> list[ReplicaReplaced]:
        """Replacements since the engine was built, in the order of their end."""
        return self._replicas.supervisor.replaced

    def wait_for_replacements(self) -> None:
        """Wait until no lost replica is being replaced."""
        self._replicas.supervisor.settle()

    def scale(self, num_replicas: int) -> None:
        """Let replicas join or leave until `num_replicas` serve. Lost replicas that were not replaced leave first.

        A joining replica takes devices on the conditions of `build`, and weights from a replica that serves. A leaving
        replica returns its devices, and its requests continue on the others from their tokens so far. The newest
        replicas leave first.

        Args:
            num_replicas: at least 1.

        Raises:
            ConfigError: the number is out of range, or the launcher or the executor has a fixed number of replicas.
            PlacementError: the devices are not available.
        """
        self.group.check()
        self._replicas.scale(num_replicas)

    def follow(self, policy: ScalingPolicy | None, every_s: float = 5.0, shrink_after_s: float = 60.0) -> None:
        """Scale the engine by a policy, until the engine is released or another policy is given.

        Args:
            policy: chooses the number of replicas from the load; None ends the scaling.
            every_s: seconds between two decisions.
            shrink_after_s: replicas leave only when the policy has wanted fewer for so many seconds, because the load
                falls to zero between two batches.
        """
        if policy is not None:
            self.group.check()
        self._replicas.follow(policy, every_s, shrink_after_s)

    # -- rest, requests and versions -----------------------------------------------------------------------------

    def pause(self) -> None:
        """Rest at a token boundary; return when no worker computes. Requests wait until `resume()`."""
        with self._replicas.membership:
            self._is_paused = True
            self._replicas.pause()

    def resume(self) -> None:
        """Go on after `pause()`."""
        with self._replicas.membership:
            self._is_paused = False
            self._let_run()

    def abort_all(self) -> None:
        """End every request in flight with its tokens so far and stop_reason "abort"."""
        with self._replicas.membership:
            try:
                self._replicas.cancel()
            finally:
                self._let_run()

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on."""
        with self._replicas.membership:
            self._each(lambda replica: replica.set_version(version))
            super().set_version(version)
        self._version_changed()

    @contextmanager
    def receiving_weights(self, on_inflight: str) -> Iterator[None]:
        """Hold generation while weights arrive; then let it go on from its tokens so far, or abort it.

        Args:
            on_inflight: "continue" or "abort".

        Raises:
            ConfigError: the executor cannot receive weights.
            ResidencyError: the engine has no memory for weights.
        """
        self._need(self.capabilities.has_weight_sync, "p2p_weight_sync", "release() and build() it with a checkpoint")
        obstacle = self.capabilities.sync_obstacle(vars(self.options)) if self.is_built else ""
        self._need(not obstacle, "p2p_weight_sync", obstacle)
        with self._replicas.membership:
            self._need_memory()  # another thread may have moved it before
            with self._writing_weights(on_inflight):
                yield

    def _load(self, folder: str | None) -> None:
        with self._writing_weights("continue"):
            self._each(lambda replica: replica.load_weights(folder))
        self._base, self._read_from = None, folder or self.path

    def _fingerprint(self) -> str:
        return CheckpointReader(self._read_from).fingerprint()

    # -- requests ------------------------------------------------------------------------------------------------

    async def _complete(self, request: InFlightRequest, affinity: str | None) -> None:
        """Complete a request; see `complete`."""
        wanted = request.request.extras
        self._need(self.extras.issuperset(wanted), f"extras={wanted}", f"it has {sorted(self.extras) or 'none'}")
        self._check_adapter("agenerate", request.request.adapter)
        self._check_ready("agenerate", may_wait=True)
        await complete(self._replicas, request, affinity)

    def _complete_all(self, groups: Sequence[Sequence[InFlightRequest]], timeout: float | None) -> None:
        """Complete groups of siblings; see `complete_all`."""
        if len(groups) == 0:
            raise DataError("generate: the list of prompts is empty; expected at least one prompt")
        self._check_ready("generate")
        complete_all(self._replicas, groups, self.group.call_timeout if timeout is None else timeout)

    def _score(
        self, what: str, prompts: Sequence[list[int]], num_top: int, may_wait: bool = False, adapter: str | None = None
    ) -> list[PromptLogprobs]:
        self._need_prompt_logprobs()
        self._check_ready(what, may_wait)
        self._check_adapter(what, adapter)
        return score(self._replicas, prompts, num_top, self.context_length - 1, adapter)

    def _checked(self, ids: Sequence[int], where: str) -> list[int]:
        """Return the tokens of a prompt; see `check_tokens`."""
        self.group.check()
        return check_tokens(ids, self._config.vocab_size, where)

    def _need_prompt_logprobs(self, are_wanted: bool = True) -> None:
        can = self.capabilities.has_prompt_logprobs or not are_wanted
        self._need(can, "prompt_logprobs", "a train engine's `forward` computes them")

    # -- hooks of `Engine` ---------------------------------------------------------------------------------------

    def _validate(self, copy_size: int) -> None:
        self._backend.check_checkpoint(self.path, self._config, copy_size)

    def _num_copies(self, asked: int | None) -> int | None:
        return self._backend.num_copies(asked, self.options)

    def _source(self) -> str:
        return self.path

    def _built(self) -> None:
        assert self._session is not None
        self._has_cache, self._version, self._is_paused, self._is_as_loaded = True, 0, False, True
        self._read_from = self.path
        fixed_by = "" if self._num_copies(None) is None else f"the options of the executor {self.executor_name!r}"
        has_default_length = vars(self.options).get("max_model_len") is None
        self.copies = workers_of_replicas(self.copies, self._backend, self.options)
        self._replicas = self._make_replicas(
            self.name, self._session, fixed_by, has_default_length, is_elsewhere=self._backend.is_elsewhere
        )
        self.left_replicas = self._replicas.left
        self._session.before_release(self.name, self._stop_serving)
        for copy in self.copies:
            self._replicas.admit(self._replica(copy))

    def _replica(self, copy: WorkerSet) -> Replica:
        return self._backend.replica(copy, self.options, self._replicas.router.replica_failed)

    def release(self) -> None:
        """End the workers and free the devices. The engine can be built again."""
        super().release()
        self.wait_for_replacements()

    def has_lost_some_of(self, members: Sequence[WorkerSet]) -> bool:
        """Return whether some of these copies are no longer members: they are replaced, and others serve."""
        return self._replicas.has_lost_some_of(members)

    @property
    def members(self) -> list[WorkerSet]:
        """The workers of the replicas."""
        return self._replicas.members

    def _each(self, act: Callable[[Any], T]) -> list[T]:
        self.group.check()
        return self._replicas.each(act)

    @contextmanager
    def _moving(self, what: Part, resident: bool) -> Iterator[None]:
        self._need(self.capabilities.has_residency, "cuda(), cpu() and meta()", "release() and build() it instead")
        self.wait_for_replacements()  # a process that starts would take memory that is about to be used otherwise
        with self._replicas.membership:
            self._replicas.pause()  # requests without a waiting caller have ended then
            try:
                if num := self.num_in_flight:
                    why = f"{self.name} has {num} requests in flight; wait for them or call abort_all() first"
                    raise ResidencyError(why)
                yield
                self._has_cache = self._has_cache if what == "weights" else resident
            finally:
                self._let_run()

    # -- for engines that inherit --------------------------------------------------------------------------------

    def _stop_serving(self) -> None:
        """End what runs in the driver, before the workers end."""
        self._replicas.close()

    def _check_adapter(self, what: str, name: str | None) -> None:
        """Refuse a request for an adapter that is not there."""
        self._need(name is None, what, "leave adapter out")

    def _version_changed(self) -> None:
        """Note that tokens will carry another policy version."""

    def _need(self, is_there: bool, what: str, remedy: str) -> None:
        if not is_there:
            raise ConfigError(f"{what}: the executor {self.executor_name!r} does not offer this; {remedy}")

    def _check_ready(self, what: str, may_wait: bool = False) -> None:
        self.group.check()
        if may_wait and self._is_receiving:
            return  # between two weights: the request waits
        self._need_weights(what)
        if not self._has_cache:
            remedy = 'call cuda("kv_cache") first'
            raise ResidencyError(f"{what}: the KV cache of {self.name} is not on the device; {remedy}")
        if self._is_paused and not may_wait:
            raise ResidencyError(f"{what}: {self.name} is paused; call resume() first")

    # -- state of the replicas -----------------------------------------------------------------------------------

    @property
    def _is_running(self) -> bool:
        return not self._is_paused and self._has_cache and self.weights is Weights.DEVICE

    def _let_run(self) -> None:
        if self._is_running:
            self._replicas.resume()

    @contextmanager
    def _writing_weights(self, on_inflight: str) -> Iterator[None]:
        with self._replicas.membership:
            self._replicas.admit_late()
            with trace.span("wait for a token boundary"):
                self._replicas.pause()
            if on_inflight == "abort":
                self._replicas.cancel()
            self._is_receiving = True
            try:
                with self._new_weights():
                    self._is_as_loaded = False
                    yield
            except Exception as error:
                cause = f"the weights of {self.name} could not be written, so this request was ended: {error}"
                for replica in self._replicas.serving:
                    replica.drop(WeightSyncError(cause))
                raise
            finally:
                self._is_receiving = False
            self._let_run()
        self._version_changed()

    def _start_again(self, index: int) -> Replica:
        """Return a lost or a new replica, after starting its workers on the devices that the session has for it."""
        assert self._session is not None
        if self._backend.is_elsewhere:
            return self._replica(self.copies[index])
        self._session.restart(self.name, index, self._factory)
        self._choose_reporters()
        return self._replica(self._copy(index))

    def _adopt(self, replica: Replica, giver: Replica) -> int | None:
        """Give a replica that has read the checkpoint the engine's weights and residency.

        Returns the version of its weights; None if no replica's weights can be read, so that it waits for a weight
        sync.
        """
        can_copy = self.capabilities.has_readable_weights
        is_current = give_weights(replica, giver, self._version, self.weights, self._is_as_loaded, can_copy)
        match_memory(replica, self.weights, self._has_cache)
        if is_current and not self._is_running:
            replica.pause()
        return self._version if is_current else None


def give_weights(
    replica: Replica, giver: Replica, version: int, weights: Weights, are_as_loaded: bool, can_copy: bool
) -> bool:
    """Give a replica that has read the checkpoint the weights of another one.

    Returns False if no replica's weights can be read, so that it has to wait for a weight sync.
    """
    if are_as_loaded:
        replica.set_version(version)
    elif weights in (Weights.DEVICE, Weights.HOST):
        if not can_copy:
            return False
        copy_weights(giver.workers, replica.workers)
        replica.weights_changed(version)
    return True


def match_memory(replica: Replica, weights: Weights, has_cache: bool) -> None:
    """Release what the engine has released, or offload what it has offloaded."""
    if weights is Weights.DEVICE and has_cache:
        return
    (replica.to_cpu if weights in (Weights.DEVICE, Weights.HOST) else replica.to_meta)()
    if weights in (Weights.DEVICE, Weights.EMPTY):
        replica.to_device("weights")
    if has_cache:
        replica.to_device("kv_cache")
