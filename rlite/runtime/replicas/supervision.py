"""Replicas that come and go in the background: replacement of lost ones, and policies of their number.

    serving ──lost──> the router moves its requests ──> new processes, current weights ──> serving
                                                              └── failed: again, while the budget lasts

Calls that need every replica go on without a replica that is being replaced: a replica that joins takes over the state
of the engine. If the budget is used up, the lost replica stays lost, and these calls raise its failure.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rlite.errors import ConfigError, RliteError
from rlite.observability import trace
from rlite.restarts import RestartBudget
from rlite.runtime.replicas.replica import Replica

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
