"""The simulation: the collector's ledger and the engine's router themselves, in virtual time.

Its rules are those of `rlite/rollout/collector`: `_admit` of the runner, `AheadOfTraining.next` and `prepare_batch`.
A test compares both, batch by batch. What is simplified:

- Sequences on a replica share its speed: each one slows all others by the same share.
- The siblings of a group are one request to the router, whose cost counts until the group's end.
- An episode asks the engine once; then its environment and its rewards take their time.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from rlite.assembly.simulate.options import SimulatedRollouts
from rlite.errors import RolloutError, WorkerDied
from rlite.rollout.collector.ledger import RolloutLedger
from rlite.rollout.collector.lost_groups import NOT_ACCEPTED, TOO_OLD, held_up
from rlite.runtime.replicas.replica import InFlightRequest
from rlite.runtime.replicas.router import Router
from rlite.types import GenerationHyperparameters, SequenceRequest, TokenChunk


class Sample(NamedTuple):
    """One episode."""

    work: float
    """seconds of generation alone on a replica"""
    rest: float
    """seconds of its environment and rewards"""
    tokens: float
    """tokens of prompt and response"""


class Template(NamedTuple):
    """A group that a run has made, or could make."""

    samples: Sequence[Sample]
    loss: str = ""
    """why the group is lost at its end; "" if it is ready"""


class Step(NamedTuple):
    """The trainer's seconds in a step."""

    learn: float
    """from the batch to the weight sync"""
    sync: float
    """in which generation rests"""
    between: float
    """from the weight sync to the next step"""
    tokens: float
    """tokens of its batch"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that a simulation needs to know."""

    templates: Sequence[Template]
    """groups, in the order of their submission"""
    steps: Sequence[Step]
    limits: SimulatedRollouts
    batch_size: int
    """groups of a batch"""
    num_replicas: int
    num_lost: int
    """replicas that are lost after half of the steps"""
    slowdown: float
    """relative growth of a sequence's seconds with each further one on its replica"""
    token_share: float
    """share of the learning time that grows with the tokens of the batch"""
    notes: Sequence[str] = ()
    """assumptions, and facts that the run does not show"""


@dataclass(eq=False)
class _Group:
    """A group in flight."""

    template: Template
    works: Sequence[tuple[int, float]]
    """samples that a replica has to generate, with their work"""
    num_left: int
    """samples that have not ended"""
    request: InFlightRequest
    started: float = math.inf
    age: int | None = None
    """version at its first token"""


class _Replica:
    """A replica for the router. Its sequences have one speed, so that one heap orders their ends."""

    failure: WorkerDied | None = None
    is_resting = False
    _at = _progress = 0.0

    def __init__(self, index: int, simulation: Simulation) -> None:
        self.workers, self._simulation = SimpleNamespace(index=index), simulation
        self.running: list[tuple[float, int, int]] = []
        """progress at the end of a sequence, its group and its sample"""
        self.waiting: deque[tuple[float, int, int]] = deque()

    def submit(self, requests: Sequence[InFlightRequest]) -> bool:
        """Take over groups.

        Returns:
            True: the router does not choose a lost replica.
        """
        for number in (request.request.request_id for request in requests):
            self.waiting.extend((work, number, n) for n, work in self._simulation.groups[number].works)
        self.move()
        return True

    @property
    def next_end(self) -> float:
        """Time at which the next sequence ends if nothing changes."""
        if self.is_resting or not self.running:
            return math.inf
        return self._at + (self.running[0][0] - self._progress) * self._seconds_of_work()

    def leave(self, number: int) -> list[tuple[int, float]]:
        """Return the samples of a group that are not generated yet, with the work that is left, and forget them."""
        self.move()
        left = [(n, max(0.0, end - self._progress)) for end, own, n in self.running if own == number]
        left += [(n, work) for work, own, n in self.waiting if own == number]
        self.running = [entry for entry in self.running if entry[1] != number]
        self.waiting = deque(entry for entry in self.waiting if entry[1] != number)
        heapq.heapify(self.running)
        self.move()
        return left

    def move(self) -> None:
        """Move to the present, and start sequences that wait for a place."""
        if not self.is_resting:
            self._progress += (self._simulation.now - self._at) / self._seconds_of_work()
        self._at = self._simulation.now
        while self.waiting and not self.is_resting and len(self.running) < self._simulation.limits.max_num_seqs:
            work, number, sample = self.waiting.popleft()
            group = self._simulation.groups[number]
            group.age = self._simulation.version if group.age is None else group.age
            heapq.heappush(self.running, (self._progress + work, number, sample))

    def _seconds_of_work(self) -> float:
        return 1.0 + self._simulation.workload.slowdown * max(0, len(self.running) - 1)


class Simulation:
    """A trainer and its rollouts. After `run`, its attributes say what has happened.

    Args:
        workload: what is simulated.
        seed: seed of all draws.
    """

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        self.workload, self.limits, self._rng = workload, workload.limits, random.Random(seed)
        self.now, self.version, self.groups = 0.0, 0, dict[int, _Group]()
        limits = workload.limits
        self.ledger = RolloutLedger(
            max_concurrent=limits.max_concurrent_rollouts,
            max_head_offpolicyness=limits.max_head_offpolicyness,
            on_stale=limits.on_stale,
            batch_size=workload.batch_size,
        )
        self.ends: list[float] = []
        """time of the end of each step"""
        self.trainer_waits = self.empty_places = 0.0
        """seconds in which the trainer waited; seconds of an empty place for a group, over the number of places"""
        self.staleness = Counter[int]()
        """groups that were consumed, by their age in updates"""
        self._gconfig = GenerationHyperparameters(max_new_tokens=1)  # the router does not know lengths
        self._router = Router("simulation", on_loss=lambda replica: True)
        self._replicas: list[Any] = [_Replica(index, self) for index in range(workload.num_replicas)]
        for replica in self._replicas:
            self._router.add(replica)
        self._rests: list[tuple[float, int]] = []
        """ends of samples after their environment and rewards"""
        self._num_submitted = self._num_running = self._num_refused = 0
        self._has_changed = False

    def run(self, num_steps: int) -> None:
        """Make so many steps.

        Raises:
            RolloutError: nothing can go on with these settings.
        """
        for step in range(num_steps):
            if step == num_steps // 2:
                self._lose_replicas()
            began = self.now
            groups = [self.groups.pop(number) for number in self.next_batch()]
            self.trainer_waits += self.now - began
            self.staleness.update(self.version - (group.age or 0) for group in groups)
            phases, share = self._rng.choice(self.workload.steps), self.workload.token_share
            tokens = sum(sample.tokens for group in groups for sample in group.template.samples)
            self._pass(phases.learn * (1 + share * (tokens / max(phases.tokens, 1.0) - 1)))
            self._rest(True)
            self._pass(phases.sync)
            self.version += 1
            self._rest(False)
            self._admit()
            self._pass(phases.between)
            self.ends.append(self.now)

    # -- the trainer ---------------------------------------------------------------------------------------------

    def next_batch(self) -> list[int]:
        """Return the oldest groups, consumed, as soon as the ledger lets the trainer consume them."""
        ledger, count, patience = self.ledger, self.workload.batch_size, self.limits.stale_timeout
        self._refill()
        while True:
            self._drop_too_old()
            for number in ledger.holding(count, self.version):
                if self.groups[number].started + patience <= self.now:
                    self._drop(number, held_up(patience).reason)
            if ledger.is_ready(count, self.version):
                break
            self._admit()
            holding = ledger.holding(count, self.version)
            due = min((self.groups[number].started for number in holding), default=math.inf) + patience
            self._has_changed = ledger.counters.waiting < count
            while not self._has_changed and self._next_event(due):
                continue
            self._refill()
        batch, self._num_refused = ledger.oldest(count), 0
        ledger.consume(batch, self.version)
        self._admit()
        return batch

    def _refill(self) -> None:
        """Submit groups until as many wait as a batch has. Those of a batch are neighbours in the run, too.

        What slows one of them, such as a busy machine, slows all of them.
        """
        templates, size = self.workload.templates, self.workload.batch_size
        while self.ledger.counters.waiting < size:
            first = self._rng.randrange(len(templates))
            for place in range(size):
                template, number = templates[(first + place) % len(templates)], self._num_submitted + place
                works = [(n, sample.work) for n, sample in enumerate(template.samples)]
                ids = [number] * len(works)
                asked = SequenceRequest(request_id=number, input_ids=ids, gconfig=self._gconfig, seed=0)
                self.groups[number] = _Group(template, works, len(works), InFlightRequest(asked))
                self.ledger.submit(number)
            self._num_submitted += size

    def _rest(self, is_resting: bool) -> None:
        for replica in self._replicas:
            replica.move()
            replica.is_resting = is_resting
            replica.move()

    def _lose_replicas(self) -> None:
        lost, self._replicas = self._replicas[: self.workload.num_lost], self._replicas[self.workload.num_lost :]
        for replica in lost:
            groups = [self.groups[n] for n in dict.fromkeys(n for _, n, _ in (*replica.running, *replica.waiting))]
            for group in groups:
                group.works = replica.leave(group.request.request.request_id)
            replica.failure = WorkerDied("lost in the simulation")
            self._router.replica_failed(replica, [group.request for group in groups], replica.failure)

    # -- the runner ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        self._drop_too_old()
        for _ in range(min(self.ledger.room(self.version), self.ledger.counters.waiting)):
            group = self.groups[self.ledger.start(self.version)]
            group.started, self._num_running = self.now, self._num_running + 1
            self._router.route([[group.request]])

    def _drop_too_old(self) -> None:
        for number in self.ledger.too_old(self.version):
            self._drop(number, TOO_OLD.reason)

    def _drop(self, number: int, reason: str) -> None:
        group = self.groups.pop(number)
        if group.num_left:
            self._num_running -= 1
            for replica in self._replicas:
                replica.leave(number)
            group.request.abort()
        self.ledger.drop(number, reason)

    def _end_sample(self, number: int) -> None:
        if (group := self.groups.get(number)) is None:  # it was dropped
            return
        group.num_left -= 1
        if group.num_left:
            return
        self._num_running, self._has_changed = self._num_running - 1, True
        group.request.take(TokenChunk(request_id=number, version=self.version, finish_reason="stop"))
        loss, budget = group.template.loss, self.limits.max_refills * self.workload.batch_size
        is_refused = loss == NOT_ACCEPTED.reason and self._num_refused < budget
        self._num_refused += is_refused
        if is_refused or loss not in ("", NOT_ACCEPTED.reason):
            self._drop(number, loss)
        else:
            self.ledger.accept(number, group.age)
        self._admit()

    # -- time ----------------------------------------------------------------------------------------------------

    def _pass(self, seconds: float) -> None:
        end = self.now + seconds
        while self._next_event(end):
            pass

    def _next_event(self, limit: float) -> bool:
        """Let the next event happen.

        Returns:
            False, at the time `limit`, if there is none before.

        Raises:
            RolloutError: no event is left, and there is no limit.
        """
        replica = min(self._replicas, key=lambda replica: replica.next_end)
        end, rest = replica.next_end, self._rests[0][0] if self._rests else math.inf
        at = max(min(end, rest, limit), self.now)
        if at == math.inf:
            raise RolloutError(f"nothing can go on in the simulation: {self.ledger.counters}")
        places = self.limits.max_concurrent_rollouts or self.workload.batch_size
        self.empty_places += (at - self.now) * max(0.0, 1 - self._num_running / places)
        self.now = at
        if min(end, rest) > limit:
            return False
        if rest <= end:
            self._end_sample(heapq.heappop(self._rests)[1])
            return True
        replica.move()
        _, number, sample = heapq.heappop(replica.running)
        replica.move()
        heapq.heappush(self._rests, (at + self.groups[number].template.samples[sample].rest, number))
        return True
