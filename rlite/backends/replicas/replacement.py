"""Replacement of lost replicas while an inference engine serves.

Replacement of lost replicas in the background, within a budget.

    serving ──lost──> the router moves its requests ──> new processes, current weights ──> serving
                                                              └── failed: again, while the budget lasts

Calls that need every replica go on without a replica that is being replaced: a replica that joins takes over the state
of the engine. If the budget is used up, the lost replica stays lost, and these calls raise its failure.

Weights from one replica to another that joins it: rank by rank, bucket by bucket, while the first replica serves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlite.backends.replicas.router import Router, loss_of
from rlite.engine.base import Weights
from rlite.engine.inference_executor import Replica
from rlite.engine.inference_lifecycle import InferenceLifecycle
from rlite.engine.transport import Broadcast, Bucket, Layout, Meeting, Piece, describe, leave_meeting, take_part
from rlite.engine.weight_sync import make_buckets, make_plan
from rlite.engine.workers import Executor, T, Worker, on_each_process, together
from rlite.errors import ConfigError, RliteError, WorkerDied, WorkerError
from rlite.observability import trace
from rlite.runtime.cluster.group import WorkerGroup, apply_on_processes
from rlite.runtime.parallel.processes import open_store
from rlite.services.recovery.record import RestartBudget

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReplicaReplaced:
    """The end of one replacement: the replica serves again, in new processes."""

    replica: int
    seconds: float
    """from the detection of the loss until the new replica serves"""
    version: int
    """policy version of its weights"""


class ReplicaSupervisor:
    """Runs a replacement for each lost replica, in a thread of its own.

    Args:
        name: name of the engine, for messages.
        budget: bound of the replacements.
        replace: replace(index, lost) starts the replica again and lets it join; returns the version of its
            weights, or None if it joins at the next weight sync.
        give_up: give_up(index, replica) records that the replica stays lost.
    """

    def __init__(
        self,
        name: str,
        budget: RestartBudget,
        replace: Callable[[int, Replica], int | None],
        give_up: Callable[[int, Replica], None],
    ) -> None:
        self.replaced: list[ReplicaReplaced] = []
        self.under_way: set[int] = set()
        """numbers of the replicas that are being replaced"""
        self._name = name
        self._budget = budget
        self._replace = replace
        self._give_up = give_up
        self._began: list[float] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.is_closed = False

    @property
    def has_budget(self) -> bool:
        """True if a replica that is lost now would be replaced."""
        return not self.is_closed and self._budget.allows(self._began, time.monotonic())

    def take_over(self, index: int, replica: Replica) -> bool:
        """Begin to replace a lost replica.

        Args:
            index: number of the replica.
            replica: the lost replica.

        Returns:
            False if the budget is used up, or the engine is being released.
        """
        with self._lock:
            if not self._spend():
                return False
            args = (index, replica, time.monotonic())
            thread = threading.Thread(target=self._run, args=args, name=f"replacing {self._name} {index}", daemon=True)
            self.under_way.add(index)
            thread.start()
            self._threads.append(thread)  # which others join
        return True

    def settle(self) -> None:
        """Wait until no replacement is under way."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Begin no further replacements. The replacements under way fail, because the engine is released."""
        self.is_closed = True

    def _spend(self) -> bool:
        if not self.has_budget:
            return False
        self._began.append(time.monotonic())
        return True

    def _run(self, index: int, replica: Replica, lost_at: float) -> None:
        try:
            self._try_to_replace(index, replica, lost_at)
        finally:
            self.under_way.discard(index)

    def _try_to_replace(self, index: int, replica: Replica, lost_at: float) -> None:
        while True:
            try:
                version = self._replace(index, replica)
            except Exception as error:  # of a launcher or of any executor: it costs an attempt, not the engine
                if self.is_closed:
                    return
                logger.warning("%s: replica %d could not be replaced: %s", self._name, index, error)
                with self._lock:
                    if self._spend():
                        continue
                logger.error("%s: replica %d stays lost: the budget of replacements is used up", self._name, index)
                self._give_up(index, replica)
                return
            if version is None:
                logger.warning("%s: replica %d was started and joins at the next weight sync", self._name, index)
                return
            seconds = time.monotonic() - lost_at
            self.replaced.append(ReplicaReplaced(replica=index, seconds=seconds, version=version))
            logger.warning(
                "%s: replica %d was replaced in %.1f s, with weights of version %d", self._name, index, seconds, version
            )
            trace.instant("replica replaced", engine=self._name, replica=index, seconds=seconds)
            return


LEAVE_S = 10.0
"""time limit in seconds for a process to leave a process group"""


def copy_weights(source: Executor, target: Executor) -> int:
    """Copy the weights of a replica that serves into one that does not yet. Each source worker pauses for a bucket.

    Args:
        source: workers of the one replica.
        target: workers of the other one, of the same group and as many.

    Returns:
        The number of bytes written.
    """
    group = source.group
    pairs = list(zip(source.ranks, target.ranks, strict=True))
    layouts = _layouts(group, pairs)
    plans = [_plan(group, pair, *of_pair) for pair, of_pair in zip(pairs, layouts, strict=True)]
    try:
        written = 0
        for buckets in zip_longest(*(plan.buckets for plan, _ in plans)):
            calls: list[Any] = []
            for (giver, taker), (plan, pieces), bucket in zip(pairs, plans, buckets, strict=True):
                if bucket is not None:
                    part = _part_of(plan, pieces, bucket)
                    calls.append((group, giver, (group.key(giver), None), part))
                    calls.append((group, taker, (None, group.key(taker)), part))
            written += sum(apply_on_processes(calls, hand_over, [group], "copy weights", group.call_timeout))
        return written
    finally:
        for pair, (plan, _) in zip(pairs, plans, strict=True):
            with suppress(RliteError):  # who died takes the process group along
                serving = [(group, rank) for rank in pair if group.is_serving(rank)]
                on_each_process(serving, leave_meeting, (plan.meeting,), "leave", LEAVE_S)


def hand_over(giver: Worker | None, taker: Worker | None, plan: Broadcast, pieces: list[Piece]) -> int:
    """Send, or receive, one bucket.

    Args:
        giver: the worker that serves, in its process.
        taker: the worker that joins, in its process.
        plan: the bucket and the process group.
        pieces: pieces of the bucket.

    Returns:
        The number of bytes written.
    """
    shards = None if giver is None else giver.parameter_shards
    source: Any = shards and SimpleNamespace(parameter_shards=shards, served_shards=shards)  # of its own weights
    return take_part(source, taker, plan, 0 if taker is None else 1, pieces if taker is not None else [])


def _part_of(plan: Broadcast, pieces: list[Piece], bucket: Bucket) -> tuple[Broadcast, list[Piece]]:
    return replace(plan, buckets=(bucket,)), [piece for piece in pieces if piece.source_name in bucket.names]


def _plan(group: WorkerGroup, pair: tuple[int, int], giver: Layout, taker: Layout) -> tuple[Broadcast, list[Piece]]:
    ip = group.devices[pair[0]].ip
    (port,) = apply_on_processes([(group, pair[0], (), (ip,))], open_store, [group], "open a rendezvous", 60.0)
    is_on_host = "cpu" in (giver.device, taker.device)
    meeting = Meeting(ip, port, 2, group.call_timeout)
    plan = Broadcast(meeting, make_buckets([giver]), roots=(0,), is_on_host=is_on_host)
    (pieces,) = make_plan([giver], [taker], group.describe(pair[1]))
    return plan, pieces


def _layouts(group: WorkerGroup, pairs: list[tuple[int, int]]) -> list[Any]:
    """Return the layouts of the weights of each pair of ranks."""
    calls: list[Any] = [(group, rank, (group.key(rank),), (False, False)) for pair in pairs for rank in pair]
    results = apply_on_processes(calls, describe, [group], "describe weights", group.call_timeout)
    return list(zip(results[::2], results[1::2], strict=True))


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
