"""`decide` as a table: what a job does about each event, also during recoveries."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from pydantic import TypeAdapter

from rlite.services.recovery.failover import (
    Action,
    CreateJob,
    EndJob,
    Event,
    FailoverPolicy,
    InterruptTrainer,
    JobState,
    JobSubmitted,
    MasterRestarted,
    Recovered,
    RecoveryFailed,
    RendezvousLost,
    RestartRole,
    RestartWorkload,
    RolePolicy,
    StartTrainer,
    StopRequested,
    TrainerBegun,
    TrainerFailed,
    TrainerFinished,
    WorkloadId,
    WorkloadsFailed,
    decide,
)

POLICY = FailoverPolicy(
    roles={
        "ACTOR": RolePolicy("job"),
        "ROLLOUT": RolePolicy("workload", max_restarts=2),
        "CRITIC": RolePolicy("role", max_restarts=2),
        "REWARD": RolePolicy("ignore"),
    },
    max_job_restarts=2,
    max_trainer_restarts=1,
)


def dead(role: str, rank: int = 0, attempt: int = 0, epoch: int = 0, incarnation: int = 0, **more: object) -> Event:
    lives = (WorkloadId(role, rank, attempt, epoch, incarnation),)
    return WorkloadsFailed(0.0, lives, "dead", **more)  # type: ignore[arg-type]


def play(events: Iterable[Event], policy: FailoverPolicy = POLICY) -> tuple[JobState, list[tuple[Action, ...]]]:
    state, actions = JobState(), []
    for event in events:
        decision = decide(state, event, policy)
        assert decision.why
        state = decision.state
        actions.append(decision.actions)
    return state, actions


BEGIN: list[Event] = [JobSubmitted(0.0), Recovered(0.0, 1), TrainerBegun(0.0, 1)]
"""a job that runs"""


def test_a_job_is_created_then_trained_and_ends() -> None:
    state, actions = play([*BEGIN, TrainerFinished(0.0, 1)])
    assert actions == [(CreateJob(1, 0),), (StartTrainer(1),), (), (EndJob(),)]
    assert (state.stage, state.restarts, state.error) == ("FINISHED", 0, "")


TABLE: dict[str, tuple[list[Event], list[tuple[Action, ...]], str]] = {
    "a dead actor restarts the job": ([dead("ACTOR")], [(CreateJob(2, 1),)], "FAILOVER"),
    "the trainer's error about it is the same cause": (
        [dead("ACTOR"), TrainerFailed(0.0, 1, "WorkerDied"), Recovered(0.0, 2)],
        [(CreateJob(2, 1),), (), (StartTrainer(2),)],
        "RUNNING",
    ),
    "and so is the death after the trainer's error": (
        [TrainerFailed(0.0, 1, "WorkerDied"), dead("ACTOR")],
        [(CreateJob(2, 1),), ()],
        "FAILOVER",
    ),
    "a dead rollout is replaced while the trainer goes on": (
        [dead("ROLLOUT", 3), Recovered(0.0, 2)],
        [(RestartWorkload(2, WorkloadId("ROLLOUT", 3, 0, 0, 1)),), ()],
        "RUNNING",
    ),
    "its second report is stale, its second death is not": (
        [dead("ROLLOUT", 3), dead("ROLLOUT", 3), Recovered(0.0, 2), dead("ROLLOUT", 3, incarnation=1)],
        [
            (RestartWorkload(2, WorkloadId("ROLLOUT", 3, 0, 0, 1)),),
            (),
            (),
            (RestartWorkload(3, WorkloadId("ROLLOUT", 3, 0, 0, 2), 1.0),),
        ],
        "FAILOVER",
    ),
    "a workload that dies while it is replaced is replaced again": (
        [dead("ROLLOUT", 3), dead("ROLLOUT", 3, incarnation=1), Recovered(0.0, 2), Recovered(0.0, 3)],
        [
            (RestartWorkload(2, WorkloadId("ROLLOUT", 3, 0, 0, 1)),),
            (RestartWorkload(3, WorkloadId("ROLLOUT", 3, 0, 0, 2), 1.0),),
            (),
            (),
        ],
        "RUNNING",
    ),
    "two workloads are replaced side by side": (
        [dead("ROLLOUT", 0), dead("ROLLOUT", 1), Recovered(0.0, 3)],
        [
            (RestartWorkload(2, WorkloadId("ROLLOUT", 0, 0, 0, 1)),),
            (RestartWorkload(3, WorkloadId("ROLLOUT", 1, 0, 0, 1), 1.0),),
            (),
        ],
        "FAILOVER",
    ),
    "a role without restarts left restarts the job": (
        [dead("ROLLOUT", 0), dead("ROLLOUT", 1), dead("ROLLOUT", 2)],
        [
            (RestartWorkload(2, WorkloadId("ROLLOUT", 0, 0, 0, 1)),),
            (RestartWorkload(3, WorkloadId("ROLLOUT", 1, 0, 0, 1), 1.0),),
            (CreateJob(4, 1, 3.0),),
        ],
        "FAILOVER",
    ),
    "a dead critic restarts its role": (
        [dead("CRITIC", 1), dead("CRITIC", 0), Recovered(0.0, 2)],
        [(RestartRole(2, "CRITIC"),), (), ()],
        "RUNNING",
    ),
    "a critic that dies while its role is restarted restarts it again": (
        [dead("CRITIC", 1), dead("CRITIC", 0, epoch=1), Recovered(0.0, 2), Recovered(0.0, 3)],
        [(RestartRole(2, "CRITIC"),), (RestartRole(3, "CRITIC", 1.0),), (), ()],
        "RUNNING",
    ),
    "an actor that dies while a role is restarted restarts the job": (
        [dead("CRITIC"), dead("ACTOR"), Recovered(0.0, 2), Recovered(0.0, 3)],
        [(RestartRole(2, "CRITIC"),), (CreateJob(3, 1, 1.0),), (), (StartTrainer(2),)],
        "RUNNING",
    ),
    "a workload that dies while the job is created restarts the job": (
        [dead("ACTOR"), dead("ROLLOUT", attempt=1), Recovered(0.0, 2)],
        [(CreateJob(2, 1),), (CreateJob(3, 2, 1.0),), ()],
        "FAILOVER",
    ),
    "a job without restarts left ends": (
        [dead("ACTOR"), dead("ACTOR", attempt=1), dead("ACTOR", attempt=2), dead("ACTOR", attempt=2)],
        [(CreateJob(2, 1),), (CreateJob(3, 2, 1.0),), (EndJob(),), ()],
        "ERROR",
    ),
    "a dead reward workload is ignored, once and for all": (
        [dead("REWARD"), dead("REWARD")],
        [(), ()],
        "RUNNING",
    ),
    "a trainer that raises restarts the job": ([TrainerFailed(0.0, 1, "e")], [(CreateJob(2, 1),)], "FAILOVER"),
    "a recoverable trainer restarts alone, within its budget": (
        [
            TrainerBegun(0.0, 1, True),
            TrainerFailed(0.0, 1, "e"),
            TrainerBegun(0.0, 2, True),
            TrainerFailed(0.0, 2, "e"),
        ],
        [(), (StartTrainer(2),), (), (EndJob(),)],
        "ERROR",
    ),
    "a recoverable trainer waits for the workloads": (
        [TrainerBegun(0.0, 1, True), dead("CRITIC"), TrainerFailed(0.0, 1, "e"), Recovered(0.0, 2)],
        [(), (RestartRole(2, "CRITIC"),), (), (StartTrainer(2),)],
        "RUNNING",
    ),
    "a report about an old run is stale": (
        [dead("ACTOR"), Recovered(0.0, 2), TrainerFailed(0.0, 1, "e"), TrainerFinished(0.0, 1)],
        [(CreateJob(2, 1),), (StartTrainer(2),), (), ()],
        "RUNNING",
    ),
    "a creation that fails is tried again": (
        [dead("ACTOR"), RecoveryFailed(0.0, 2, "WorkerDied"), RecoveryFailed(0.0, 2, "WorkerDied")],
        [(CreateJob(2, 1),), (CreateJob(3, 2, 1.0),), ()],
        "FAILOVER",
    ),
    "a constructor that raises the same twice ends the job": (
        [dead("ACTOR"), RecoveryFailed(0.0, 2, "E", True), RecoveryFailed(0.0, 3, "E", True)],
        [(CreateJob(2, 1),), (CreateJob(3, 2, 1.0),), (EndJob(),)],
        "ERROR",
    ),
    "a role's recovery that fails restarts the job": (
        [dead("CRITIC"), RecoveryFailed(0.0, 2, "WorkerDied")],
        [(RestartRole(2, "CRITIC"),), (CreateJob(3, 1, 1.0),)],
        "FAILOVER",
    ),
    "a workload whose rendezvous is lost restarts its role, as one restart": (
        [
            dead("ROLLOUT", 0),
            RendezvousLost(0.0, 2, "moved"),
            Recovered(0.0, 2),
            Recovered(0.0, 3),
            dead("ROLLOUT", 1, epoch=1),
        ],
        [
            (RestartWorkload(2, WorkloadId("ROLLOUT", 0, 0, 0, 1)),),
            (RestartRole(3, "ROLLOUT"),),
            (),
            (),
            (RestartWorkload(4, WorkloadId("ROLLOUT", 1, 0, 1, 1), 1.0),),
        ],
        "FAILOVER",
    ),
    "the role's restart replaces the restarts of its other workloads": (
        [dead("ROLLOUT", 0), dead("ROLLOUT", 1), RendezvousLost(0.0, 2, "moved"), RendezvousLost(0.0, 3, "moved")],
        [
            (RestartWorkload(2, WorkloadId("ROLLOUT", 0, 0, 0, 1)),),
            (RestartWorkload(3, WorkloadId("ROLLOUT", 1, 0, 0, 1), 1.0),),
            (RestartRole(4, "ROLLOUT"),),
            (),
        ],
        "FAILOVER",
    ),
    "a recovery that meets another dead node is tried again, within the budget": (
        [
            dead("ROLLOUT", 1),
            RecoveryFailed(0.0, 2, "WorkerDied", has_lost_node=True),
            Recovered(0.0, 2),
            RecoveryFailed(0.0, 3, "WorkerDied", has_lost_node=True),
        ],
        [
            (RestartWorkload(2, WorkloadId("ROLLOUT", 1, 0, 0, 1)),),
            (RestartWorkload(3, WorkloadId("ROLLOUT", 1, 0, 0, 2), 1.0),),
            (),
            (CreateJob(4, 1, 3.0),),
        ],
        "FAILOVER",
    ),
    "and so is a role's": (
        [dead("CRITIC", 1), RecoveryFailed(0.0, 2, "WorkerDied", has_lost_node=True), Recovered(0.0, 3)],
        [(RestartRole(2, "CRITIC"),), (RestartRole(3, "CRITIC", 1.0),), ()],
        "RUNNING",
    ),
    "a new master takes a running job over": ([MasterRestarted(0.0)], [()], "RUNNING"),
    "a new master creates anew what was being created": (
        [dead("ACTOR"), MasterRestarted(0.0), Recovered(0.0, 2), Recovered(0.0, 3)],
        [(CreateJob(2, 1),), (CreateJob(3, 2),), (), (StartTrainer(2),)],
        "RUNNING",
    ),
    "a request ends the job": ([StopRequested(0.0), dead("ACTOR")], [(EndJob(),), ()], "STOPPED"),
    "the master's own failure is an error": ([StopRequested(0.0, "bug", is_failure=True)], [(EndJob(),)], "ERROR"),
    "a trainer that may save ends by itself": (
        [StopRequested(0.0, may_save=True), TrainerFailed(0.0, 1, "ended by SIGTERM")],
        [(InterruptTrainer(),), (EndJob(),)],
        "STOPPED",
    ),
    "unless it finishes meanwhile": (
        [StopRequested(0.0, may_save=True), TrainerFinished(0.0, 1)],
        [(InterruptTrainer(),), (EndJob(),)],
        "FINISHED",
    ),
    "or meets an error that is final": (
        [StopRequested(0.0, may_save=True), TrainerFailed(0.0, 1, "diverged", is_final=True)],
        [(InterruptTrainer(),), (EndJob(),)],
        "ERROR",
    ),
    "or is asked a second time": (
        [StopRequested(0.0, may_save=True), StopRequested(0.0, may_save=True)],
        [(InterruptTrainer(),), (EndJob(),)],
        "STOPPED",
    ),
    "a trainer that has not begun has nothing to save": (
        [dead("ACTOR"), StopRequested(0.0, may_save=True)],
        [(CreateJob(2, 1),), (EndJob(),)],
        "STOPPED",
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_decisions_of_a_running_job(case: str) -> None:
    events, expected, stage = TABLE[case]
    state, actions = play([*BEGIN, *events])
    assert actions[len(BEGIN) :] == expected
    assert state.stage == stage


def test_the_log_says_why_a_workload_does_not_come_back_alone() -> None:
    state = play([*BEGIN, dead("ROLLOUT", 0)])[0]
    event = RendezvousLost(0.0, 2, "rank 0 moved from 10.0.0.1 to 10.0.0.2")
    decision = decide(state, event, POLICY)
    assert "rank 0 moved from 10.0.0.1 to 10.0.0.2" in str(event)
    assert decision.why == "restart role ROLLOUT with a new rendezvous"


def test_restarts_count_how_often_init_ran_again() -> None:
    again: list[Event] = [dead("ACTOR"), TrainerFailed(0.0, 1, "e"), Recovered(0.0, 2), TrainerBegun(0.0, 2)]
    assert play([*BEGIN, *again])[0].restarts == 1
    assert (
        play([*BEGIN, dead("ACTOR"), dead("ACTOR", attempt=1), Recovered(0.0, 3), TrainerBegun(0.0, 2)])[0].restarts
        == 1
    )
    assert play([*BEGIN, dead("ROLLOUT"), Recovered(0.0, 2)])[0].restarts == 0


def test_a_node_that_fails_too_often_is_left_out_if_there_are_others() -> None:
    policy = FailoverPolicy(roles={"ROLLOUT": RolePolicy("workload")}, max_node_faults=1)
    for has_spare, excluded in ((True, ("a",)), (False, ())):
        faults = [dead("ROLLOUT", 0, node="a", has_spare_node=has_spare) for _ in range(1)]
        faults.append(dead("ROLLOUT", 1, node="a", has_spare_node=has_spare))
        state, actions = play([*BEGIN, *faults], policy)
        assert state.excluded_nodes == excluded
        if excluded:  # its other workloads leave the node, too
            assert actions[-1] == (CreateJob(3, 1, 1.0),)
        else:
            assert isinstance(actions[-1][0], RestartWorkload)


def test_the_back_off_grows_is_bounded_and_ends_after_a_stable_time() -> None:
    policy = FailoverPolicy(roles={"ROLLOUT": RolePolicy("workload", 99)}, max_backoff_s=5.0, stable_s=100.0)
    state, delays = play(BEGIN, policy)[0], []
    for incarnation, at in enumerate([0.0, 1.0, 2.0, 3.0, 150.0]):
        failed = WorkloadsFailed(at, (WorkloadId("ROLLOUT", 0, incarnation=incarnation),), "hung")
        state, actions, *_ = decide(state, failed, policy)
        assert isinstance(actions[0], RestartWorkload)
        delays.append(actions[0].delay_s)
    assert delays == [0.0, 1.0, 3.0, 5.0, 0.0]


def test_a_lost_node_is_one_failure() -> None:
    lives = tuple(WorkloadId(role, rank) for role in ("CRITIC", "ROLLOUT", "REWARD") for rank in range(2))
    state, actions = play([*BEGIN, WorkloadsFailed(0.0, lives, "stopped", "a")])
    assert [type(action) for action in actions[-1]] == [RestartRole, RestartWorkload, RestartWorkload]
    assert (state.roles["CRITIC"].restarts, state.roles["ROLLOUT"].restarts, state.roles["REWARD"].lost) == (
        1,
        1,
        (0, 1),
    )
    assert state.node_faults == {"a": 1}


def test_states_travel_as_json() -> None:
    json = TypeAdapter(JobState)
    for events, _, _ in TABLE.values():
        state = play([*BEGIN, *events])[0]
        assert json.validate_json(json.dump_json(state)) == state
