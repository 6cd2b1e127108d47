"""`Master`: the one owner of a job's processes. It turns reports into events and performs the actions of `decide`.

    deaths (Ray) ┐
    trainer      ├─> events ──> decide(state, event, policy) ──> record in the store ──> actions, each in a thread
    node agents  ┘      ^                                                                  │
                        └───────────────── recovered / recovery failed ────────────────────┘

One thread handles events, so that the state has one writer. The record is stored before an action begins. A master that
Ray restarts reads the record, finds the processes by their names, and goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from rlite.control.entry import keep_record
from rlite.control.health import Finding, Judge, Rounds
from rlite.control.processes import JobProcesses, ProcessView
from rlite.control.role_group import StaleRendezvous
from rlite.control.spec import TRAINER, JobPlan, RLRoleType, trainer_life
from rlite.errors import CallTimeout, RliteError, StorageError, WorkerError
from rlite.runtime.cluster.host import CallPosition
from rlite.runtime.cluster.ray.fleet import Fleet, RayStore, is_restarted, kept_plan, make_store, own_node
from rlite.runtime.storage.texts import StateStore
from rlite.services.recovery import failover
from rlite.services.recovery.failover import WorkloadId
from rlite.services.recovery.record import JobRecord, LogEntry, TrainerReport, load_record, save_record

logger = logging.getLogger(__name__)

TRAINER_WAIT_S = 2.0
"""seconds to wait for one status query of the trainer"""
ANSWER_S = 15.0
"""seconds in which a process has to answer a new master"""


class Master:
    """Worker of the master's process. Its public methods are called from other processes."""

    def __init__(self, job: str, submission: str) -> None:
        self._store: StateStore = RayStore()
        self._record = JobRecord(submission)
        self._events: queue.Queue[failover.Event | Callable[[], None]] = queue.Queue()
        self._changed = threading.Condition()
        try:
            self._begin(job, submission)
        except Exception as error:  # a master that cannot go on must not leave a job without an owner
            Fleet(job).end()
            why = f"the master cannot read its state: {type(error).__name__}: {error}"
            logger.error("job %s: %s", job, why)
            ended = JobRecord(submission, failover.JobState(stage="ERROR", error=why))
            self._record = ended.noted(LogEntry(time.time(), "ERROR", why, "end the job"))
            with suppress(OSError):  # the end then stands in memory alone
                save_record(self._store, job, self._record)
                keep_record(job, self._record)

    def _begin(self, job: str, submission: str) -> None:
        """Begin the job, or take it over from a killed master."""
        self._plan: JobPlan = kept_plan(job, submission)
        self._store = make_store(self._plan.spec.store)
        self._processes = JobProcesses(self._plan, Fleet(job))
        self._judge = Judge(self._plan.spec.health)
        self._rounds = Rounds(self._judge, self._processes.look_on)
        self._record, is_new = _load_own(self._store, job, submission)
        self._recovering = threading.Lock()
        self._died_early: dict[WorkloadId, str] = {}
        """nodes of processes that died while they, or their role or job, were made"""
        self._events.put(failover.JobSubmitted(time.time()) if is_new else failover.MasterRestarted(time.time()))
        if self._record.state.stage == "RUNNING":
            self._events.put(self._adopt)
        threading.Thread(target=self._run, name="rlite-master", daemon=True).start()

    # Calls from other processes

    def record(self) -> JobRecord:
        """Return the job's state and log."""
        return self._record

    def wait(self, seconds: float) -> JobRecord:
        """Return the record when the job has ended, or after some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._record.state.has_ended, seconds)
        return self._record

    def stop(self, why: str, is_now: bool = False) -> None:
        """End the job. A program saves before, unless the job ends now."""
        self._events.put(failover.StopRequested(time.time(), why, may_save=self._plan.spec.is_program and not is_now))

    def placement(self) -> dict[str, list[str]]:
        """Return the devices of the workloads, by role."""
        return self._processes.devices()

    def report_late(self, role: str, ranks: list[int], method: str, timeout: float) -> None:
        """Record that workloads did not answer a call in its declared time.

        `timeout`: the declared time, in seconds.
        """
        self._events.put(lambda: self._note_late(role, ranks, f"{method} (limit {timeout:g} s)"))

    # The loop

    def _run(self) -> None:
        while not self._record.state.has_ended:
            try:
                item = self._events.get(timeout=self._rounds.seconds_left)
                item() if callable(item) else self._handle(item)
                for life, node in [self._died_early.popitem() for _ in range(len(self._died_early))]:
                    self._on_death(life, node)
            except queue.Empty:
                self._look()
            except Exception as error:  # the master's own failure must not leave a job without an owner
                logger.exception("the master of job %s failed", self._plan.name)
                with suppress(StorageError):  # the end then stands in memory alone
                    why = f"the master failed: {type(error).__name__}: {error}"
                    self._handle(failover.StopRequested(time.time(), why, is_failure=True))

    @property
    def _state(self) -> failover.JobState:
        return self._record.state

    def _handle(self, event: failover.Event) -> None:
        decision = failover.decide(self._state, event, self._plan.policy)
        if decision.is_stale and isinstance(event, failover.WorkloadsFailed):
            return  # the end of a process that the job itself ended
        entry = LogEntry(event.at, decision.state.stage, str(event), decision.why, _detail(event))
        if any(isinstance(action, failover.EndJob) for action in decision.actions):
            self._processes.end()  # before the end is announced
        self._keep(replace(self._record.noted(entry), state=decision.state))
        self._judge.forget(lambda life: not self._is_wanted(life))
        for action in decision.actions:
            self._in_thread(self._perform, action)

    def _is_wanted(self, life: WorkloadId) -> bool:
        return life == trainer_life(self._state.run) if life.role == TRAINER else self._state.is_current(life)

    def _keep(self, record: JobRecord) -> None:
        """Store a new record, and announce it even if that fails."""
        with self._changed:
            self._record = record
            try:
                save_record(self._store, self._plan.name, record)
                keep_record(self._plan.name, record)
            finally:
                self._changed.notify_all()

    def _note(self, event: str, detail: str = "") -> None:
        self._keep(self._record.noted(LogEntry(time.time(), self._state.stage, event, "", detail)))

    # Actions

    def _perform(self, action: failover.Action) -> None:
        match action:
            case failover.StartTrainer():
                self._start_trainer(action)
            case failover.InterruptTrainer():
                self._processes.interrupt_trainer()
            case failover.CreateJob() | failover.RestartRole() | failover.RestartWorkload():
                self._recover(action)

    def _recover(self, action: failover.CreateJob | failover.RestartRole | failover.RestartWorkload) -> None:
        try:
            self._renew(action)
        except StaleRendezvous as error:
            self._events.put(failover.RendezvousLost(time.time(), action.ticket, str(error)))
        except Exception as error:  # the boundary: any failure of a recovery is an event
            is_raised = not isinstance(error, WorkerError | CallTimeout)
            detail = f"{type(error).__name__}: {error}"
            has_lost_node = not is_raised and self._processes.has_lost_node()
            self._events.put(failover.RecoveryFailed(time.time(), action.ticket, detail, is_raised, has_lost_node))
        else:
            self._events.put(failover.Recovered(time.time(), action.ticket))

    def _renew(self, action: failover.CreateJob | failover.RestartRole | failover.RestartWorkload) -> None:
        processes = self._processes
        if isinstance(action, failover.CreateJob):
            processes.end_other_attempts(action.attempt)  # which also ends a creation under way
        time.sleep(action.delay_s)
        with self._recovering:
            state = self._state
            if action.ticket not in state.recoveries.values():
                return
            processes.reserve(state.excluded_nodes)
            lives = self._plan.lives(state)
            match action:
                case failover.CreateJob():
                    processes.end_other_attempts(action.attempt)
                    processes.create(lives, self._watch)
                case failover.RestartRole():
                    processes.restart_role(RLRoleType(action.role), lives, self._watch)
                case failover.RestartWorkload():
                    processes.restart_workload(action.workload, self._watch)

    def _watch(self, life: WorkloadId, process: ProcessView) -> None:
        """Observe a process, as soon as it reports its location."""
        process.death.add_done_callback(lambda _: self._events.put(partial(self._on_death, life, process.node)))
        process.look.add_done_callback(lambda look: self._events.put(partial(self._watch_at, life, look)))

    def _watch_at(self, life: WorkloadId, look: Future[CallPosition]) -> None:
        if look.exception() is None and self._is_wanted(life):
            self._judge.watch(life, look.result().node, look.result().pid)

    def _on_death(self, life: WorkloadId, node: str) -> None:
        if life.role == TRAINER or not self._is_wanted(life):  # `_follow_trainer` reports the trainer's end
            return
        if {failover.JOB, life.role, f"{life.role}/{life.rank}"} & self._state.recoveries.keys():
            self._died_early[life] = node  # the recovery will fail and say why
        else:
            spare = self._processes.has_spare({*self._state.excluded_nodes, node})
            self._handle(failover.WorkloadsFailed(time.time(), (life,), "dead", node, has_spare_node=spare))

    def _start_trainer(self, action: failover.StartTrainer) -> None:
        time.sleep(action.delay_s)
        if action.run == self._state.run and not self._state.is_trainer_waiting:
            self._follow_trainer(action.run, is_new=True)

    def _follow_trainer(self, run: int, is_new: bool = False) -> None:
        """Report the beginning and the end of a run, after starting its process if it is new, and let it begin."""
        try:
            if is_new:
                self._processes.start_trainer(run, has_begun=self._record.report is not None)
            self._watch_trainer(run)
            outcome = self._processes.ask_trainer(0.0)
            if outcome.progress == "new":
                self._events.put(failover.TrainerBegun(time.time(), run, outcome.is_recoverable))
                self._processes.run_trainer()
            while outcome.progress not in ("finished", "raised"):
                outcome = self._processes.ask_trainer(TRAINER_WAIT_S)
                self._events.put(partial(self._take_report, outcome.report))
        except Exception as error:  # the boundary: the process has ended, or the user's code raised
            self._events.put(failover.TrainerFailed(time.time(), run, f"{type(error).__name__}: {error}"))
            return
        if outcome.progress == "finished":
            self._events.put(failover.TrainerFinished(time.time(), run))
        else:
            self._events.put(failover.TrainerFailed(time.time(), run, outcome.error, outcome.trace, outcome.is_final))

    def _watch_trainer(self, run: int) -> None:
        """Observe the trainer's process before it begins: a stopped process would never report its location."""
        view = self._processes.view_of_trainer()
        self._watch(trainer_life(run), view)
        wait([view.look], ANSWER_S)
        if not view.look.done():
            raise CallTimeout(f"the trainer's process gives no answer within {ANSWER_S:g} s")

    def _take_report(self, report: TrainerReport | None) -> None:
        if report is not None and report != self._record.report:
            self._keep(replace(self._record, report=report))

    def _adopt(self) -> None:
        """Take over the processes of a running job from a killed master."""
        state = self._state
        self._processes.reserve(state.excluded_nodes)
        views = self._processes.adopt(self._plan.lives(state))
        for life, view in views.items():
            if state.is_current(life):
                self._watch(life, view)
        self._in_thread(self._expect_answers, {life: view.look for life, view in views.items()})
        if self._processes.adopt_trainer(state.run):
            if state.stopping:
                self._processes.interrupt_trainer()
            self._in_thread(self._follow_trainer, state.run)
        else:
            why = "its process ended while the master was restarted"
            self._events.put(failover.TrainerFailed(time.time(), state.run, why))

    def _expect_answers(self, looks: Mapping[WorkloadId, Future[Any]]) -> None:
        """Count processes as stopped that do not answer a new master."""
        wait(looks.values(), ANSWER_S)
        silent = tuple(life for life, look in looks.items() if not look.done())
        if silent:
            why = f"no answer to the new master within {ANSWER_S:g} s"
            self._events.put(failover.WorkloadsFailed(time.time(), silent, "stopped", detail=why))

    def _in_thread(self, act: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=act, args=args, name="rlite-action", daemon=True).start()

    # Health

    def _look(self) -> None:
        """Process the agents' reports and request the next reports."""
        for node, finding, is_silent in self._rounds.findings(own_node()):
            self._take_in(node, finding, is_silent)
        for life in self._judge.late():
            if life.role != TRAINER and self._processes.is_idle(life):
                self._judge.note_late(life, "")
                self._note(f"{life} answered late")

    def _take_in(self, node: str, finding: Finding, is_silent: bool) -> None:
        detail = finding.detail
        if finding.condition == "hung":
            detail += "\n" + self._processes.stack(finding.lives[0])
        if is_silent:
            self._rounds.forget(node)
            self._in_thread(self._processes.replace_agent, node)
        else:
            self._processes.kill_on(node, finding.pids)
        lives = tuple(life for life in finding.lives if life.role != TRAINER)
        if len(lives) < len(finding.lives):
            self._processes.end_trainer(self._state.run)  # it may be alive, on a node without heartbeats
        if lives:
            spare = self._processes.has_spare({*self._state.excluded_nodes, node})
            self._handle(failover.WorkloadsFailed(time.time(), lives, finding.condition, node, detail, spare))
        if len(lives) < len(finding.lives):  # after the workloads, so that the trainer starts when they are ready
            self._handle(failover.TrainerFailed(time.time(), self._state.run, f"{finding.condition}: {finding.detail}"))

    def _note_late(self, role: str, ranks: list[int], call: str) -> None:
        for life in [self._state.life(role, rank) for rank in ranks]:
            self._judge.note_late(life, call)
            self._note(f"{life} is late: {call}", self._processes.stack(life))


def _load_own(store: StateStore, job: str, submission: str) -> tuple[JobRecord, bool]:
    """Return the record of a submission, and whether it is new."""
    stored, own = load_record(store, job), JobRecord(submission)
    if stored is not None and stored.submission == submission:
        return stored, False
    if stored is not None and not stored.state.has_ended:
        if is_restarted():
            raise RliteError("it is of another submission of this name, which has not ended")
        lost = f"the record of an earlier submission is replaced, which had not ended ({stored.state.stage})"
        own = own.noted(LogEntry(time.time(), "INIT", lost))
    return own, True


def _detail(event: failover.Event) -> str:
    if isinstance(event, failover.TrainerFailed):
        return event.trace
    return event.detail.partition("\n")[2] if isinstance(event, failover.WorkloadsFailed) else ""
