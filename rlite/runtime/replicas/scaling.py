"""Policies that choose the number of replicas of an inference engine, and the thread that follows one."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rlite.errors import ConfigError, RliteError

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
