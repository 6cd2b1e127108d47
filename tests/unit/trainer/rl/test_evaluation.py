"""Evaluations: a failed episode is a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tensordict import TensorDict

from rlite.errors import DataError
from rlite.rollout import CollectorOptions, LLMRequest, RolloutCollector, RolloutWorkflow, ScriptedEngine, trajectory
from rlite.rollout.collector.collector import Collected
from rlite.trainer.rl.evaluation import evaluation_metrics


class Graded(RolloutWorkflow):
    """One answer, worth the row's grade; a row without one makes the grader raise."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        response = await engine.agenerate(LLMRequest(input_ids=[1]))
        if data["grade"] is None:
            raise ValueError(f"no grade: {data}")
        return trajectory(response, reward=data["grade"])


@pytest.fixture
def evaluate() -> Iterator[Callable[..., Collected]]:
    """Evaluate rows of these grades, with a collector that would stop a run after three failures in a row."""
    collector = RolloutCollector(
        ScriptedEngine([[7]]), CollectorOptions(request_retries=0, max_consecutive_failures=3, consumer_batch_size=1)
    )
    yield lambda grades, **options: collector.evaluate([{"grade": grade} for grade in grades], Graded(), **options)
    assert not collector.lost, "what is measured is not among the losses of training"
    collector.close()


def test_failed_episodes_count_as_wrong(evaluate: Callable[..., Collected]) -> None:
    metrics = evaluation_metrics(evaluate([1.0, None] * 5))
    assert metrics == {"accuracy": 0.5, "accuracy_finished": 1.0, "num_errors": 5, "errors/ValueError": 5}


def test_an_evaluation_of_which_nothing_is_left_says_so_and_stops_nothing(evaluate: Callable[..., Collected]) -> None:
    assert evaluation_metrics(evaluate([None] * 20)) == {"accuracy": 0.0, "num_errors": 20, "errors/ValueError": 20}
    assert evaluation_metrics(evaluate([1.0]))["accuracy"] == 1.0, "and the next one is made"


def test_failing_is_no_better_than_the_worst_answer(evaluate: Callable[..., Collected]) -> None:
    assert evaluation_metrics(evaluate([1.0, -1.0, None, None]))["accuracy"] == -0.5


def test_a_failed_response_costs_no_sibling(evaluate: Callable[..., Collected]) -> None:
    found = evaluate([1.0, None], group_size=4)
    assert evaluation_metrics(found)["accuracy"] == 0.5
    assert found.batch is not None
    assert found.batch["group_ids"].tolist() == [0] * 4
    found.batch["rewards"] = found.batch["logprobs"]
    with pytest.raises(DataError, match=r"rewards has shape \[4, 2\]; expected \[4\]"):
        evaluation_metrics(found)
