"""Failover decisions of a job: `decide(state, event, policy)`, a pure function.

    INIT ──recovered──> RUNNING <──recovered── FAILOVER            RUNNING ──trainer finished──> FINISHED
      └── failed ──────────────────────────────^  │ ^                 any ──budget used up──> ERROR
                                 RUNNING ──failed─┘ └─ failed again        any ──stopped──> STOPPED

A failure restarts a workload, a role or the job, according to the role's policy. A recovery has a ticket. A failure
during a recovery replaces the recovery by a new one, and the result of the old one is then stale. Each process has an
identity (attempt of the job, epoch of the role, incarnation of the workload), so a second report of one failure is
stale, too.

The state is small for a job of any size: it lists only workloads that were restarted or lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

Level = Literal["ignore", "workload", "role", "job"]
"""scopes of a recovery, by rising extent"""
Stage = Literal["INIT", "RUNNING", "FAILOVER", "FINISHED", "STOPPED", "ERROR"]
Condition = Literal["dead", "stopped", "hung"]
JOB = "job"
"""label of a recovery of the whole job; a role's label is its name, a workload's "ROLE/rank" """


@dataclass(frozen=True)
class WorkloadId:
    """One life of a workload."""

    role: str
    rank: int
    attempt: int = 0
    """restarts of the job before this life"""
    epoch: int = 0
    """restarts of the role in this attempt, before this life"""
    incarnation: int = 0
    """restarts of the workload in this epoch, before this life"""

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank}"


# Events


@dataclass(frozen=True)
class Event:
    """Event of a job."""

    words: ClassVar[str]
    """text of the event, with the names of its fields"""
    at: float
    """seconds since the epoch"""

    def __str__(self) -> str:
        return self.words.format_map(vars(self))


@dataclass(frozen=True)
class TrainerEvent(Event):
    """Event of one run of the trainer."""

    run: int


@dataclass(frozen=True)
class RecoveryEvent(Event):
    """End of the recovery with a ticket, or of the creation of the job."""

    ticket: int


@dataclass(frozen=True)
class JobSubmitted(Event):
    """A new job."""

    words = "job submitted"


@dataclass(frozen=True)
class WorkloadsFailed(Event):
    """Workloads have failed for one shared cause."""

    workloads: tuple[WorkloadId, ...]
    condition: Condition
    node: str = ""
    detail: str = ""
    has_spare_node: bool = False
    """the cluster can do without `node`"""

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.workloads[:4])) + (" and more" if len(self.workloads) > 4 else "")
        place = f" on node {self.node[:8]}" if self.node else ""
        why = self.detail.partition("\n")[0]
        return f"{shown} {self.condition}{place}" + (f": {why}" if why else "")


@dataclass(frozen=True)
class TrainerBegun(TrainerEvent):
    """The trainer's `init` begins."""

    words = "trainer begins (run {run})"
    is_recoverable: bool = False
    """`init` and `fit` may run again beside the same workloads"""


@dataclass(frozen=True)
class TrainerFailed(TrainerEvent):
    """The trainer raised, or its process ended."""

    words = "trainer failed: {detail}"
    detail: str
    trace: str = ""
    """the remote traceback"""
    is_final: bool = False
    """every restart would repeat the error"""


@dataclass(frozen=True)
class TrainerFinished(TrainerEvent):
    """The trainer's `fit` returned."""

    words = "trainer finished"


@dataclass(frozen=True)
class Recovered(RecoveryEvent):
    """The recovery with this ticket, or the creation of the job, is done."""

    words = "workloads are ready (ticket {ticket})"


@dataclass(frozen=True)
class RecoveryFailed(RecoveryEvent):
    """The recovery with this ticket, or the creation of the job, failed."""

    words = "workloads could not be made (ticket {ticket}): {detail}"
    detail: str
    is_raised: bool = False
    """a constructor raised, or devices are missing; the same error twice in a row ends the job"""
    has_lost_node: bool = False
    """a node died on which a process started; Ray gives its devices on another node"""


@dataclass(frozen=True)
class RendezvousLost(RecoveryEvent):
    """The workload of this recovery cannot come back alone, because the rendezvous that its peers know is not valid."""

    words = "the workload cannot come back alone (ticket {ticket}): {detail}"
    detail: str


@dataclass(frozen=True)
class MasterRestarted(Event):
    """The master was killed and takes over the job."""

    words = "master restarted"


@dataclass(frozen=True)
class StopRequested(Event):
    """A user requests the end of the job."""

    words = "{why}"
    why: str = "stopped on request"
    may_save: bool = False
    """a running trainer is asked to save and to end first, unless it was asked before"""
    is_failure: bool = False


# Actions


@dataclass(frozen=True)
class CreateJob:
    """End all workloads and the trainer, and make all workloads."""

    ticket: int
    attempt: int
    delay_s: float = 0.0


@dataclass(frozen=True)
class RestartRole:
    """End a role's workloads and make them with a new rendezvous."""

    ticket: int
    role: str
    delay_s: float = 0.0


@dataclass(frozen=True)
class RestartWorkload:
    """End a workload and make it again."""

    ticket: int
    workload: WorkloadId
    """workload after its restart"""
    delay_s: float = 0.0


@dataclass(frozen=True)
class StartTrainer:
    """End the trainer, if it runs, and run `init` and `fit` in a new process."""

    run: int
    delay_s: float = 0.0


@dataclass(frozen=True)
class InterruptTrainer:
    """Ask the trainer's program to save and to end."""


@dataclass(frozen=True)
class EndJob:
    """End every process of the job."""


Action = CreateJob | RestartRole | RestartWorkload | StartTrainer | InterruptTrainer | EndJob


# State and policy


@dataclass(frozen=True)
class RoleState:
    """Lives of a role's workloads."""

    epoch: int = 0
    incarnations: Mapping[int, int] = field(default_factory=dict)
    """by rank, of workloads that were restarted in this epoch"""
    lost: tuple[int, ...] = ()
    """ranks that failed and whose failure is ignored"""
    restarts: int = 0
    """restarts of the role or one of its workloads, in all attempts"""


@dataclass(frozen=True)
class JobState:
    """Everything that a decision needs to know about a job."""

    stage: Stage = "INIT"
    attempt: int = 0
    roles: Mapping[str, RoleState] = field(default_factory=dict)
    """states of the roles that had failures"""
    recoveries: Mapping[str, int] = field(default_factory=dict)
    """tickets of the recoveries under way, by label"""
    tickets: int = 0
    """given out so far"""
    run: int = 0
    """the latest start of the trainer"""
    runs: int = 0
    """number of started runs of `init`"""
    begun_run: int = 0
    """the latest run that began"""
    is_trainer_waiting: bool = True
    """the trainer starts after the recoveries"""
    is_trainer_recoverable: bool = False
    job_restarts: int = 0
    trainer_restarts: int = 0
    node_faults: Mapping[str, int] = field(default_factory=dict)
    excluded_nodes: tuple[str, ...] = ()
    failed_at: float = 0.0
    failures_in_row: int = 0
    """failures since the job was last stable; they set the back-off"""
    stopping: str = ""
    """why the trainer was asked to save and to end"""
    creation_error: str = ""
    """why the latest creation failed"""
    error: str = ""

    @property
    def has_ended(self) -> bool:
        """True if no process of the job runs."""
        return self.stage in ("FINISHED", "STOPPED", "ERROR")

    @property
    def restarts(self) -> int:
        """Number of times that `init` and `fit` ran again."""
        return max(self.runs - 1, 0)

    def life(self, role: str, rank: int) -> WorkloadId:
        """Return the current life of a workload."""
        known = self.roles.get(role, _UNTOUCHED)
        return WorkloadId(role, rank, self.attempt, known.epoch, known.incarnations.get(rank, 0))

    def is_current(self, workload: WorkloadId) -> bool:
        """Return True if this life of a workload should exist."""
        known = self.roles.get(workload.role, _UNTOUCHED)
        return workload.rank not in known.lost and workload == self.life(workload.role, workload.rank)


_UNTOUCHED = RoleState()


@dataclass(frozen=True)
class RolePolicy:
    """Consequence of a role's failures."""

    on_failure: Level = "job"
    max_restarts: int = 10
    """restarts of the role or its workloads; the next failure restarts the job"""


@dataclass(frozen=True)
class FailoverPolicy:
    """Consequences and budgets of a job."""

    roles: Mapping[str, RolePolicy] = field(default_factory=dict)
    max_job_restarts: int = 10
    max_trainer_restarts: int = 10
    max_node_faults: int = 3
    """a node with more faults is left out, if the cluster has others"""
    backoff_s: float = 1.0
    """The first restart is immediate, the next ones wait for 1, 3, 7, ... times this"""
    max_backoff_s: float = 60.0
    stable_s: float = 600.0
    """without a failure, after which the back-off starts again"""


class Decision(NamedTuple):
    """State after an event, with what the master has to do now."""

    state: JobState
    actions: tuple[Action, ...]
    why: str
    is_stale: bool = False
    """the event is about a process or a recovery that was replaced"""


def decide(state: JobState, event: Event, policy: FailoverPolicy) -> Decision:
    """Decide about one event.

    Returns the state after the event, the actions, and the decision in words.
    """
    if state.has_ended:
        return Decision(state, (), "the job has ended")
    match event:
        case JobSubmitted():
            return _create(state, 0.0, "create the job")
        case MasterRestarted():
            if state.stage == "RUNNING":
                return Decision(state, (), "take the job over")
            return _create(_next_attempt(state), 0.0, "the master was killed during a creation: create the job again")
        case StopRequested():
            has_begun = state.stage == "RUNNING" and not state.is_trainer_waiting and state.begun_run == state.run
            if event.may_save and has_begun and not state.stopping:
                return Decision(replace(state, stopping=event.why), (InterruptTrainer(),), "let it save first")
            return _end(state, "ERROR" if event.is_failure else "STOPPED", event.why)
        case WorkloadsFailed():
            return _on_workloads(state, event, policy)
        case RecoveryEvent():
            label = next((label for label, ticket in state.recoveries.items() if ticket == event.ticket), None)
            if label is None:
                return Decision(state, (), "stale: this recovery was replaced", is_stale=True)
            return _on_recovery(state, event, label, policy)
    assert isinstance(event, TrainerEvent)
    if event.run != state.run or state.is_trainer_waiting:
        return Decision(state, (), "stale: this run was replaced", is_stale=True)
    match event:
        case TrainerBegun():
            runs = state.runs + (event.run != state.begun_run)  # a new master reports it again
            began = replace(state, runs=runs, begun_run=event.run, is_trainer_recoverable=event.is_recoverable)
            return Decision(began, (), "noted")
        case TrainerFailed():
            return _on_trainer(state, event, policy)
    return _end(state, "FINISHED", "")


def _on_workloads(state: JobState, event: WorkloadsFailed, policy: FailoverPolicy) -> Decision:
    failed = [workload for workload in event.workloads if state.is_current(workload)]
    if not failed:
        return Decision(state, (), "stale: already replaced, or lost and ignored", is_stale=True)
    state, is_excluded = _blame(state, event, policy)
    levels = {role: _level(state, role, policy) for role in dict.fromkeys(workload.role for workload in failed)}
    if JOB in state.recoveries or is_excluded or JOB in levels.values():
        why = f"node {event.node} is left out: " if is_excluded else ""
        return _restart_job(state, event.at, policy, why, cause=str(event))
    if set(levels.values()) == {"ignore"}:
        return Decision(_lose(state, failed), (), "ignore it")
    state, delay_s = _back_off(state, event.at, policy)
    actions: list[Action] = []
    for role, level in levels.items():
        own = [workload for workload in failed if workload.role == role]
        restarts: list[Action] = []
        if level == "ignore":
            state = _lose(state, own)
        elif level == "role":
            state, restarts = _restart_role(state, role, delay_s)
        else:
            state, restarts = _restart_workloads(state, role, [workload.rank for workload in own], delay_s)
        actions += restarts
    what = "; ".join(f"restart {_scope(role, level)}" for role, level in levels.items() if level != "ignore")
    return Decision(replace(state, stage="FAILOVER"), tuple(actions), f"{what} after {delay_s:g} s")


def _level(state: JobState, role: str, policy: FailoverPolicy) -> Level:
    """Return the extent of a role's recovery, which is larger during a recovery of the role or without budget."""
    rules = policy.roles.get(role, RolePolicy())
    if rules.on_failure in ("ignore", "job"):
        return rules.on_failure
    if state.roles.get(role, _UNTOUCHED).restarts >= rules.max_restarts:
        return "job"
    return "role" if role in state.recoveries else rules.on_failure


def _scope(role: str, level: Level) -> str:
    return f"role {role} with a new rendezvous" if level == "role" else f"the workload of {role}"


def _lose(state: JobState, failed: Iterable[WorkloadId]) -> JobState:
    for workload in failed:
        known = state.roles.get(workload.role, _UNTOUCHED)
        state = _with_role(state, workload.role, replace(known, lost=(*known.lost, workload.rank)))
    return state


def _restart_role(state: JobState, role: str, delay_s: float) -> tuple[JobState, list[Action]]:
    known = state.roles.get(role, _UNTOUCHED)
    renewed = RoleState(epoch=known.epoch + 1, restarts=known.restarts + 1)
    others = {label: t for label, t in state.recoveries.items() if label != role and not label.startswith(f"{role}/")}
    state = replace(_with_role(state, role, renewed), recoveries=others)
    state, ticket = _issue(state, role)
    return state, [RestartRole(ticket, role, delay_s)]


def _restart_workloads(
    state: JobState, role: str, ranks: Sequence[int], delay_s: float
) -> tuple[JobState, list[Action]]:
    known = state.roles.get(role, _UNTOUCHED)
    renewed = {rank: known.incarnations.get(rank, 0) + 1 for rank in ranks}
    restarted = replace(known, incarnations={**known.incarnations, **renewed}, restarts=known.restarts + 1)
    state = _with_role(state, role, restarted)
    actions: list[Action] = []
    for rank in ranks:
        state, ticket = _issue(state, f"{role}/{rank}")
        actions.append(RestartWorkload(ticket, state.life(role, rank), delay_s))
    return state, actions


def _on_trainer(state: JobState, event: TrainerFailed, policy: FailoverPolicy) -> Decision:
    if event.is_final:
        return _end(state, "ERROR", str(event))
    if state.stopping:
        return _end(state, "STOPPED", f"{state.stopping}: {event.detail}")
    if not state.is_trainer_recoverable:
        return _restart_job(state, event.at, policy, cause=str(event))
    if state.trainer_restarts >= policy.max_trainer_restarts:
        return _end(state, "ERROR", f"{event}; all {policy.max_trainer_restarts} restarts of the trainer are used up")
    state, delay_s = _back_off(state, event.at, policy)
    state = replace(state, trainer_restarts=state.trainer_restarts + 1, is_trainer_waiting=True)
    return _start_trainer(state, delay_s, f"restart the trainer alone after {delay_s:g} s")


def _on_recovery(state: JobState, event: RecoveryEvent, label: str, policy: FailoverPolicy) -> Decision:
    role, _, rank = label.partition("/")
    match event:
        case RecoveryFailed():
            return _on_failed_recovery(state, event, role, rank, policy)
        case RendezvousLost():
            counted = state.roles[role].restarts
            state, actions = _restart_role(state, role, 0.0)
            state = _with_role(state, role, replace(state.roles[role], restarts=counted))  # of the workload's restart
            return Decision(state, tuple(actions), f"restart {_scope(role, 'role')}")
    left = {each: ticket for each, ticket in state.recoveries.items() if each != label}
    return _start_trainer(replace(state, recoveries=left, creation_error=""), 0.0, "go on")


def _on_failed_recovery(
    state: JobState, event: RecoveryFailed, role: str, rank: str, policy: FailoverPolicy
) -> Decision:
    if event.is_raised and event.detail == state.creation_error:
        return _end(state, "ERROR", f"{event}. It failed twice in the same way.")
    if event.has_lost_node and role != JOB and _level(state, role, policy) != "job":
        state, delay_s = _back_off(state, event.at, policy)
        ranks = [int(rank)] if rank else []
        again = _restart_workloads(state, role, ranks, delay_s) if ranks else _restart_role(state, role, delay_s)
        return Decision(again[0], tuple(again[1]), f"its node has died: again on another one after {delay_s:g} s")
    return _restart_job(replace(state, creation_error=event.detail), event.at, policy, cause=str(event))


def _start_trainer(state: JobState, delay_s: float, why: str) -> Decision:
    """Return the start of a waiting trainer, unless recoveries are under way."""
    if state.recoveries:
        return Decision(state, (), f"{why}; other recoveries are under way")
    state = replace(state, stage="RUNNING")
    if not state.is_trainer_waiting:
        return Decision(state, (), why)
    state = replace(state, run=state.run + 1, is_trainer_waiting=False)
    return Decision(state, (StartTrainer(state.run, delay_s),), why)


def _restart_job(state: JobState, at: float, policy: FailoverPolicy, why: str = "", cause: str = "") -> Decision:
    if state.job_restarts >= policy.max_job_restarts:
        return _end(state, "ERROR", f"{cause}; all {policy.max_job_restarts} restarts of the job are used up")
    state, delay_s = _back_off(state, at, policy)
    state = replace(_next_attempt(state), job_restarts=state.job_restarts + 1)
    left = policy.max_job_restarts - state.job_restarts
    return _create(state, delay_s, f"{why}restart the job after {delay_s:g} s; {left} restarts are left")


def _next_attempt(state: JobState) -> JobState:
    roles = {role: RoleState(restarts=known.restarts) for role, known in state.roles.items() if known.restarts}
    return replace(state, stage="FAILOVER", attempt=state.attempt + 1, roles=roles, is_trainer_recoverable=False)


def _create(state: JobState, delay_s: float, why: str) -> Decision:
    state, ticket = _issue(replace(state, recoveries={}, is_trainer_waiting=True), JOB)
    return Decision(state, (CreateJob(ticket, state.attempt, delay_s),), why)


def _end(state: JobState, stage: Stage, error: str) -> Decision:
    ended = replace(state, stage=stage, recoveries={}, error=error)
    return Decision(ended, (EndJob(),), f"end the job: {error}" if error else "the job is done")


def _blame(state: JobState, event: WorkloadsFailed, policy: FailoverPolicy) -> tuple[JobState, bool]:
    """Count the fault against its node.

    Returns the state, and True if the node is left out from now on.
    """
    if not event.node:
        return state, False
    faults = state.node_faults.get(event.node, 0) + 1
    state = replace(state, node_faults={**state.node_faults, event.node: faults})
    if faults <= policy.max_node_faults or not event.has_spare_node or event.node in state.excluded_nodes:
        return state, False
    return replace(state, excluded_nodes=(*state.excluded_nodes, event.node)), True


def _back_off(state: JobState, at: float, policy: FailoverPolicy) -> tuple[JobState, float]:
    """Count a failure.

    Returns the state, and how long its recovery waits.
    """
    in_row = state.failures_in_row + 1 if at - state.failed_at <= policy.stable_s else 1
    delay_s = min(policy.backoff_s * (2 ** min(in_row - 1, 30) - 1), policy.max_backoff_s)
    return replace(state, failures_in_row=in_row, failed_at=at), delay_s


def _issue(state: JobState, label: str) -> tuple[JobState, int]:
    ticket = state.tickets + 1
    return replace(state, tickets=ticket, recoveries={**state.recoveries, label: ticket}), ticket


def _with_role(state: JobState, role: str, known: RoleState) -> JobState:
    return replace(state, roles={**state.roles, role: known})
