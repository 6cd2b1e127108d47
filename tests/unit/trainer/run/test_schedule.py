"""The schedule of evaluations: each set once in its interval, and what a resumed run owes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rlite.trainer.run.schedule import EvaluationSchedule


def make_run(step: int) -> Any:
    run: Any = SimpleNamespace(step=step)
    run.is_due = lambda every: run.step % every == 0
    return run


def test_each_set_is_due_once_in_its_interval_and_before_the_first_step_if_it_asks_for_it() -> None:
    run = make_run(0)
    schedule = EvaluationSchedule(run, {"math": 2, "code": 3}, first={"code"})
    found = []
    for run.step in range(7):
        found.append(schedule.due())
        schedule.mark(schedule.due())
        assert schedule.due() == []
    assert found == [["code"], [], ["math"], ["code"], ["math"], [], ["math", "code"]]


def test_a_resumed_run_owes_the_sets_that_its_checkpoint_lacks_and_no_other() -> None:
    run = make_run(6)
    schedule = EvaluationSchedule(run, {"math": 2, "code": 3})
    schedule.resume(["code", "a set that is gone"])
    assert schedule.due() == ["code"]
    schedule.mark(["code"])
    assert schedule.due() == []


def test_an_owed_set_is_due_at_once_although_its_interval_is_not_over() -> None:
    run = make_run(5)
    schedule = EvaluationSchedule(run, {"math": 2, "code": 3})
    schedule.resume(["math"])
    assert schedule.due() == ["math"]
