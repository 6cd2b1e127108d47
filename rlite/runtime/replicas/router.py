"""Routing of requests to replicas. The policy is a pure function of the replicas' loads; the router keeps the state."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlite.errors import ConfigError, RliteError, WorkerDied, WorkerError
from rlite.observability import trace
from rlite.runtime.replicas.replica import InFlightRequest, OutstandingTokens, Replica

logger = logging.getLogger(__name__)

Policy = Callable[[Mapping[int, int], int | None], int]
"""policy(outstanding tokens by serving replica, replica of earlier requests of this affinity) -> replica"""
MAX_SESSIONS = 65536
"""capacity for affinity keys that were used at least twice"""
MAX_FIRST = 8192
"""capacity for affinity keys that were used once; most are never used again"""


def least_outstanding(loads: Mapping[int, int], home: int | None) -> int:
    """Return the replica of earlier requests if it serves, else the replica with the fewest outstanding tokens.

    `loads`: outstanding tokens of each replica that serves, by its index; not empty. `home`: index of the replica that
    served this affinity before, or None. It may be lost.
    """
    return home if home is not None and home in loads else min(loads, key=loads.__getitem__)


class Affinities:
    """Replica of each affinity key. Keys that were used once are kept apart, so that they evict no session."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, max_first: int = MAX_FIRST) -> None:
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._first: OrderedDict[str, int] = OrderedDict()
        self._limits = max_sessions, max_first

    def get(self, key: str) -> int | None:
        """Return the replica that served this key last, None if the key is new or evicted."""
        return self._sessions.get(key, self._first.get(key))

    def set(self, key: str, replica: int) -> None:
        """Record a request's replica. The least recently used keys are evicted."""
        is_session = key in self._sessions or self._first.pop(key, None) is not None
        table, limit = (self._sessions, self._limits[0]) if is_session else (self._first, self._limits[1])
        table[key] = replica
        table.move_to_end(key)
        if len(table) > limit:
            table.popitem(last=False)


@dataclass(frozen=True, kw_only=True)
class ReplicaLost:
    """The loss of one replica. The others continue to serve."""

    replica: int
    workers: tuple[str, ...]
    """workers that died"""
    num_moved: int
    """number of requests in flight that continue elsewhere, from the tokens generated so far"""
    reason: str


OnLoss = Callable[[Replica], bool]
"""on_loss(replica): a replica was lost, and others serve; returns whether it will be replaced"""


def loss_of(replica: Replica) -> WorkerError | None:
    """Return why the workers of a replica are gone; None if they are not, or if the engine was released."""
    try:
        replica.check()
    except WorkerError as error:
        return error
    except RliteError:
        return None
    return replica.failure if isinstance(replica.failure, WorkerError) else None


class Router:
    """Routes requests to replicas, and moves requests of a lost replica to the others.

    `on_loss`: called in a thread of the lost replica.
    """

    def __init__(self, name: str, policy: Policy = least_outstanding, on_loss: OnLoss = lambda replica: False) -> None:
        self.name, self._policy, self._on_loss = name, policy, on_loss
        self.lost: list[ReplicaLost] = []
        """lost replicas, in the order of their loss"""
        self._affinities = Affinities()
        self._members: dict[int, Replica] = {}
        self._noted: list[Replica] = []
        self._outstanding: dict[int, OutstandingTokens] = {}
        self._lock = threading.RLock()

    @property
    def replicas(self) -> list[Replica]:
        """The replicas by index: the serving ones, and lost ones that are not replaced."""
        with self._lock:
            return [self._members[index] for index in sorted(self._members)]

    def add(self, replica: Replica) -> None:
        """Route requests to this replica too from now on. It is ready, and no other one has its number."""
        with self._lock:
            self._outstanding[replica.workers.index] = OutstandingTokens()
            self._members[replica.workers.index] = replica

    def remove(self, replica: Replica) -> None:
        """Route no further requests to this replica. Safe to call again."""
        with self._lock:
            self._members = {index: each for index, each in self._members.items() if each is not replica}

    def clear(self) -> None:
        """Remove all replicas."""
        with self._lock:
            self._members.clear()

    def route(self, groups: Sequence[Sequence[InFlightRequest]], affinity: str | None = None) -> None:
        """Submit requests to the replicas that the policy chooses.

        `groups`: groups of siblings, which share a prompt. Each group goes to one replica.
        """
        refused = groups
        while refused:
            chosen = [(self._choose(siblings, affinity), siblings) for siblings in refused]
            refused = [siblings for replica, siblings in chosen if not replica.submit(siblings)]

    def _choose(self, siblings: Sequence[InFlightRequest], affinity: str | None) -> Replica:
        with self._lock:
            serving = {index: replica for index, replica in self._members.items() if replica.failure is None}
            if not serving:
                self._raise_failure()
            loads = {index: self._outstanding[index].count for index in serving}
            chosen = self._policy(loads, None if affinity is None else self._affinities.get(affinity))
            if chosen not in loads:
                raise ConfigError(f"{self.name}: routing returned {chosen!r}; expected one of the replicas {[*loads]}")
            if affinity is not None:
                self._affinities.set(affinity, chosen)
            for request in siblings:
                request.count_at(self._outstanding[chosen])
        return serving[chosen]

    def _raise_failure(self) -> None:
        for replica in self.replicas:
            replica.check()  # names all who died
        failures = [replica.failure for replica in self.replicas if replica.failure is not None]
        if not failures:
            raise RliteError(f"{self.name} was released; build the engine again")
        # a replica that was lost before did not fail the last one
        failure = next((error for error in failures if not isinstance(error, WorkerError)), failures[0])
        raise type(failure)(*failure.args)

    def cancel(self, requests: Sequence[InFlightRequest]) -> None:
        """Cancel requests on every replica."""
        for request in requests:
            request.is_cancelled = True  # before replicas are asked: it may be on its way from one to another
        for replica in self.replicas:
            replica.cancel([request.request.request_id for request in requests])

    def replica_failed(self, replica: Replica, requests: list[InFlightRequest], error: Exception) -> None:
        """Move a lost replica's requests to other replicas; called in a thread of the lost replica.

        `error`: a WorkerError if its workers are gone; any other error of a replica that was not removed ends the
        requests.
        """
        error = error if isinstance(error, WorkerError) else loss_of(replica) or error
        others = [other for other in self.replicas if other is not replica and other.failure is None]
        is_member = replica in self.replicas
        if not others or (is_member and not isinstance(error, WorkerError)):
            for request in requests:
                request.fail(error)
            return
        if is_member:
            self._note_loss(replica, len(requests), error)
        siblings: dict[tuple[int, ...], list[InFlightRequest]] = {}
        for request in requests:
            siblings.setdefault(tuple(request.request.input_ids), []).append(request)
        try:
            self.route(list(siblings.values()))
        except RliteError as failure:  # the others are gone by now
            for request in requests:
                request.fail(failure)

    def _note_loss(self, replica: Replica, num_moved: int, error: Exception) -> None:
        with self._lock:  # two threads may report one loss
            if replica not in self.replicas or replica in self._noted:
                return
            self._noted.append(replica)
            index, died = replica.workers.index, error.workers if isinstance(error, WorkerDied) else ()
            facts = (self.name, index, "; ".join(died) or error, num_moved)
            logger.warning("%s lost replica %d (%s): its %d requests in flight continue on the others", *facts)
            trace.instant("replica lost", engine=self.name, replica=index, workers=died, num_moved=num_moved)
            if self._on_loss(replica):
                self.remove(replica)
            # readers of the list can wait for the replacement
            self.lost.append(ReplicaLost(replica=index, workers=died, num_moved=num_moved, reason=str(error)))
