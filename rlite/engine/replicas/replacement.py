"""Replacement of lost replicas while an inference engine serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlite.engine.base import Weights
from rlite.engine.inference_executor import Replica
from rlite.engine.inference_lifecycle import InferenceLifecycle
from rlite.engine.replicas.peer_weights import copy_weights
from rlite.engine.replicas.router import Router, loss_of
from rlite.engine.replicas.supervisor import ReplicaReplaced, ReplicaSupervisor
from rlite.engine.workers import Executor, T, together
from rlite.errors import ConfigError, WorkerDied, WorkerError
from rlite.recovery.budget import RestartBudget

END_S = 10.0
"""seconds that a lost replica's processes may take to end"""


class ReplacedReplicas(InferenceLifecycle):
    """The part of the inference engine that replaces lost replicas.

    A replica that joins gets the weights of a replica that serves, their version, and the residency of the engine. The
    others go on meanwhile.

    Args:
        path: folder (or hub name) of a Hugging Face checkpoint.
        executor: name of the executor.
        max_replacements: most replacements of lost replicas in an hour; 0: lost replicas stay lost.
    """

    def __init__(self, path: str | Path, executor: str, max_replacements: int) -> None:
        super().__init__(path, executor)
        if max_replacements < 0:
            raise ConfigError(f"max_replacements={max_replacements}: expected 0 or more")
        self._max_replacements = max_replacements
        self._late: list[tuple[int, Replica]] = []
        """replicas that join at the next weight sync"""
        self._supervisor = self._new_supervisor(0)

    @property
    def replaced_replicas(self) -> list[ReplicaReplaced]:
        """Replacements since the engine was built, in the order of their end."""
        return self._supervisor.replaced

    def wait_for_replacements(self) -> None:
        """Wait until no lost replica is being replaced."""
        self._supervisor.settle()

    def release(self) -> None:
        """End the workers and free the devices. The engine can be built again."""
        super().release()
        self._supervisor.settle()

    def has_lost_some_of(self, members: Sequence[Executor]) -> bool:
        """Return whether some of these executors are no longer members: they are replaced, and others serve."""
        for replica in self._replicas:
            if (error := loss_of(replica)) is not None and not self._hand_over(replica, error):
                return False
        return bool(set(members) - set(self.members)) and bool(self._serving())

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _built(self) -> None:
        assert self._session is not None
        is_replaced = self._session.launcher.survives_deaths
        self._supervisor = self._new_supervisor(self._max_replacements if is_replaced else 0)
        super()._built()
        for index, replica in enumerate(self._replicas):
            self._watch(index, replica)

    def _new_router(self) -> Router:
        return Router(self.name, self._routing, on_loss=self._supervisor.take_over)

    def _new_supervisor(self, max_replacements: int) -> ReplicaSupervisor:
        return ReplicaSupervisor(self.name, RestartBudget(max_replacements), self._replace, self._give_up)

    def _stop_serving(self) -> None:
        self._supervisor.close()
        for _, replica in self._late:
            replica.close()
        self._late = []
        super()._stop_serving()

    @contextmanager
    def _writing(self, on_inflight: str) -> Iterator[None]:
        late, self._late = self._late, []
        for index, replica in late:
            replica.pause()
            self._admit(index, replica)
        with super()._writing(on_inflight):
            yield

    @contextmanager
    def _moving(self) -> Iterator[None]:
        self._supervisor.settle()  # a process that starts would take memory that is about to be used otherwise
        with super()._moving():
            yield

    def _each(self, act: Callable[[Any], T]) -> list[T]:
        """Return the results of an action on the replicas, without those that are lost and will be replaced."""
        self.group.check()
        if self._max_replacements == 0:
            return super()._each(act)

        def attempt(replica: Replica) -> T | WorkerError:
            try:
                replica.check()
                return act(replica)
            except WorkerError as error:
                return error

        replicas = self._replicas
        outcomes = list(zip(replicas, together(replicas, attempt), strict=True))
        for replica, outcome in outcomes:
            if isinstance(outcome, WorkerError) and not self._hand_over(replica, outcome):
                raise outcome
        return [outcome for _, outcome in outcomes if not isinstance(outcome, WorkerError)]

    # -- replacement ---------------------------------------------------------------------------------------------

    def _watch(self, index: int, replica: Replica) -> None:
        """Notice the death of a worker, also if its replica has nothing to do."""
        if self._max_replacements == 0:
            return
        group = replica.executor.group

        def notice(rank: int) -> None:
            name = group.describe(rank)
            self._hand_over(replica, WorkerDied(f"worker process ended: {name}", (name,)))

        def ended(rank: int, _: Any) -> None:
            if replica in self._replicas and self._supervisor.has_budget:
                threading.Thread(target=notice, args=(rank,), name=f"loss of {self.name} {index}", daemon=True).start()

        for rank in replica.executor.ranks:
            group.handles[rank].death.add_done_callback(partial(ended, rank))

    def _hand_over(self, replica: Replica, error: WorkerError) -> bool:
        """Let a lost replica be replaced; its requests move to the others.

        Returns:
            False if it stays lost.
        """
        has_others = any(other is not replica for other in self._serving())
        if replica in self._replicas and has_others and self._supervisor.has_budget:
            replica.executor.group.mark_lost(replica.executor.ranks, error)
            replica.close()  # its thread moves its requests
            self._router.replica_failed(replica, [], error)  # if the thread had ended before
        return replica not in self._replicas

    def _give_up(self, index: int, replica: Replica) -> None:
        self._router.add(index, replica)

    def _replace(self, index: int, lost: Replica) -> int | None:
        """Start the workers of a lost replica again, and let the replica join.

        Returns:
            The version of its weights; None if it joins at the next weight sync.
        """
        group, ranks = lost.executor.group, lost.executor.ranks
        group.mark_lost(ranks, WorkerError(f"replica {index} of {self.name} is being replaced"))
        lost.close()
        group.check()  # with the last replica, everything has ended
        wait([group.handles[rank].death for rank in ranks], END_S)  # its memory is free then
        return self._start(index)

    def _start(self, index: int) -> int | None:
        assert self._session is not None
        self._session.restart(self.name, index, self._factory)
        self._choose_reporters()
        replica = self._backend.replica(self._executor(index), self.options, self._router.replica_failed)
        try:
            return self._join(index, replica)
        except BaseException as error:
            why = error if isinstance(error, WorkerError) else WorkerError(f"replica {index} could not join: {error}")
            self.group.mark_lost(replica.executor.ranks, why)
            replica.close()
            raise

    def _join(self, index: int, replica: Replica) -> int | None:
        with self._membership:
            if not self._serving():
                raise WorkerError(f"{self.name}: no other replica is left; release() and build() the engine")
            is_current = self._give_weights(replica)
            if self.weights is Weights.HOST:
                replica.to_cpu()
            elif self.weights in (Weights.EMPTY, Weights.RELEASED) or not self._has_cache:
                self._release_memory(replica)
            if not is_current:
                self._late.append((index, replica))
                return None
            if not self._is_running:
                replica.pause()
            self._admit(index, replica)
            return self._version

    def _admit(self, index: int, replica: Replica) -> None:
        self._router.add(index, replica)
        self._watch(index, replica)

    def _give_weights(self, replica: Replica) -> bool:
        """Write the engine's weights into a replica that has read the checkpoint.

        Returns:
            False if no replica's weights can be read, so that it has to wait for a weight sync.
        """
        if self._is_as_loaded:
            replica.set_version(self._version)
        elif self.weights in (Weights.DEVICE, Weights.HOST):
            if not self.capabilities.has_readable_weights:
                return False
            copy_weights(self._serving()[0].executor, replica.executor)
            replica.weights_changed(self._version)
        return True

    def _release_memory(self, replica: Replica) -> None:
        if self.weights is Weights.DEVICE:  # without a KV cache
            replica.to_cpu()
            replica.to_device("weights")
            return
        replica.to_meta()
        if self.weights is Weights.EMPTY:
            replica.to_device("weights")
        if self._has_cache:
            replica.to_device("kv_cache")
