"""Metrics of an evaluation, against published formulas and brute force."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import numpy as np
import pytest

from rlite.errors import DataError
from rlite.evaluation.metrics import Sample, majority, pass_at_k, summary
from rlite.evaluation.statistics import clustered_standard_error


def humaneval_pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate pass@k as the code of HumanEval does: https://github.com/openai/human-eval."""
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def samples_of(items: dict[str, list[float | None]]) -> list[Sample]:
    return [
        Sample(item, number, score, reason="" if score is not None else "RewardTimeout: 5 s")
        for item, scores in items.items()
        for number, score in enumerate(scores)
    ]


def test_pass_at_k_equals_the_formula_of_humaneval() -> None:
    draw = random.Random(0)
    for _ in range(500):
        n = draw.randint(1, 200)
        c, k = draw.randint(0, n), draw.randint(1, n)
        assert pass_at_k(n, c, k) == pytest.approx(humaneval_pass_at_k(n, c, k), abs=1e-9)


def test_pass_at_k_is_the_mean_over_all_subsets_of_k_samples() -> None:
    solved = [True, False, False, True, False, False]
    for k in range(1, 7):
        subsets = list(itertools.combinations(solved, k))
        assert pass_at_k(6, 2, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_summary_averages_pass_at_k_over_items() -> None:
    metrics = summary(samples_of({"a": [1, 0, 0, 0], "b": [1, 1, 1, 1], "c": [0, 0, None, 0.9]}), ks=4)
    assert metrics["pass@1"] == pytest.approx((0.25 + 1 + 0) / 3)
    assert metrics["pass@2"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert metrics["pass@4"] == pytest.approx(2 / 3), "0.9 is not solved"
    assert summary(samples_of({"c": [0, 0, None, 0.9]}), ks=2, solved_at=0.5)["pass@2"] == pytest.approx(0.5)


def test_standard_error_is_that_of_a_cluster_robust_regression_on_a_constant() -> None:
    draw = np.random.default_rng(1)
    clusters = [draw.random(size) for size in (3, 1, 5, 2, 4)]
    scores, owners = np.concatenate(clusters), np.repeat(np.arange(5), [3, 1, 5, 2, 4])
    x, residuals = np.ones((15, 1)), scores - scores.mean()
    bread = np.linalg.inv(x.T @ x)
    meat = np.zeros((1, 1))
    for cluster in range(5):
        moment = x[owners == cluster].T @ residuals[owners == cluster]
        meat += np.outer(moment, moment)
    correction = 5 / 4 * (15 - 1) / (15 - 1)
    expected = np.sqrt(correction * (bread @ meat @ bread)[0, 0])
    assert clustered_standard_error([list(own) for own in clusters]) == pytest.approx(expected)


def test_standard_error_of_single_samples_is_the_usual_one() -> None:
    scores = [0.0, 1.0, 1.0, 0.5, 0.0]
    expected = statistics.stdev(scores) / 5**0.5
    assert summary(samples_of({str(i): [s] for i, s in enumerate(scores)}))["standard_error"] == pytest.approx(expected)
    fourfold = summary(samples_of({str(i): [s] * 4 for i, s in enumerate(scores)}))
    assert fourfold["standard_error"] == pytest.approx(expected), "equal samples of an item tell nothing new"


def test_standard_error_predicts_the_spread_of_repeated_evaluations() -> None:
    draw = np.random.default_rng(2)

    def scores() -> list[list[float]]:
        chances = draw.beta(0.5, 0.5, size=60)  # items are either easy or hard
        return [(draw.random(8) < chance).astype(float).tolist() for chance in chances]

    repeated = [scores() for _ in range(300)]
    spread = float(np.std([np.mean(each) for each in repeated]))
    predicted = float(np.mean([clustered_standard_error(each) for each in repeated]))
    assert predicted == pytest.approx(spread, rel=0.12)


def test_failed_samples_are_wrong_and_counted_by_kind() -> None:
    metrics = summary([*samples_of({"a": [1, None], "b": [1, 1]}), Sample("b", 2, None, "ValueError: bad")])
    assert metrics["accuracy"] == pytest.approx(3 / 5)
    assert metrics["accuracy_finished"] == 1.0
    counts = {key: value for key, value in metrics.items() if "error" in key and not key.endswith("standard_error")}
    assert counts == {"num_errors": 2, "errors/RewardTimeout": 1, "errors/ValueError": 1}


def test_failing_is_no_better_than_the_worst_score() -> None:
    assert summary(samples_of({"a": [1.0], "b": [-1.0], "c": [None], "d": [None]}))["accuracy"] == -0.5


def test_an_evaluation_in_which_everything_failed_has_no_metrics_of_finished_samples() -> None:
    metrics = summary(samples_of({"a": [None, None]}), ks=2)
    assert metrics == {"accuracy": 0, "pass@1": 0, "pass@2": 0, "num_errors": 2, "errors/RewardTimeout": 2}


def test_truncated_is_the_share_of_finished_samples() -> None:
    assert summary([Sample("a", 0, 0.0, truncated=True), Sample("a", 1, 1.0), Sample("a", 2, None)])["truncated"] == 0.5


def answers(*given: tuple[str | None, float | None]) -> list[Sample]:
    return [Sample("a", number, score, answer=answer) for number, (answer, score) in enumerate(given)]


def test_majority_takes_the_most_frequent_answer() -> None:
    assert majority(answers(("7", 0.0), ("8", 1.0), ("8", 1.0))) == 1.0
    assert majority(answers(("7", 0.0), ("8", 1.0), ("7", 0.0))) == 0.0
    assert majority(answers((None, 0.0), (None, 0.0), ("8", 1.0))) == 1.0, "no answer is no vote"
    assert majority(answers(("7", None), ("7", None), ("8", 1.0))) == 1.0, "a failed sample has no vote"
    assert majority(answers((None, 1.0))) == 0.0, "nobody votes"


def test_majority_counts_the_expectation_of_a_random_choice_between_tied_answers() -> None:
    assert majority(answers(("7", 0.0), ("8", 1.0))) == 0.5
    assert majority(answers(("7", 0.0), ("8", 1.0), ("9", 0.0))) == pytest.approx(1 / 3)


def test_summary_lets_the_first_k_samples_vote() -> None:
    votes = answers(("8", 1.0), ("8", 1.0), ("7", 0.0), ("7", 0.0), ("7", 0.0))
    assert summary(votes, ks=3)["majority@3"] == 1.0
    assert summary(votes[::-1], ks=5)["majority@5"] == 0.0
    assert not [key for key in summary(samples_of({"a": [1.0]})) if "majority" in key]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "an evaluation without samples"),
        ({"a": [1.0] * 4, "b": [1.0] * 3}, r"pass@4: item b has 3 samples; expected at least 4"),
    ],
)
def test_too_few_samples_are_refused(given: dict[str, list[float | None]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        summary(samples_of(given), ks=4)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_refused(score: float) -> None:
    with pytest.raises(DataError, match=r"item a, sample 2: its score is -?(nan|inf); expected a finite number"):
        Sample("a", 2, score)


def test_shares_have_standard_errors_clustered_by_item() -> None:
    samples = [
        Sample(item, number, score, truncated=score == 1.0, answer="x" if score else None)
        for item, scores in {"a": [1.0, 0.0], "b": [0.0, 0.0], "c": [1.0, None]}.items()
        for number, score in enumerate(scores)
    ]
    metrics = summary(samples, ks=2)
    usual = float(np.std([1.0, 0.0, 1.0], ddof=1)) / 3**0.5
    assert metrics["pass@2_standard_error"] == pytest.approx(usual)
    assert metrics["majority@2_standard_error"] == pytest.approx(usual)
    assert metrics["truncated_standard_error"] == pytest.approx(
        clustered_standard_error([[1.0, 0.0], [0.0, 0.0], [1.0]])
    )
    alone = summary([sample for sample in samples if sample.item == "a"], ks=2)
    assert not any("standard_error" in name for name in alone)


@pytest.mark.parametrize(("score", "low", "high"), [(1.0, 0.7225, 1.0), (0.0, 0.0, 0.2775)])
def test_equal_scores_of_all_items_are_no_proof_of_a_share(score: float, low: float, high: float) -> None:
    """Wilson's interval of 10 of 10 and of 0 of 10."""
    metrics = summary(samples_of({str(i): [score] * 3 for i in range(10)}), ks=3, confidence=0.95)
    for name in ("accuracy", "pass@1", "pass@3"):
        assert (metrics[f"{name}_low"], metrics[f"{name}_high"]) == pytest.approx((low, high), abs=1e-4)
    assert metrics["standard_error"] == pytest.approx(1 / 22)
    assert metrics["truncated_high"] == pytest.approx(0.2775, abs=1e-4)


def test_an_interval_is_wilsons_of_the_items_that_count() -> None:
    metrics = summary(samples_of({str(i): [float(i < 30)] for i in range(40)}), confidence=0.95)
    assert (metrics["accuracy_low"], metrics["accuracy_high"]) == pytest.approx((0.5981, 0.8581), abs=1e-4)
    fourfold = summary(samples_of({str(i): [float(i < 30)] * 4 for i in range(40)}), confidence=0.95)
    assert fourfold["accuracy_low"] == pytest.approx(metrics["accuracy_low"])
    rewards = summary(samples_of({"a": [2.0], "b": [-1.0]}), confidence=0.95)
    assert not [name for name in rewards if name.startswith("accuracy") and name.endswith(("_low", "_high"))]
