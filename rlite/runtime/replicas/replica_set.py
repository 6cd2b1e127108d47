"""The replicas of an inference engine: they serve, are lost and replaced, join, and leave.

start ──> adopt the engine's weights, version and residency ──> serve ──> leave, on command or after SIGTERM
  ^                          └── no replica's weights can be read: join at the next weight sync
  └── lost: the router moves its requests ── within the budget, under a launcher that survives deaths

Calls that need every replica go on without a replica that is being replaced: a replica that joins takes over the state
of the engine. If the budget is used up, the lost replica stays lost, and these calls raise its failure. A policy may
choose the number of replicas.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlite.errors import ConfigError, RliteError, WorkerDied, WorkerError
from rlite.observability import trace
from rlite.restarts import RestartBudget
from rlite.runtime.cluster.session import Session
from rlite.runtime.replicas.replica import InFlightRequest, Replica
from rlite.runtime.replicas.router import Policy, Router, loss_of
from rlite.runtime.replicas.workers import T, WorkerSet, together

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReplicaReplaced:
    """The end of one replacement: the replica serves again, in new processes."""

    replica: int
    seconds: float
    """from the detection of the loss until the new replica serves"""
    version: int
    """policy version of its weights"""


@dataclass
class ReplicaSupervisor:
    """Runs a replacement for each lost replica, in a thread of its own."""

    name: str
    """name of the engine, for messages"""
    budget: RestartBudget
    replace: Callable[[Replica], int | None]
    """replace(lost) starts the replica again and lets it join; returns the version of its weights, or None if it joins
    at the next weight sync"""
    give_up: Callable[[Replica], None]
    """give_up(lost) records that the replica stays lost"""
    replaced: list[ReplicaReplaced] = field(default_factory=list)
    under_way: set[int] = field(default_factory=set)
    """numbers of the replicas that are being replaced"""
    is_closed: bool = False
    """begin no further replacements. Those under way fail, because the engine is released"""
    _began: list[float] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def has_budget(self) -> bool:
        """True if a replica that is lost now would be replaced."""
        return not self.is_closed and self.budget.allows(self._began, time.monotonic())

    def take_over(self, replica: Replica) -> bool:
        """Begin to replace a lost replica.

        Returns False if the budget is used up, or the engine is being released.
        """
        with self._lock:
            if not self._spend():
                return False
            index = replica.workers.index
            self.under_way.add(index)
            self._threads.append(_in_thread(f"replacing {self.name} {index}", self._run, replica, time.monotonic()))
        return True

    def settle(self) -> None:
        """Wait until no replacement is under way."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _spend(self) -> bool:
        if has_budget := self.has_budget:
            self._began.append(time.monotonic())
        return has_budget

    def _run(self, replica: Replica, lost_at: float) -> None:
        index = replica.workers.index
        try:
            version = self._replace(index, replica)
        finally:
            self.under_way.discard(index)
        if version is not None:
            seconds = time.monotonic() - lost_at
            self.replaced.append(ReplicaReplaced(replica=index, seconds=seconds, version=version))
            facts = (self.name, index, seconds, version)
            logger.warning("%s: replica %d was replaced in %.1f s, with weights of version %d", *facts)
            trace.instant("replica replaced", engine=self.name, replica=index, seconds=seconds)

    def _replace(self, index: int, replica: Replica) -> int | None:
        while True:
            try:
                version = self.replace(replica)
            except Exception as error:  # of a launcher or of any executor: it costs an attempt, not the engine
                if self.is_closed:
                    return None
                logger.warning("%s: replica %d could not be replaced: %s", self.name, index, error)
                with self._lock:
                    if self._spend():
                        continue
                logger.error("%s: replica %d stays lost: the budget of replacements is used up", self.name, index)
                self.give_up(replica)
                return None
            if version is None:
                logger.warning("%s: replica %d was started and joins at the next weight sync", self.name, index)
            return version


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
        return max(self.min_replicas, min(math.ceil(load.num_in_flight / self.per_replica), self.max_replicas))


class SlowToShrink:
    """A policy that grows like another policy, and shrinks only to the most replicas that the other recently wanted.

    The load of a rollout falls to zero between two batches. Without the delay, replicas would leave and join each time.

    `after_s`: seconds for which the other policy has to want fewer replicas. `clock`: returns the time in seconds.
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

    `scale`: scales the engine; a refusal is logged, and the policy is asked again later. `every_s`: seconds between two
    decisions.
    """

    def __init__(
        self, policy: ScalingPolicy, load: Callable[[], EngineLoad], scale: Callable[[int], None], every_s: float
    ) -> None:
        self._policy, self._load, self._scale, self._every_s = policy, load, scale, every_s
        self._is_closed = threading.Event()
        self._thread = _in_thread("rlite-autoscaler", self._run)

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


END_S = 10.0
"""seconds that a lost replica's processes may take to end"""


@dataclass(frozen=True, kw_only=True)
class ReplicaLeft:
    """The departure of one replica, on command or after SIGTERM to one of its workers."""

    replica: int
    num_moved: int
    """number of requests in flight that continue elsewhere, from the tokens generated so far"""
    reason: str


@dataclass(eq=False, repr=False)
class ReplicaSet:
    """The replicas of one engine, from its build to its release."""

    policy: Policy
    """chooses the replica of a request"""
    max_replacements: int
    """most replacements of lost replicas in an hour; 0: lost replicas stay lost"""
    start: Callable[[int], Replica]
    """start(index) starts the workers of a replica whose devices are reserved, and returns their handle"""
    adopt: Callable[[Replica, Replica], int | None]
    """adopt(replica, giver) gives a replica the state of the engine, with weights of a replica that serves; returns the
    version of its weights, or None if it has to wait for a weight sync"""
    name: str
    """name of the engine"""
    session: Session | None
    """places the replicas; None for an engine that is not built"""
    fixed_by: str = ""
    """name of the options that fix the number of replicas; "" if none do"""
    has_to_note_truncation: bool = False
    """nobody has chosen the longest sequence, so the first truncation is worth a warning"""
    is_elsewhere: bool = False
    """the replicas are servers that others start and end"""
    membership: threading.RLock = field(default_factory=threading.RLock)
    """held while the replicas rest, move or receive weights, and while a replica joins or leaves"""
    left: list[ReplicaLeft] = field(default_factory=list)
    """replicas that have left"""
    _late: list[Replica] = field(default_factory=list)
    """replicas that join at the next weight sync"""
    _scaling: threading.Lock = field(default_factory=threading.Lock)
    _autoscaler: Autoscaler | None = None

    def __post_init__(self) -> None:
        is_elastic = self.is_elsewhere or (self.session is not None and self.session.launcher.survives_deaths)
        budget = RestartBudget(self.max_replacements if is_elastic else 0)
        self.supervisor = ReplicaSupervisor(self.name, budget, self._replace, self._give_up)
        self.router = Router(self.name, self.policy, on_loss=self._note_loss)

    @property
    def all(self) -> Sequence[Replica]:
        """The replicas that serve, and lost ones that are not replaced."""
        return self.router.replicas

    @property
    def serving(self) -> list[Replica]:
        """The replicas that serve."""
        return [replica for replica in self.all if replica.failure is None]

    @property
    def members(self) -> list[WorkerSet]:
        """The workers of the replicas; those that stand for several replicas once."""
        return list({replica.workers.ranks: replica.workers for replica in self.all}.values())

    @property
    def num_in_flight(self) -> int:
        """Number of requests that have not ended."""
        return sum(replica.num_in_flight for replica in self.all)

    def close(self) -> None:
        """End everything that runs in the driver, before the workers end."""
        self.supervisor.is_closed = True
        self.follow(None)
        for replica in (*self._late, *self.all):
            replica.close()
        self._late = []
        self.router.clear()

    # -- together ------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Let all replicas rest at a token boundary. Cancelled requests have ended then."""
        together(self.serving, lambda replica: replica.pause())

    def resume(self) -> None:
        """Let all replicas go on."""
        for replica in self.serving:
            replica.resume()

    def cancel(self) -> None:
        """Pause, and end all requests with their tokens so far."""
        for replica in self.serving:
            replica.cancel(None)
        self.pause()

    def each(self, act: Callable[[Any], T]) -> list[T]:
        """Return the results of an action on the replicas, without those that are lost and will be replaced."""
        if not self.max_replacements and not self.is_elsewhere:
            for replica in self.all:
                replica.check()
            return together(self.all, act)

        def attempt(replica: Replica) -> T | WorkerError:
            try:
                replica.check()
                return act(replica)
            except WorkerError as error:
                return error

        replicas = self.all
        outcomes = list(zip(replicas, together(replicas, attempt), strict=True))
        for replica, outcome in outcomes:
            if isinstance(outcome, WorkerError) and not self._hand_over(replica, outcome):
                raise outcome
        return [outcome for _, outcome in outcomes if not isinstance(outcome, WorkerError)]

    def has_lost_some_of(self, members: Sequence[WorkerSet]) -> bool:
        """Return whether some of these workers are no longer members: they are replaced, and others serve."""
        losses = [(replica, loss_of(replica)) for replica in self.all]
        are_replaced = all(error is None or self._hand_over(replica, error) for replica, error in losses)
        return are_replaced and bool(set(members) - set(self.members)) and bool(self.serving)

    def note_truncation(self, ended: InFlightRequest) -> None:
        """Warn once if a completion ended at the default context length."""
        asked, made = ended.request.gconfig.max_new_tokens, len(ended.token_ids)
        if self.has_to_note_truncation and ended.finish_reason == "length" and made < asked:
            self.has_to_note_truncation = False
            logger.warning(
                "%s: a completion ended after %d of %d new tokens, at the default context length of %d tokens; "
                "build(max_model_len=...) sets another one, up to the model's own limit",
                *(self.name, made, asked, len(ended.request.input_ids) + made),
            )

    # -- loss and replacement ------------------------------------------------------------------------------------

    def admit(self, replica: Replica) -> None:
        """Let a replica serve, and notice when one of its workers dies or is asked to end."""
        self.router.add(replica)
        workers, name = replica.workers, self.name

        def ended(rank: int, _: Any) -> None:
            if self.max_replacements and replica in self.all and self.supervisor.has_budget:
                worker = workers.group.describe(rank)
                died = WorkerDied(f"worker process ended: {worker}", (worker,))
                _in_thread(f"loss of {name} {workers.index}", self._hand_over, replica, died)

        def noticed(notice: Future[Any]) -> None:
            has_notice = notice.exception() is None  # else the process died without notice
            if has_notice and replica in self.all and not self.supervisor.is_closed:
                _in_thread(f"departure from {name}", self._leave_if_possible, replica)

        for rank in workers.ranks:
            workers.group.handles[rank].death.add_done_callback(partial(ended, rank))
            workers.group.handles[rank].notice.add_done_callback(noticed)

    def admit_late(self) -> None:
        """Let the replicas serve that have waited for a weight sync. They rest until it has ended."""
        late, self._late = self._late, []
        for replica in late:
            replica.pause()
            self.admit(replica)

    def _note_loss(self, replica: Replica) -> bool:
        """Begin to replace a lost replica.

        Returns whether the set goes on without it: it is replaced, or it is a server that others start.
        """
        return self.supervisor.take_over(replica) or self.is_elsewhere

    def _give_up(self, lost: Replica) -> None:
        """Record that a replica stays lost. Servers of others' are left out; calls on all replicas go on."""
        if not self.is_elsewhere:
            self.router.add(lost)

    def _hand_over(self, replica: Replica, error: WorkerError) -> bool:
        """Let a lost replica be replaced; its requests move to the others.

        Returns False if it stays lost.
        """
        can_go = self.supervisor.has_budget or self.is_elsewhere
        if replica in self.all and self._has_others(replica) and can_go:
            self.expel(replica, error)
        return replica not in self.all

    def expel(self, replica: Replica, error: WorkerError) -> None:
        """Take a replica out of service; its requests move to the others. It is replaced if the budget allows it.

        Args:
            replica: a replica that is lost, or whose weights are not known.
            error: what later calls on it raise.
        """
        replica.workers.mark_lost(error)
        replica.close()  # its thread moves its requests
        self.router.replica_failed(replica, [], error)  # if the thread had ended before

    def _has_others(self, replica: Replica) -> bool:
        return any(other is not replica for other in self.serving)

    def _replace(self, lost: Replica) -> int | None:
        """Start the workers of a lost replica again, and let the replica join.

        Returns the version of its weights; None if it joins at the next weight sync.
        """
        group, ranks, index = lost.workers.group, lost.workers.ranks, lost.workers.index
        lost.workers.mark_lost(WorkerError(f"replica {index} of {self.name} is being replaced"))
        lost.close()
        group.check()  # with the last replica, everything has ended
        if not lost.workers.is_shared:
            wait([group.handles[rank].death for rank in ranks], END_S)  # its memory is free then
        return self._start(index)

    def _start(self, index: int) -> int | None:
        replica = self.start(index)
        try:
            with self.membership:
                if not self.serving:
                    raise WorkerError(f"{self.name}: no other replica is left; release() and build() the engine")
                version = self.adopt(replica, self.serving[0])
                if version is None:
                    self._late.append(replica)
                else:
                    self.admit(replica)
                return version
        except BaseException as error:
            why = error if isinstance(error, WorkerError) else WorkerError(f"replica {index} could not join: {error}")
            replica.workers.mark_lost(why)
            replica.close()
            raise

    # -- joining and leaving -------------------------------------------------------------------------------------

    def scale(self, num_replicas: int) -> None:
        """Let replicas join or leave until `num_replicas` serve; see `ServingEngine.scale`."""
        session = self._check_scalable(num_replicas)
        with self._scaling:
            self.supervisor.settle()
            for replica in self.all:
                if loss_of(replica) is not None:
                    self._leave(replica, "it was lost")
            for replica in self.serving[num_replicas:]:
                self._leave(replica, "the engine was scaled down")
            if (missing := num_replicas - len(self._indices)) > 0:
                vacant = [index for index in range(num_replicas) if index not in self._indices][:missing]
                session.grow(self.name, vacant)
                try:
                    together(vacant, self._start)
                except BaseException as error:  # return the devices of those that cannot start
                    for index in set(vacant) - self._indices:
                        session.shrink(self.name, index, WorkerError(f"replica {index} could not start: {error}"))
                    raise

    def follow(self, policy: ScalingPolicy | None, every_s: float = 5.0, shrink_after_s: float = 60.0) -> None:
        """Scale by a policy; see `ServingEngine.follow`."""
        scaler, self._autoscaler = self._autoscaler, None
        if scaler is not None:
            scaler.close()
        if policy is not None:
            self._check_scalable(1)
            self._autoscaler = Autoscaler(SlowToShrink(policy, shrink_after_s), self._load, self.scale, every_s)

    def _load(self) -> EngineLoad:
        return EngineLoad(num_replicas=len(self.serving), num_in_flight=self.num_in_flight)

    def _check_scalable(self, num_replicas: int) -> Session:
        if num_replicas < 1:
            raise ConfigError(f"scale({num_replicas}): expected at least 1 replica")
        if self.session is None or not self.session.launcher.survives_deaths:
            raise ConfigError("the number of replicas is fixed with this launcher; use launcher='ray'")
        if self.fixed_by:
            raise ConfigError(f"{self.fixed_by} fix the number of replicas")
        return self.session

    @property
    def _indices(self) -> set[int]:
        """Numbers of the replicas that serve, that are being replaced, or that join at the next weight sync."""
        return {*(replica.workers.index for replica in (*self.all, *self._late)), *self.supervisor.under_way}

    def _leave_if_possible(self, replica: Replica) -> None:
        try:
            self._leave(replica, "SIGTERM")
        except RliteError as error:
            logger.warning("%s: a replica got SIGTERM and serves on until it ends: %s", self.name, error)

    def _leave(self, replica: Replica, why: str) -> None:
        """Hand a replica's requests over, end its workers, and return its devices."""
        with self.membership:
            if replica not in self.all or self.session is None:
                return
            if not self._has_others(replica):
                raise ConfigError(f"{self.name}: the only replica that serves cannot leave")
            index, num_moved = replica.workers.index, replica.num_in_flight
            self.router.remove(replica)
            replica.close()  # its thread moves its requests
            self.session.shrink(self.name, index, WorkerError(f"replica {index} of {self.name} has left: {why}"))
            self.left.append(ReplicaLeft(replica=index, num_moved=num_moved, reason=why))
        logger.warning("%s: replica %d has left (%s); %d requests in flight moved", self.name, index, why, num_moved)


def _in_thread(name: str, act: Callable[..., object], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=act, args=args, name=name, daemon=True)
    thread.start()
    return thread
