"""Evaluations of which too many episodes failed choose nothing, and are told once."""

from __future__ import annotations

import io
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rlite.config import load
from rlite.evaluation.episodes import Evaluation
from rlite.evaluation.metrics import Sample
from rlite.evaluation.sets import EvaluationSet
from rlite.evaluation.training import InvalidEvaluations
from rlite.rollout import RolloutWorkflow
from rlite.services.console.terminal import ConsoleReporter
from rlite.trainer.rl.options import PpoConfig


class Workflow(RolloutWorkflow):
    """Makes no episode."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        return None


def evaluation(num_failed: int, name: str = "") -> Evaluation:
    """An evaluation of ten episodes, some of which failed."""
    rows: list[Mapping[str, Any]] = [{}] * 10
    samples = [Sample(str(row), 0, None, "ValueError: no grade") for row in range(num_failed)]
    samples += [Sample(str(row), 0, 1.0) for row in range(num_failed, 10)]
    return Evaluation(EvaluationSet(name, rows, Workflow()), samples)


def test_too_many_errors_make_an_evaluation_invalid_and_are_told_once_for_each_set() -> None:
    out = io.StringIO()
    run: Any = SimpleNamespace(step=1, console=ConsoleReporter(file=out))
    settings = ["test_data.math.path=m", "test_data.code.path=c", "test_data.code.max_error_share=0.5"]
    invalid = InvalidEvaluations(load(PpoConfig, ["actor.model_name=x", *settings]).test_data, run)
    firsts = {"ValueError": "ValueError: no grade\nrow: prompt: 'x'"}
    assert invalid.is_valid(evaluation(1), firsts)
    assert invalid.is_valid(evaluation(5, "code"), firsts)
    assert not out.getvalue()
    for run.step in (2, 3):
        assert not invalid.is_valid(evaluation(2), firsts)
        assert not invalid.is_valid(evaluation(6, "code"), firsts)
    assert out.getvalue().count("ALARM at step 2: the evaluation is invalid, 2 of 10 episodes failed (test_data.m") == 1
    assert (
        "the evaluation of code is invalid, 6 of 10 episodes failed (test_data.code.max_error_share=0.5)"
        in out.getvalue()
    )
    assert "2 x  ValueError: no grade\n       row: prompt: 'x'" in out.getvalue()
    assert out.getvalue().count("ALARM") == 2


def test_metrics_of_an_invalid_evaluation_are_left_out_and_no_others() -> None:
    run: Any = SimpleNamespace(step=1, console=ConsoleReporter(file=io.StringIO()))
    invalid = InvalidEvaluations({}, run)
    metrics = {"code/accuracy": 0.0, "math/accuracy": 1.0, "loss/test_loss": 2.0}
    evaluations = [evaluation(2, "code"), evaluation(0, "math")]
    assert invalid.without(metrics, evaluations, {}) == {"math/accuracy": 1.0, "loss/test_loss": 2.0}
    assert invalid.without({"accuracy": 0.0}, [evaluation(10)], {}) == {}
