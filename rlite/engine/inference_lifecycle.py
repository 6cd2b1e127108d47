"""The life of an inference engine: its replicas, when they rest and move, and how new weights reach them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from rlite.backends.replicas.router import Policy, ReplicaLost, Router, least_outstanding
from rlite.engine.base import Engine, Weights
from rlite.engine.inference_executor import COMMON_OPTIONS, Capabilities, InferenceBackend, Replica
from rlite.engine.registry import Backend, Kind
from rlite.engine.workers import Executor, Part, together
from rlite.errors import ConfigError, ResidencyError, WeightSyncError
from rlite.nn.pretrained import end_ids, load_config, local_checkpoint
from rlite.observability import trace
from rlite.runtime.parallel.tensor_plan import attention_shape


class InferenceLifecycle(Engine):
    """The base of the inference engine: everything but prompts and completions.

    Args:
        path: folder (or hub name) of a Hugging Face checkpoint.
        executor: name of the executor.
    """

    kind: ClassVar[Kind] = "inference"
    backend_type: ClassVar[type[Backend]] = InferenceBackend
    has_independent_replicas: ClassVar[bool] = True
    _backend: InferenceBackend

    def __init__(self, path: str | Path, executor: str) -> None:
        super().__init__(executor)
        if missing := COMMON_OPTIONS.difference(inspect.signature(self._backend.options).parameters):
            raise ConfigError(f"executor {executor!r}: its options lack {sorted(missing)}, which every executor has")
        self.path = str(local_checkpoint(path))
        self._config = load_config(self.path).get_text_config()
        self._router = Router(executor)
        self._routing: Policy = least_outstanding
        self._is_paused = False
        self._is_receiving = False
        self._has_cache = False
        self._is_as_loaded = True
        """the weights are those of the engine's own checkpoint"""
        self._membership = threading.RLock()
        """held while the replicas rest, move or receive weights, and while a replica joins or leaves"""

    @property
    def capabilities(self) -> Capabilities:
        """Optional abilities of the executor."""
        return self._backend.capabilities

    @property
    def extras(self) -> frozenset[str]:
        """Names of the columns that a request may ask for."""
        return self.capabilities.extras

    @property
    def context_length(self) -> int:
        """The most tokens of prompt and completion together. Workers may allow fewer.

        Raises:
            RliteError: the engine is not built.
        """
        self.group.check()
        return self.options.max_model_len or self._config.max_position_embeddings

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Return the model's own end tokens; generation_config.json takes precedence over the model's config."""
        return frozenset(end_ids(self.path, self._config))

    @property
    def num_in_flight(self) -> int:
        """Number of requests that have not ended."""
        return sum(replica.num_in_flight for replica in self._replicas)

    @property
    def lost_replicas(self) -> list[ReplicaLost]:
        """Replicas that were lost since the engine was built, in the order of their loss."""
        return self._router.lost

    @property
    def _replicas(self) -> Sequence[Replica]:
        return self._router.replicas

    def pause(self) -> None:
        """Rest at a token boundary; return when no worker computes. Requests wait until `resume()`."""
        with self._membership:
            self._is_paused = True
            self._hold()

    def resume(self) -> None:
        """Go on after `pause()`."""
        with self._membership:
            self._is_paused = False
            self._let_run()

    def abort_all(self) -> None:
        """End every request in flight with its tokens so far and stop_reason "abort"."""
        with self._membership:
            try:
                self._cancel_all()
            finally:
                self._let_run()

    def load(self, path: str | Path | None = None) -> None:
        """Read weights from a checkpoint of the same model; without a path, from the engine's own: a new version."""
        folder = None if path is None else str(local_checkpoint(path))
        with self._writing_weights("continue"):
            self._each(lambda replica: replica.load_weights(folder))

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on."""
        with self._membership:
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
        with self._membership:
            self._need_memory()  # another thread may have moved it before
            with self._writing_weights(on_inflight):
                yield

    # -- hooks of `Engine` ---------------------------------------------------------------------------------------

    def _validate(self, executor_size: int) -> None:
        if executor_size > 1 and (heads := attention_shape(self._config)[2]) % executor_size:
            raise ConfigError(
                f"tensor_parallel_size={executor_size} does not divide the model's {heads} key-value heads"
            )
        if self._backend.check is not None:
            self._backend.check(self.path, executor_size)

    def _num_copies(self, asked: int | None) -> int | None:
        fixed = None if self._backend.num_replicas is None else self._backend.num_replicas(self.options)
        if asked is not None and fixed is not None and asked != fixed:
            raise ConfigError(f"data_parallel_size={asked}: the executor's options name {fixed} replicas; leave it out")
        return asked if fixed is None else fixed

    def _source(self) -> str:
        return self.path

    def _built(self) -> None:
        assert self._session is not None
        self._has_cache, self._version = True, 0
        self._is_paused, self._is_as_loaded = False, True
        self._router = router = self._new_router()
        self._session.before_release(self.name, self._stop_serving)
        for executor in self.executors:
            router.add(executor.index, self._backend.replica(executor, self.options, router.replica_failed))

    def _new_router(self) -> Router:
        return Router(self.name, self._routing)

    def _residents(self) -> Sequence[Replica]:
        return self._replicas

    @property
    def members(self) -> list[Executor]:
        """The executors of the replicas."""
        return [replica.executor for replica in self._replicas]

    @contextmanager
    def _moving(self) -> Iterator[None]:
        self._need(self.capabilities.has_residency, "cuda(), cpu() and meta()", "release() and build() it instead")
        with self._membership:
            self._hold()  # requests without a waiting caller have ended then
            try:
                if self.num_in_flight:
                    raise ResidencyError(
                        f"{self.name} has {self.num_in_flight} requests in flight; wait for them or call abort_all() "
                        "first"
                    )
                yield
            finally:
                self._let_run()

    def _moved(self, what: Part, resident: bool) -> None:
        if what in ("all", "kv_cache"):
            self._has_cache = resident

    # -- for engines that inherit --------------------------------------------------------------------------------

    def _stop_serving(self) -> None:
        """End what runs in the driver, before the workers end."""
        for replica in self._replicas:
            replica.close()
        self._router.clear()

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
            raise ResidencyError(
                f'{what}: the KV cache of {self.name} is not on the device; call cuda("kv_cache") first'
            )
        if self._is_paused and not may_wait:
            raise ResidencyError(f"{what}: {self.name} is paused; call resume() first")

    # -- rest and motion -----------------------------------------------------------------------------------------

    def _hold(self) -> None:
        together(self._serving(), lambda replica: replica.pause())

    @property
    def _is_running(self) -> bool:
        return not self._is_paused and self._has_cache and self.weights is Weights.DEVICE

    def _let_run(self) -> None:
        if self._is_running:
            for replica in self._serving():
                replica.resume()

    def _cancel_all(self) -> None:
        for replica in self._serving():
            replica.cancel(None)
        self._hold()

    def _serving(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.failure is None]

    @contextmanager
    def _writing_weights(self, on_inflight: str) -> Iterator[None]:
        with self._membership, self._writing(on_inflight):
            yield
        self._version_changed()

    @contextmanager
    def _writing(self, on_inflight: str) -> Iterator[None]:
        with trace.span("wait for a token boundary"):
            self._hold()
        if on_inflight == "abort":
            self._cancel_all()
        self._is_receiving = True
        try:
            with self._new_weights():
                self._is_as_loaded = False
                yield
        except Exception as error:
            cause = f"the weights of {self.name} could not be written, so this request was ended: {error}"
            for replica in self._serving():
                replica.drop(WeightSyncError(cause))
            raise
        finally:
            self._is_receiving = False
        self._let_run()
