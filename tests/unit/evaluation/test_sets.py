"""Sets of an evaluation: every episode becomes a sample, and a failed episode is a wrong one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlite.errors import DataError
from rlite.evaluation.episodes import Evaluation, evaluate, evaluate_each, samples_of
from rlite.evaluation.metrics import Sample
from rlite.evaluation.sets import EvaluationSet
from rlite.rollout import CollectorOptions, LLMRequest, RolloutCollector, RolloutWorkflow, ScriptedEngine, trajectory
from rlite.rollout.joined import pad_trajectories


class Graded(RolloutWorkflow):
    """One answer, worth the row's next grade; a grade None makes the grader raise."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        response = await engine.agenerate(LLMRequest(input_ids=[1]))
        grade = data["grades"].pop(0)
        if grade is None:
            raise ValueError(f"no grade: {data}")
        return trajectory(response, reward=grade)


class TwoSequences(RolloutWorkflow):
    """An episode of two sequences, the second of which is cut off, with a score beside its reward."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        response = await engine.agenerate(LLMRequest(input_ids=[1]))
        rows = [trajectory(response, reward=0.25), trajectory(replace(response, stop_reason="length"), reward=0.25)]
        batch = pad_trajectories(rows).exclude("group_ids")
        return batch.update({"scores": torch.ones(2), "sequence_index": torch.arange(2)})


class Unlike(RolloutWorkflow):
    """Gives each second item a key of its own."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        made = trajectory(await engine.agenerate(LLMRequest(input_ids=[1])), reward=1.0)
        return made.update({"odd": torch.ones(1)}) if data["number"] % 2 else made


class Signalling(RolloutWorkflow):
    """Answers the first item, and sets an event at the second, whose episode does not end."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        if data["number"]:
            self.is_asked.set()
            await asyncio.sleep(60)
        return trajectory(await engine.agenerate(LLMRequest(input_ids=[1])), reward=1.0)


class OtherVersions(RolloutWorkflow):
    """Claims that each item was answered by another policy version."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        response = await engine.agenerate(LLMRequest(input_ids=[1]))
        versions = [data["version"]] * len(response.output_tokens)
        return trajectory(replace(response, output_versions=versions), reward=1.0)


@pytest.fixture
def collector() -> Iterator[RolloutCollector]:
    """A collector that would stop a run after three failures in a row."""
    made = RolloutCollector(
        ScriptedEngine([[7]]), CollectorOptions(request_retries=0, max_consecutive_failures=3, consumer_batch_size=1)
    )
    yield made
    assert not made.lost, "an evaluation's losses are not among those of training"
    made.close()


Graders = Callable[..., Evaluation]


@pytest.fixture
def graded(collector: RolloutCollector) -> Graders:
    """Evaluate one row for each list of grades."""

    def run(*grades: list[float | None]) -> Evaluation:
        rows = [{"grades": list(own)} for own in grades]
        return evaluate(collector, EvaluationSet("", rows, Graded(), samples=len(grades[0]), k=len(grades[0])))

    return run


def test_failed_episodes_count_as_wrong(graded: Graders) -> None:
    metrics = graded(*[[1.0], [None]] * 5).metrics
    assert (metrics["accuracy"], metrics["accuracy_finished"]) == (0.5, 1.0)
    assert (metrics["num_errors"], metrics["errors/ValueError"]) == (5, 5)


def test_a_float32_score_reaches_the_threshold_that_it_is_equal_to(graded: Graders) -> None:
    found = graded([0.7], [0.69999])
    metrics = replace(found, set=replace(found.set, solved_at=0.7)).metrics
    assert metrics["pass@1"] == 0.5


def test_an_evaluation_of_which_nothing_is_left_says_so_and_stops_nothing(graded: Graders) -> None:
    metrics = graded(*[[None]] * 20).metrics
    errors = {"standard_error": 1 / 42, "pass@1_standard_error": 1 / 42, "num_errors": 20, "errors/ValueError": 20}
    attempts = {"num_failed_attempts": 20, "failed_attempts/ValueError": 20}
    assert metrics == pytest.approx({"accuracy": 0.0, "pass@1": 0.0, **errors, **attempts})
    assert graded([1.0]).metrics["accuracy"] == 1.0, "and the next one is made"


def test_a_failed_sample_costs_no_sibling_and_keeps_its_place(graded: Graders) -> None:
    found = graded([1.0, None, 0.0], [1.0, 1.0, 1.0])
    scores = {(sample.item, sample.sample): sample.score for sample in found.samples}
    assert sorted(scores) == [(item, number) for item in ("0", "1") for number in range(3)]
    assert sorted(score for (item, _), score in scores.items() if item == "0" and score is not None) == [0.0, 1.0]
    [failed] = [sample for sample in found.samples if sample.score is None]
    assert failed.reason.startswith("ValueError: no grade")
    assert found.metrics["pass@3"] == 1.0
    assert found.metrics["pass@1"] == pytest.approx((1 / 3 + 1) / 2)


def test_episode_of_several_sequences_is_one_sample(collector: RolloutCollector) -> None:
    found = evaluate(collector, EvaluationSet("math", [{"id": "a"}, {"id": "a"}], TwoSequences()))
    length = found.samples[0].length
    assert length > 0
    assert found.samples == [
        Sample("0", 0, 1.0, truncated=True, length=length),
        Sample("1", 0, 1.0, truncated=True, length=length),
    ]


def test_tokens_of_several_policy_versions_are_no_evaluation(collector: RolloutCollector) -> None:
    rows = [{"version": 3}, {"version": 4}]
    with pytest.raises(DataError, match=r"evaluation math: tokens of the policy versions \[3, 4\]"):
        evaluate(collector, EvaluationSet("math", rows, OtherVersions()))


def test_a_reward_for_each_token_is_no_score(graded: Graders) -> None:
    found = graded([1.0])
    [episode] = found.episodes[0].episodes
    assert episode.trajectory is not None
    episode.trajectory["rewards"] = episode.trajectory["logprobs"]
    with pytest.raises(DataError, match=r"rewards has shape \[1, 2\]; expected \[1\]"):
        samples_of(found.episodes)


def test_episodes_of_different_keys_all_count(collector: RolloutCollector) -> None:
    metrics = evaluate(collector, EvaluationSet("", [{"number": number} for number in range(5)], Unlike())).metrics
    assert (metrics["accuracy"], metrics["num_errors"]) == (1.0, 0.0)


def test_the_tokens_are_dropped_after_they_are_recorded_and_the_metrics_stay(graded: Graders) -> None:
    found = graded([1.0], [0.0])
    assert found.episodes
    left = found.without_episodes()
    assert not left.episodes
    assert left.metrics == found.metrics


def test_an_interruption_keeps_the_sets_before_it_and_leaves_no_trace_of_the_others(
    collector: RolloutCollector,
) -> None:
    workflow = Signalling()
    sets = [EvaluationSet("a", [{"number": 0}], workflow), EvaluationSet("b", [{"number": 0}, {"number": 1}], workflow)]
    [found] = evaluate_each(collector, sets, workflow.is_asked.is_set)
    assert (found.set.name, found.metrics["accuracy"]) == ("a", 1.0)
    assert collector.record_state()["num_ids"] == 1, "later groups have the numbers that they would have had"
    assert evaluate_each(collector, sets[:1], lambda: False)[0].metrics["accuracy"] == 1.0, "and the engine serves on"


def test_a_set_without_rows_is_refused_when_it_is_made() -> None:
    with pytest.raises(DataError, match="the evaluation set 'math' has no rows; expected at least one"):
        EvaluationSet("math", [], Unlike())
