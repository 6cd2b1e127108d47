"""Alarms are raised when a problem begins, and not at every step."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from rlite.config import load
from rlite.evaluation.sets import Evaluation, EvaluationSet
from rlite.observability.console import ConsoleReporter
from rlite.rollout import RolloutWorkflow
from rlite.rollout.collector.collector import Collected
from rlite.trainer.rl.alarms import REPEAT_AFTER, Alarms
from rlite.trainer.rl.options import PpoConfig


def told(metrics: Mapping[int, Mapping[str, float]], *settings: str) -> list[str]:
    """The alarms that steps with these metrics give."""
    out = io.StringIO()
    run: Any = SimpleNamespace(step=0, console=ConsoleReporter(file=out))
    alarms = Alarms(load(PpoConfig, ["actor.model_name=x", *settings]), run)
    for run.step, values in metrics.items():
        alarms.look(values, {})
    return [line for line in out.getvalue().splitlines() if line.startswith("ALARM")]


def equal(reward: float, **more: Any) -> dict[str, float]:
    return {"reward_min": reward, "reward_max": reward, "uniform_groups": 1.0, **more}


@pytest.mark.parametrize("setting", ["adv.estimator=reinforce", "adv.estimator=gae"])
def test_equal_rewards_are_told_at_once_and_again_while_they_last(setting: str) -> None:
    lines = told({step: equal(0.0) for step in range(1, 2 * REPEAT_AFTER)}, setting)
    assert lines == [  # a critic, or the KL, may teach all the same
        f"ALARM at step {step}: all rewards are equal, and no response is better than another"
        for step in (1, 1 + REPEAT_AFTER)
    ]


def test_groups_of_equal_rewards_are_told_only_if_nothing_is_learnt_from_them() -> None:
    steps = {1: {"reward_min": 0.0, "reward_max": 1.0, "uniform_groups": 1.0}}
    assert told(steps) == ["ALARM at step 1: in every group all rewards are equal, and teach nothing"]
    assert told(steps, "adv.global_norm=true") == []
    assert told({1: {"reward_min": 0.0, "reward_max": 1.0, "uniform_groups": 0.9}}) == []


def test_log_probabilities_that_differ_are_told_once_and_then_every_so_many_steps() -> None:
    steps = {step: {"logprob_drift": 0.5 if step % 2 else 0.01} for step in range(1, 2 * REPEAT_AFTER)}
    lines = told(steps, "rollout.max_head_offpolicyness=1")
    assert lines == [
        f"ALARM at step {step}: the rollouts are far from the policy that is trained" for step in (1, 1 + REPEAT_AFTER)
    ]
    assert told({1: {"logprob_drift": 0.5}}) == [
        "ALARM at step 1: the engine does not serve the policy that is trained"
    ]


class Workflow(RolloutWorkflow):
    """Makes no episode."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        return None


def evaluation(num_failed: int, name: str = "") -> Evaluation:
    """An evaluation of ten episodes, some of which failed."""
    rows: list[Mapping[str, Any]] = [{}] * 10
    lost = Counter({"ValueError: no grade": num_failed})
    return Evaluation(EvaluationSet(name, rows, Workflow()), Collected(None, 10, lost))


def test_too_many_errors_make_an_evaluation_invalid_and_are_told_once_for_each_set() -> None:
    out = io.StringIO()
    run: Any = SimpleNamespace(step=1, console=ConsoleReporter(file=out))
    settings = ["test_data.math.path=m", "test_data.code.path=c", "test_data.code.max_error_share=0.5"]
    alarms = Alarms(load(PpoConfig, ["actor.model_name=x", *settings]), run)
    firsts = {"ValueError": "ValueError: no grade\nrow: prompt: 'x'"}
    assert alarms.is_valid(evaluation(1), firsts)
    assert alarms.is_valid(evaluation(5, "code"), firsts)
    assert not out.getvalue()
    for run.step in (2, 3):
        assert not alarms.is_valid(evaluation(2), firsts)
        assert not alarms.is_valid(evaluation(6, "code"), firsts)
    assert out.getvalue().count("ALARM at step 2: the evaluation is invalid, 2 of 10 episodes failed (test_data.m") == 1
    assert (
        "the evaluation of code is invalid, 6 of 10 episodes failed (test_data.code.max_error_share=0.5)"
        in out.getvalue()
    )
    assert "2 x  ValueError: no grade\nrow: prompt: 'x'" in out.getvalue()
    assert out.getvalue().count("ALARM") == 2
