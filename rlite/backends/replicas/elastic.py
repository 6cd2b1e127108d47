"""Replicas that join and leave while an inference engine serves: on command, by a policy, and after SIGTERM.

Policies that choose the number of replicas of an inference engine, and the thread that follows one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlite.backends.replicas.replacement import ReplacedReplicas
from rlite.backends.replicas.router import loss_of
from rlite.engine.inference_executor import Replica
from rlite.engine.workers import together
from rlite.errors import ConfigError, RliteError, WorkerError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """The state of an inference engine from which a policy decides."""

    num_replicas: int
    """replicas that serve"""
    num_in_flight: int
    """requests that have not ended"""


ScalingPolicy = Callable[[EngineLoad], int]
"""policy(load) -> number of replicas that should serve"""


@dataclass(frozen=True, kw_only=True)
class TargetInFlight:
    """A policy: as many replicas as it takes for `per_replica` requests in flight on each."""

    per_replica: int
    min_replicas: int = 1
    max_replicas: int

    def __post_init__(self) -> None:
        if self.per_replica < 1 or not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError(f"{self}: expected per_replica >= 1 and 1 <= min_replicas <= max_replicas")

    def __call__(self, load: EngineLoad) -> int:
        """Return the number of replicas for a load."""
        wanted = math.ceil(load.num_in_flight / self.per_replica)
        return max(self.min_replicas, min(wanted, self.max_replicas))


class SlowToShrink:
    """A policy that grows like another policy, and shrinks only to the most replicas that the other recently wanted.

    The load of a rollout falls to zero between two batches. Without the delay, replicas would leave and join each time.

    Args:
        policy: the other policy.
        after_s: seconds for which the other policy has to want fewer replicas.
        clock: returns the time in seconds.
    """

    def __init__(self, policy: ScalingPolicy, after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._after_s, self._clock = policy, after_s, clock
        self._wanted: deque[tuple[float, int]] = deque()

    def __call__(self, load: EngineLoad) -> int:
        """Return the number of replicas for a load."""
        now = self._clock()
        if not self._wanted:  # the replicas that serve at first were wanted, too
            self._wanted.append((now, load.num_replicas))
        self._wanted.append((now, wanted := self._policy(load)))
        while self._wanted[0][0] <= now - self._after_s and len(self._wanted) > 1:
            self._wanted.popleft()
        return wanted if wanted >= load.num_replicas else min(load.num_replicas, max(num for _, num in self._wanted))


class Autoscaler:
    """Asks a policy again and again, and scales an engine accordingly, in a thread of its own.

    Args:
        policy: chooses the number of replicas.
        load: returns the engine's load.
        scale: scales the engine; a refusal is logged, and the policy is asked again later.
        every_s: seconds between two decisions.
    """

    def __init__(
        self, policy: ScalingPolicy, load: Callable[[], EngineLoad], scale: Callable[[int], None], every_s: float
    ) -> None:
        self._policy, self._load, self._scale, self._every_s = policy, load, scale, every_s
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlite-autoscaler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Make no further decisions, and wait for the decision under way."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        refusal = ""
        while not self._is_closed.wait(self._every_s):
            try:
                load = self._load()
                if (wanted := self._policy(load)) != load.num_replicas:
                    self._scale(wanted)
                refusal = ""
            except RliteError as error:  # such as no free device: the engine serves on as it is
                if not self._is_closed.is_set() and str(error) != refusal:
                    logger.warning("the number of replicas stays: %s", error)
                refusal = str(error)


@dataclass(frozen=True, kw_only=True)
class ReplicaLeft:
    """The departure of one replica, on command or after SIGTERM to one of its workers."""

    replica: int
    num_moved: int
    """number of requests in flight that continue elsewhere, from the tokens generated so far"""
    reason: str


class ElasticReplicas(ReplacedReplicas):
    """The part of the inference engine that lets replicas join and leave.

    Args:
        path: folder (or hub name) of a Hugging Face checkpoint.
        executor: name of the executor.
        max_replacements: most replacements of lost replicas in an hour; 0: lost replicas stay lost.
    """

    def __init__(self, path: str | Path, executor: str, max_replacements: int) -> None:
        super().__init__(path, executor, max_replacements)
        self._scaling = threading.Lock()
        self._autoscaler: Autoscaler | None = None
        self.left_replicas: list[ReplicaLeft] = []
        """replicas that have left since the engine was built"""

    @property
    def num_replicas(self) -> int:
        """Number of replicas that serve."""
        return len(self._serving())

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
        self._check_scalable(num_replicas)
        assert self._session is not None
        with self._scaling:
            self._supervisor.settle()
            for replica in self._replicas:
                if loss_of(replica) is not None:
                    self._leave(replica, "it was lost")
            for replica in self._serving()[num_replicas:]:
                self._leave(replica, "the engine was scaled down")
            if (missing := num_replicas - len(self._indices)) > 0:
                vacant = [index for index in range(num_replicas) if index not in self._indices][:missing]
                self._session.grow(self.name, vacant)
                self._start_all(vacant)

    def follow(self, policy: ScalingPolicy | None, every_s: float = 5.0, shrink_after_s: float = 60.0) -> None:
        """Scale the engine by a policy, until the engine is released or another policy is given.

        Args:
            policy: chooses the number of replicas from the load; None ends the scaling.
            every_s: seconds between two decisions.
            shrink_after_s: replicas leave only when the policy has wanted fewer for so many seconds, because the load
                falls to zero between two batches.
        """
        scaler, self._autoscaler = self._autoscaler, None
        if scaler is not None:
            scaler.close()
        if policy is not None:
            self._check_scalable(1)
            self._autoscaler = Autoscaler(SlowToShrink(policy, shrink_after_s), self._load, self.scale, every_s)

    def _built(self) -> None:
        self.left_replicas = []
        super()._built()

    def _stop_serving(self) -> None:
        self._supervisor.close()
        self.follow(None)
        super()._stop_serving()

    def _watch(self, index: int, replica: Replica) -> None:
        super()._watch(index, replica)

        def noticed(notice: Future[Any]) -> None:
            if notice.exception() is None:  # else the process died without notice
                self._asked_to_leave(replica)

        for rank in replica.executor.ranks:
            replica.executor.group.handles[rank].notice.add_done_callback(noticed)

    def _asked_to_leave(self, replica: Replica) -> None:
        def leave() -> None:
            try:
                self._leave(replica, "SIGTERM")
            except RliteError as error:
                logger.warning("%s: a replica got SIGTERM and serves on until it ends: %s", self.name, error)

        if replica in self._replicas and not self._supervisor.is_closed:
            threading.Thread(target=leave, name=f"departure from {self.name}", daemon=True).start()

    def _leave(self, replica: Replica, why: str) -> None:
        """Hand a replica's requests over, end its workers, and return its devices.

        Raises:
            ConfigError: the replica is the only one.
        """
        with self._membership:
            if replica not in self._replicas or self._session is None:
                return
            if not [other for other in self._serving() if other is not replica]:
                raise ConfigError(f"{self.name}: the only replica that serves cannot leave")
            index, num_moved = replica.executor.index, replica.num_in_flight
            self._router.remove(replica)
            replica.close()  # its thread moves its requests
            self._session.shrink(self.name, index, WorkerError(f"replica {index} of {self.name} has left: {why}"))
            self.left_replicas.append(ReplicaLeft(replica=index, num_moved=num_moved, reason=why))
        logger.warning("%s: replica %d has left (%s); %d requests in flight moved", self.name, index, why, num_moved)

    def _start_all(self, indices: Sequence[int]) -> None:
        """Start replicas in parallel. The devices of those that cannot start are returned.

        Raises:
            Exception: the error of the first replica that could not start.
        """
        assert self._session is not None
        try:
            together(indices, self._start)
        except BaseException as error:
            for index in set(indices) - self._indices:
                self._session.shrink(self.name, index, WorkerError(f"replica {index} could not start: {error}"))
            raise

    @property
    def _indices(self) -> set[int]:
        """Numbers of the replicas that serve, that are being replaced, or that join at the next weight sync."""
        return {*self._router.indices, *self._supervisor.under_way, *(index for index, _ in self._late)}

    def _check_scalable(self, num_replicas: int) -> None:
        self.group.check()
        assert self._session is not None
        if num_replicas < 1:
            raise ConfigError(f"scale({num_replicas}): expected at least 1 replica")
        if not self._session.launcher.survives_deaths:
            raise ConfigError("the number of replicas is fixed with this launcher; use launcher='ray'")
        if self._backend.num_replicas is not None and self._backend.num_replicas(self.options) is not None:
            raise ConfigError(f"the options of the executor {self.executor_name!r} fix the number of replicas")

    def _load(self) -> EngineLoad:
        return EngineLoad(num_replicas=self.num_replicas, num_in_flight=self.num_in_flight)
