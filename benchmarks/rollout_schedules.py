"""Random schedules of a whole job in virtual time, and a checker that proves what the job promises ("Jepsen").

    python -m benchmarks.rollout_schedules --num 2000 --seed 0
    python -m benchmarks.rollout_schedules --only SEED          # one schedule again, event by event

A schedule is drawn from its seed: the sizes of a job, and faults at random moments: the trainer is killed, a replica is
killed, stopped for a while or slow, a message is late or comes twice, the disk is full, the wall clock jumps, the whole
machine stands still. The job is made of the production classes: `RolloutCollector` with its runner and its ledger,
`Router` with `InFlightTable` and `complete`, the saved states, `Checkpoints` on a disk, and `decide` of the failover.
They run in one thread by a clock that never waits (`tests/virtual_time.py`), so that a seed always gives the same run.

The checker reads the record, the ledger of the last checkpoint and the log of decisions:

- each rollout that was submitted is in the record once: trained, or lost for a reason that the schedule gives
- groups are whole, batches are full, and each reward is the item's own: no failure counts as a number
- no token is older than the bound, and no more groups run than the ledger may admit
- a caller is woken at the moment when its condition holds, and no batch stays away
- stale events change no state, runs and tickets only rise, and a job ends when its faults end

The exit status is 1 if a schedule fails; its seed is printed.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import io
import logging
import pickle
import random
import shutil
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict

from rlite.assembly.observers import Outcome
from rlite.errors import CheckpointError, RliteError, WorkerDied
from rlite.rollout import CollectorOptions, LLMRequest, RolloutCollector, RolloutWorkflow, trajectory
from rlite.rollout.collector.ended import Ended
from rlite.runtime.replicas.replica import InFlightRequest, InFlightTable
from rlite.runtime.replicas.router import Router
from rlite.runtime.replicas.serving import complete
from rlite.runtime.storage.atomic import publish, seal, staging, verify
from rlite.services.recovery.failover import (
    CreateJob,
    EndJob,
    Event,
    FailoverPolicy,
    JobState,
    JobSubmitted,
    Recovered,
    RecoveryFailed,
    RestartRole,
    RestartWorkload,
    RolePolicy,
    StartTrainer,
    TrainerBegun,
    TrainerFailed,
    TrainerFinished,
    WorkloadsFailed,
    decide,
)
from rlite.trainer.run.checkpoints import Checkpoints
from rlite.types import LLMResponse, SequenceRequest, TokenChunk
from tests.virtual_time import Clock, VirtualLoop, loop_of, virtual_time

PATIENCE = 120.0
"""seconds after which a batch that is not there is a deadlock; no fault lasts so long"""
HORIZON = 6.0
"""seconds in which faults begin"""
NUM_TOKENS = 2
"""tokens of an answer"""
SEALED = 16
"""one schedule in so many writes checkpoints with their manifests, and verifies them"""
LATE = 1e-6
"""seconds for which a caller may sleep although its condition holds"""
Plant = Callable[[], AbstractContextManager[object]]
"""context in which a bug is planted"""


class Violation(Exception):
    """A promise was broken."""


class Killed(BaseException):
    """The trainer's process is gone."""


@dataclass(frozen=True)
class Plan:
    """A schedule, drawn from its seed."""

    seed: int
    steps: int
    size: int
    """groups of a batch"""
    siblings: int
    options: CollectorOptions
    replicas: int
    save_every: int
    keep: int
    is_asynchronous: bool
    """checkpoints are written while training goes on"""
    refuses: bool
    """every seventh group is refused"""
    failing: int
    """one item in so many fails at first; 0: none"""
    faults: tuple[tuple[float, str, float], ...]
    """time, kind and seconds"""

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Draw the schedule of a seed."""
        draw = random.Random(seed)
        size, eta = draw.choice([1, 1, 2, 3]), draw.randint(1, 3)
        options = CollectorOptions(
            consumer_batch_size=size,
            max_head_offpolicyness=eta,
            max_concurrent_rollouts=draw.choice([None, 1, 2, 5, 8]),
            on_stale=draw.choice(["wait", "wait", "drop"]),
            stale_timeout=draw.choice([6.0, 40.0]),
            request_retries=1,
            max_consecutive_failures=10**6,
            keep_ended=True,
            seed=draw.choice([None, 3]),
        )
        kinds = [
            "kill trainer",
            "kill replica",
            "stop replica",
            "slow replica",
            "disk full",
            "wall clock",
            "stand still",
        ]
        kinds += ["pause", "again"]
        faults = [
            (draw.uniform(0.0, HORIZON), draw.choice(kinds), draw.uniform(0.1, 4.0)) for _ in range(draw.randint(0, 5))
        ]
        return cls(
            seed=seed,
            steps=draw.randint(2, 3),
            size=size,
            siblings=draw.choice([1, 1, 2]),
            options=options,
            replicas=draw.randint(1, 3),
            save_every=draw.randint(1, 2),
            keep=draw.randint(1, 2),
            is_asynchronous=draw.random() < 0.5,
            refuses=draw.random() < 0.3,
            failing=draw.choice([0, 0, 4]),
            faults=tuple(sorted(faults)),
        )

    @property
    def is_sealed(self) -> bool:
        """Whether checkpoints are written as runs write them, which takes most of a schedule's time."""
        return self.seed % SEALED == 0

    # -- facts of the items, which the checker knows, too -------------------------------------------------------

    def reward(self, number: int) -> float:
        """Reward of an item, never 0."""
        return 1.0 + number % 11 / 8

    def is_refused(self, number: int) -> bool:
        """Whether the item's group is refused."""
        return self.refuses and number % 7 == 3

    def failures(self, number: int) -> int:
        """Attempts at an item that fail, over its siblings."""
        if not self.failing or number % self.failing != 1:
            return 0
        return 10**6 if number % 3 == 2 else 1


class Rewarded(RolloutWorkflow):
    """One answer, or an exception as the plan says."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._failed = plan, Counter[int]()

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        number = data["number"]
        response = await engine.agenerate(LLMRequest(input_ids=[1, number], metadata=dict(data)))
        if self._failed[number] < self._plan.failures(number):
            self._failed[number] += 1
            raise LookupError(f"attempt at {number}")
        return trajectory(response, reward=self._plan.reward(number))


class VirtualReplica:
    """A replica whose tokens come in timers. It may die, stop and be slow; its table is the production one."""

    def __init__(self, index: int, world: World, loop: VirtualLoop, version: int) -> None:
        self.workers = SimpleNamespace(index=index)
        self.version, self.is_dead, self.stopped_until, self.slow_until = version, False, 0.0, 0.0
        self._world, self._loop, self._table, self.is_resting = world, loop, InFlightTable(), False
        self._held: list[tuple[InFlightRequest, int]] = []

    @property
    def failure(self) -> Exception | None:
        """Why it serves no more, as far as anyone knows."""
        return self._table.failure

    def check(self) -> None:
        """Raise its failure."""
        if self.failure is not None:
            raise self.failure

    def submit(self, requests: Sequence[InFlightRequest]) -> bool:
        """Take requests, although it may be dead: nobody knows yet."""
        if not self._table.add(requests):
            return False
        for request in requests:
            left = NUM_TOKENS - len(request.remaining_request().output_ids)
            self._later(request, max(left, 1))
        return True

    def rest(self, is_resting: bool) -> None:
        """Make no token, or go on."""
        self.is_resting, held, self._held = is_resting, self._held, []
        for request, left in held:
            self._loop.events.call_later(self._world.draw.uniform(0.0, 0.05), self._token, request, left)

    def cancel(self, request_ids: Any) -> None:
        """End requests a moment later."""
        for number in self._table.cancel(request_ids):
            self._loop.events.call_later(self._world.draw.uniform(0.0, 0.1), self._abort, number)

    def _abort(self, number: int) -> None:
        if not self.is_dead:
            self._table.take([TokenChunk(request_id=number, version=self.version, finish_reason="abort")])

    def _later(self, request: InFlightRequest, left: int) -> None:
        draw, now = self._world.draw, self._loop.clock.now
        seconds = draw.expovariate(2.0) * (8.0 if now < self.slow_until else 1.0)
        self._loop.events.call_later(seconds, self._token, request, left)

    def _token(self, request: InFlightRequest, left: int) -> None:
        now = self._loop.clock.now
        if self.is_dead or request.done.done():
            return
        if self.is_resting:
            self._held.append((request, left))
            return
        if now < self.stopped_until:
            self._loop.events.call_later(self.stopped_until - now, self._token, request, left)
            return
        number, is_last = request.request.request_id, left <= 1
        chunk = TokenChunk(
            request_id=number,
            version=self.version,
            token_ids=[5],
            logprobs=[-1.0],
            sampling_logprobs=[-1.0],
            finish_reason="stop" if is_last else None,
        )
        self._table.take([chunk])
        if not is_last:
            self._later(request, left - 1)

    def die(self, router: Router) -> None:
        """Die. The driver notices it later, and moves the requests."""
        if not self.is_dead:
            self.is_dead = True
            self._loop.events.call_later(self._world.draw.uniform(0.0, 0.5), self._noticed, router)

    def _noticed(self, router: Router) -> None:
        error = WorkerDied(f"replica {self.workers.index} died", (f"replica {self.workers.index}",))
        requests = self._table.fail(error)
        router.replica_failed(self, requests, error)  # type: ignore[arg-type]


class Fleet:
    """An inference engine: the production router over virtual replicas."""

    def __init__(self, world: World, version: int) -> None:
        self._world, self._version, self._numbers = world, version, iter(range(1 << 30))
        self.router = Router("fleet", on_loss=lambda replica: True)
        self._replicas: Any = SimpleNamespace(name="fleet", router=self.router, note_truncation=lambda request: None)
        self.seed = None
        self.loop: VirtualLoop | None = None

    def start(self, loop: VirtualLoop) -> None:
        """Let the replicas serve, by the loop of the collector."""
        self.loop = loop
        for index in range(self._world.plan.replicas):
            self.join(index)

    def join(self, index: int) -> None:
        """Let a replica join, unless its place is taken."""
        if self.loop is not None and all(each.workers.index != index for each in self.router.replicas):
            replica: Any = VirtualReplica(index, self._world, self.loop, self._version)
            self.router.add(replica)

    async def agenerate(self, request: LLMRequest, on_chunk: Any = None) -> LLMResponse:
        """Complete a request as the engines do."""
        asked = SequenceRequest(
            request_id=next(self._numbers), input_ids=request.input_ids, gconfig=request.gconfig, seed=0
        )
        flight = InFlightRequest(asked, on_chunk)
        await complete(self._replicas, flight, request.rid)
        return flight.response(request)

    def get_version(self) -> int:
        """Return the policy version."""
        return self._version

    def set_version(self, version: int) -> None:
        """Stamp tokens with a version."""
        self._version = version
        for replica in self.router.replicas:
            _virtual(replica).version = version

    def pause(self) -> None:
        """Rest."""
        self._rest(True)

    def resume(self) -> None:
        """Go on."""
        self._rest(False)

    def _rest(self, is_resting: bool) -> None:
        for replica in self.router.replicas:
            _virtual(replica).rest(is_resting)


def _virtual(replica: Any) -> VirtualReplica:
    """Return a replica of a fleet's router, all of which are virtual."""
    return replica


@dataclass
class Disk:
    """A disk that may be full, with the engine that writes checkpoints to it for `Checkpoints`."""

    world: World
    full_until: float = 0.0
    loop: VirtualLoop | None = None

    def save_state(self, path: Path, is_asynchronous: bool, kept: Mapping[str, Any] | None, **facts: Any) -> Writing:
        """Begin to write a checkpoint: its content is that of this moment."""
        content = io.BytesIO()
        if self.world.plan.is_sealed:
            torch.save(kept, content)
        else:
            pickle.dump(kept, content, pickle.HIGHEST_PROTOCOL)
        return Writing(self, path, content.getvalue(), facts)

    def load_state(self, path: Path) -> dict[str, Any]:
        """Return what was kept, and the facts."""
        kept: Any
        if self.world.plan.is_sealed:
            verify(path)
            kept = torch.load(path / "kept.pt")
        else:
            kept = pickle.loads((path / "kept.pt").read_bytes())
        return {"step": int(path.name.partition("-")[2]), "kept": kept}


class Writing:
    """A checkpoint that is being written. Its folder has its name at the end alone."""

    def __init__(self, disk: Disk, path: Path, content: bytes, facts: Mapping[str, Any]) -> None:
        self._disk, self._path, self._content, self._facts = disk, path, content, facts
        self._error: CheckpointError | None = None
        self._is_done = False
        assert disk.loop is not None
        self._folder = staging(path)
        disk.loop.events.call_later(disk.world.draw.uniform(0.01, 0.4), self._end)

    def _end(self) -> None:
        if self._disk.world.clock.now < self._disk.full_until:
            self._error = CheckpointError(f"{self._path}: the disk is full")
        else:
            (self._folder / "kept.pt").write_bytes(self._content)
            if self._disk.world.plan.is_sealed:
                seal(self._folder, dict(self._facts))
            publish(self._folder, self._path)
        self._is_done = True

    def done(self) -> bool:
        """Whether it is written, or has failed."""
        return self._is_done

    def result(self) -> Path:
        """Wait for its end."""
        assert self._disk.loop is not None
        while not self._is_done:
            self._disk.loop.sleep(0.01)
        if self._error is not None:
            raise self._error
        return self._path


@dataclass
class World:
    """A machine, its disk, and the master that starts the trainer."""

    plan: Plan
    folder: Path
    clock: Clock = field(default_factory=Clock)
    draw: random.Random = field(init=False)
    record: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """rows of the record by step"""
    log: list[str] = field(default_factory=list)
    state: JobState = field(default_factory=JobState)
    messages: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    fleet: Fleet | None = None
    collector: RolloutCollector | None = None
    started: list[int] = field(default_factory=list)
    """runs of the trainer"""
    to_start: StartTrainer | None = None
    is_running: bool = False
    num_messages: int = 0
    still: float = 0.0
    """seconds for which the machine stood still since the trainer began"""

    def __post_init__(self) -> None:
        self.draw, self.disk = random.Random(self.plan.seed + 1), Disk(self)
        self.policy = FailoverPolicy(roles={"rollout": RolePolicy("workload", 20)}, max_job_restarts=20)
        self._tickets, self._sizes = set[int](), (0, 0, 0)

    def say(self, text: str) -> None:
        """Note an event."""
        self.log.append(f"{self.clock.now:9.3f}  {text}")

    # -- time and messages ---------------------------------------------------------------------------------------

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Let something happen at a time."""
        self.num_messages += 1
        heapq.heappush(self.messages, (moment, self.num_messages, act))
        if self.collector is not None and not loop_of(self.collector).events.is_closed():
            loop_of(self.collector).events.call_at(max(moment, self.clock.now), lambda: None)  # time does not skip it

    def tick(self) -> None:
        """Let happen what is due."""
        while self.messages and self.messages[0][0] <= self.clock.now:
            heapq.heappop(self.messages)[2]()
        if self.collector is not None:
            self.check_bounds(self.collector)

    def send(self, event: Event, is_repeated: bool = False) -> None:
        """Send an event to the master. Messages overtake each other, and some come twice."""
        for _ in range(1 + is_repeated):
            self.at(self.clock.now + self.draw.uniform(0.0, 0.6), lambda: self.decide(event))

    # -- the master ----------------------------------------------------------------------------------------------

    def decide(self, event: Event) -> None:
        """Decide about an event, check the decision, and carry it out."""
        before = self.state
        decision = decide(before, event, self.policy)
        self.say(f"master: {event}: {decision.why}")
        if decision.is_stale and (decision.state != before or decision.actions):
            raise Violation(f"a stale event changed the job: {event}")
        self.state = decision.state
        for action in decision.actions:
            self.carry_out(action)

    def carry_out(self, action: Any) -> None:
        """Carry out an action."""
        if isinstance(action, EndJob):
            return
        if not 0 <= action.delay_s <= self.policy.max_backoff_s:
            raise Violation(f"a delay is out of its bounds: {action}")
        if isinstance(action, StartTrainer):
            if self.state.recoveries or (self.started and action.run <= max(self.started)):
                raise Violation(f"a trainer starts too early, or again: {action}")
            self.to_start = action
            self.at(self.clock.now + action.delay_s, lambda: self.start_trainer(action))
            return
        if action.ticket in self._tickets:
            raise Violation(f"a ticket was given twice: {action}")
        self._tickets.add(action.ticket)
        needed = action.delay_s + self.draw.uniform(0.05, 1.0)
        self.at(self.clock.now + needed, lambda: self.made(action))
        if isinstance(action, CreateJob) and self.is_running:
            self.is_running = False
            raise Killed("the job is made again")

    def made(self, action: CreateJob | RestartRole | RestartWorkload) -> None:
        """Workloads are there, or could not be made."""
        if self.draw.random() < 0.05:
            detail = f"no device for ticket {action.ticket}"
            self.send(RecoveryFailed(self.wall, action.ticket, detail=detail))
            return
        if self.fleet is not None and isinstance(action, RestartWorkload):
            self.fleet.join(action.workload.rank)
        self.send(Recovered(self.wall, action.ticket), is_repeated=self.draw.random() < 0.1)

    def start_trainer(self, action: StartTrainer) -> None:
        """Start the trainer, unless another start has replaced this one."""
        if self.to_start is action and action.run == self.state.run and not self.state.has_ended:
            if self.is_running:
                self.is_running = False
                raise Killed("another run of the trainer begins")
            self.is_running = True
            self.started.append(action.run)

    def lose_trainer(self, reason: Killed) -> None:
        """Report the end of the trainer's process to the master."""
        self.say(f"trainer: killed: {reason}")
        self.send(TrainerFailed(self.wall, self.started[-1], "its process ended"), is_repeated=self.draw.random() < 0.3)

    @property
    def wall(self) -> float:
        """The time that events carry."""
        return self.clock.wall()

    # -- faults --------------------------------------------------------------------------------------------------

    def fault(self, kind: str, seconds: float) -> None:
        """Let a fault happen."""
        self.say(f"fault: {kind} {seconds:.2f}")
        replicas: Sequence[Any] = self.fleet.router.replicas if self.fleet is not None else ()
        victim: Any = replicas[int(seconds * 100) % len(replicas)] if replicas else None
        match kind:
            case "kill trainer" if self.is_running:
                self.is_running = False
                raise Killed(kind)
            case "kill replica" if victim is not None and self.fleet is not None:
                victim.die(self.fleet.router)
                life = self.state.life("rollout", victim.workers.index)
                self.send(WorkloadsFailed(self.wall, (life,), "dead"), is_repeated=seconds > 2)
            case "stop replica" if victim is not None:
                victim.stopped_until = self.clock.now + seconds
            case "slow replica" if victim is not None:
                victim.slow_until = self.clock.now + 2 * seconds
            case "disk full":
                self.disk.full_until = self.clock.now + seconds
            case "wall clock":
                self.clock.offset += (seconds - 2.0) * 3600
            case "stand still":
                self.clock.now += seconds
                self.still += seconds
            case "pause" if self.collector is not None:
                collector = self.collector
                collector.pause()
                self.at(self.clock.now + seconds, lambda: collector.resume() if collector is self.collector else None)
            case "again" if self.state.run:
                self.send(TrainerFailed(self.wall, self.state.run - 1, "an old report"), is_repeated=True)

    # -- checks while it runs ------------------------------------------------------------------------------------

    def check_bounds(self, collector: RolloutCollector) -> None:
        """Check the bounds of the ledger."""
        ledger = collector._ahead.ledger
        if (sizes := (len(ledger._running), len(ledger._ready), len(ledger._waiting))) == self._sizes:
            return
        self._sizes = sizes
        plan, found = self.plan, ledger.counters
        eta, version = plan.options.max_head_offpolicyness, collector.engine.get_version()
        if found.running > (plan.options.max_concurrent_rollouts or plan.size):
            raise Violation(f"too many groups run: {found}")
        if found.running and found.running + found.accepted > (eta + version + 1) * plan.size:
            raise Violation(f"more groups than version {version} allows: {found}")


class Process:
    """One life of the trainer: its loop, as `PpoTrainer` and `TrainerLoop` order it."""

    def __init__(self, world: World) -> None:
        self.world, self.plan = world, world.plan
        self.step = 0
        self.position = 0
        """items that were read"""

    def __iter__(self) -> Iterator[list[dict[str, int]]]:
        while True:
            first, self.position = self.position, self.position + self.plan.size
            yield [{"number": number} for number in range(first, self.position)]

    def run(self) -> None:
        """Train to the last step."""
        world, plan = self.world, self.plan
        checkpoints = Checkpoints(world.folder / "state", plan.keep, "latest", plan.is_asynchronous)
        engine: Any = world.disk
        found = checkpoints.restore(engine, {})
        self.step = found.get("step", 0)
        world.say(f"trainer: run {world.state.run} from step {self.step}")
        for step in [step for step in world.record if step > self.step]:
            del world.record[step]
        fleet = world.fleet = Fleet(world, self.step)
        collector = world.collector = RolloutCollector(fleet, plan.options)
        loop = world.disk.loop = loop_of(collector)
        fleet.start(loop)
        workflow, accept = Rewarded(plan), self._is_accepted
        if found:
            self.position = found["kept"]["position"]
            collector.load_state_dict(found["kept"]["rollouts"], workflow, accept)
        for moment, _, _ in world.messages:
            loop.events.call_at(max(moment, world.clock.now), lambda: None)
        world.send(TrainerBegun(world.wall, world.state.run, is_recoverable=True))
        world.still = 0.0
        try:
            while self.step < plan.steps:
                batch = collector.prepare_batch(self, workflow, accept, plan.siblings, timeout=PATIENCE)
                self.learn(collector, loop, batch)
                self.step += 1
                self.note(collector, batch)
                checkpoints.look()
                if self.step % plan.save_every == 0 or self.step == plan.steps:
                    kept = {"position": self.position, "rollouts": collector.state_dict()}
                    checkpoints.save(self.step, engine, {}, {}, kept)
                    world.say(f"trainer: saves step {self.step}")
                checkpoints.confirm()
            checkpoints.finish()
        finally:
            late = loop.longest_sleep - world.still
            world.collector = world.fleet = None
        if late > LATE:
            raise Violation(f"a caller slept for {late:.3f} s although its condition held: a lost wake-up")
        ended = collector.take_all("the run ended")
        self.write(self.step + 1, [Outcome(aborted="the run ended").decide(group) for group in ended])

    def learn(self, collector: RolloutCollector, loop: VirtualLoop, batch: TensorDict) -> None:
        """Let the time of an update and of a weight sync pass."""
        draw, engine = self.world.draw, self.world.fleet
        assert engine is not None
        loop.sleep(draw.uniform(0.05, 0.8))
        engine.pause()
        loop.sleep(draw.uniform(0.0, 0.2))
        engine.set_version(self.step + 1)
        if not collector._runner.is_paused:
            engine.resume()
        if draw.random() < 0.8:
            collector.version_changed()
        else:  # its thread is late
            loop.events.call_later(draw.uniform(0.0, 0.3), collector.version_changed)
            loop.sleep(0.31)

    def note(self, collector: RolloutCollector, batch: TensorDict) -> None:
        """Record a step, as `RunRecord` does."""
        trained = set(batch["group_ids"].tolist())
        ended = collector.take_ended()
        outcome = Outcome(ended=ended, trained=trained)
        self.write(self.step, [outcome.decide(group) for group in ended])
        self.world.say(f"trainer: step {self.step} of groups {sorted(trained)}")

    def write(self, step: int, groups: Sequence[Ended]) -> None:
        """Write the rows of a step."""
        rows = self.world.record.setdefault(step, [])
        for group in groups:
            for sample, episode in enumerate(group.episodes):
                row = episode.trajectory
                made = row is not None and row["versions"][row["versions"] >= 0]
                rows.append(
                    {
                        "number": int(group.columns["number"]),
                        "group": group.group,
                        "sample": sample,
                        "status": group.status,
                        "reason": group.reason,
                        "reward": None if row is None else float(row["rewards"][0]),
                        "version": int(made.min()) if isinstance(made, torch.Tensor) and len(made) else None,
                    }
                )

    def _is_accepted(self, group: TensorDict) -> bool:
        return not self.plan.is_refused(int(group["input_ids"][0, 1]))


def run_schedule(seed: int, folder: Path, plant: Plant = nullcontext) -> World:
    """Run the schedule of a seed, and check it.

    Args:
        seed: the seed.
        folder: takes the checkpoints; what it holds is deleted.
        plant: context in which a bug is planted.

    Raises:
        Violation: a promise was broken.
    """
    plan = Plan.of(seed)
    shutil.rmtree(folder, ignore_errors=True)
    world = World(plan, folder)
    with virtual_time(world.clock) as clock, plant():
        try:
            for moment, kind, seconds in plan.faults:
                world.at(moment, lambda kind=kind, seconds=seconds: world.fault(kind, seconds))
            world.decide(JobSubmitted(world.wall))
            while not world.state.has_ended:
                clock.is_over = lambda: None
                while not world.is_running and not world.state.has_ended:
                    if not world.messages:
                        raise Violation(f"the job waits for nothing: {world.state}")
                    clock.now = max(clock.now, world.messages[0][0])
                    try:
                        world.tick()
                    except Killed as reason:  # before its first step
                        world.lose_trainer(reason)
                if not world.state.has_ended:
                    live(world)
            check(world)
        except Violation as violation:
            raise Violation(f"seed {seed}: {violation}") from violation
        except (AssertionError, RliteError) as error:
            raise Violation(f"seed {seed}: {type(error).__name__}: {error}") from error
    return world


def live(world: World) -> None:
    """Run one life of the trainer, and report its end to the master."""
    run, process = world.started[-1], Process(world)
    world.clock.is_over = world.tick
    collector: RolloutCollector | None = None
    try:
        process.run()
        world.send(TrainerFinished(world.wall, run))
    except Killed as reason:
        world.lose_trainer(reason)
    except (CheckpointError, WorkerDied) as error:
        world.say(f"trainer: {type(error).__name__}: {error}")
        world.send(TrainerFailed(world.wall, run, str(error)))
    finally:
        world.is_running = False
        collector, world.collector, world.fleet = world.collector, None, None
        if world.disk.loop is not None:
            world.clock.is_over = lambda: None
            before = world.clock.now
            world.disk.loop.close()
            world.clock.now, world.disk.loop = before, None
        del collector


def check(world: World) -> None:
    """Check the record, and the ledger of the last checkpoint.

    Raises:
        Violation: a promise was broken.
    """
    plan = world.plan
    if world.state.stage != "FINISHED":
        raise Violation(f"the job ended as {world.state.stage}: {world.state.error}")
    kept = Disk(world).load_state(world.folder / "state" / f"step-{plan.steps}")["kept"]
    ledger, left = kept["rollouts"]["ledger"], [group["data"]["number"] for group in kept["rollouts"]["groups"]]
    rows = [{**row, "step": step} for step, own in sorted(world.record.items()) for row in own]
    places = Counter((row["number"], row["sample"]) for row in rows)
    expected = [(number, sample) for number in range(kept["position"]) for sample in range(plan.siblings)]
    if missing := [place for place in expected if not places[place]]:
        raise Violation(f"rollouts are nowhere in the record: {missing}")
    if twice := {place: count for place, count in places.items() if count > 1}:
        raise Violation(f"rollouts are in the record more than once: {twice}")
    if places.keys() - set(expected):
        raise Violation(f"rollouts that nobody submitted: {places.keys() - set(expected)}")
    if unlike := set(left) ^ {row["number"] for row in rows if row["step"] > plan.steps}:
        raise Violation(f"groups under way differ between checkpoint and record: {unlike}")
    statuses: dict[int, set[str]] = defaultdict(set)
    for row in rows:
        statuses[row["number"]].add(row["status"])
    if torn := {number: found for number, found in statuses.items() if len(found) > 1}:
        raise Violation(f"groups are not whole: {torn}")
    lost = 0
    for row in rows:
        check_row(plan, row)
        lost += row["sample"] == 0 and row["status"] != "trained" and row["step"] <= plan.steps
    for step in range(1, plan.steps + 1):
        trained = {row["group"] for row in rows if row["step"] == step and row["status"] == "trained"}
        if len(trained) != plan.size:
            raise Violation(f"step {step} was trained on {len(trained)} groups of {plan.size}")
    if ledger["consumed"] != plan.steps * plan.size or sum(ledger["lost"].values()) != lost:
        raise Violation(f"the ledger counts {ledger}, the record {plan.steps * plan.size} and {lost} lost")


def check_row(plan: Plan, row: Mapping[str, Any]) -> None:
    """Check one rollout.

    Raises:
        Violation: its status, its reward or its age is wrong.
    """
    number, status = row["number"], row["status"]
    failures = plan.failures(number)
    if status == "trained":
        if row["reward"] != plan.reward(number) or failures > 1 or plan.is_refused(number):
            raise Violation(f"item {number} was trained on with reward {row['reward']}: {row}")
        if row["version"] is None or row["step"] - 1 - row["version"] > plan.options.max_head_offpolicyness:
            raise Violation(f"item {number} is older than the bound: {row}")
    allowed = (
        {"aborted", "too_old"}
        | ({"failed"} if failures > 1 else set())
        | ({"refused"} if plan.is_refused(number) else set())
    )
    if status != "trained" and status not in allowed:
        raise Violation(f"item {number} was lost without a cause: {row}")
    if status == "too_old" and plan.options.on_stale == "wait" and "held up" not in row["reason"]:
        raise Violation(f"item {number} was lost to age although batches wait: {row}")


def main() -> None:
    """Run schedules; exits with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=2000, help="number of schedules")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one")
    parser.add_argument("--only", type=int, help="run this seed alone, and print its events")
    args = parser.parse_args()
    seeds = [args.only] if args.only is not None else range(args.seed, args.seed + args.num)
    logging.disable(logging.WARNING)
    gc.freeze()  # a full collection would look at all that torch has loaded
    began, failed = time.perf_counter(), 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for seed in seeds:
            try:
                world = run_schedule(seed, Path(folder) / "run")
                if args.only is not None:
                    print("\n".join(world.log))
            except Violation as violation:
                failed += 1
                print(f"FAILED {violation}\n  again: python -m benchmarks.rollout_schedules --only {seed}", flush=True)
                if args.only is not None:
                    raise
    print(f"{len(seeds)} schedules, {failed} failed, {time.perf_counter() - began:.1f} s")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    warnings.simplefilter("ignore", ResourceWarning)
    main()
