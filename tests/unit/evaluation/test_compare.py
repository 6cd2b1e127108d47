"""Paired differences against brute force."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from benchmarks.comparison_intervals import cell
from rlite.errors import DataError
from rlite.evaluation.metrics import Sample, compare, paired_differences, summary
from rlite.evaluation.statistics import ENUMERATED, RESAMPLES, difference_interval, sign_flip_p_value


def of(scores: dict[str, list[float | None]]) -> list[Sample]:
    return [Sample(item, n, score) for item, own in scores.items() for n, score in enumerate(own)]


def test_the_difference_is_that_of_the_accuracies_also_with_failed_samples() -> None:
    first = of({"a": [0, 1, 1], "b": [None, 0, 0], "c": [1, 1, 1]})
    second = of({"c": [1, 0, None], "a": [1, 1, 1], "b": [0, 1, 1]})
    found = compare(first, second)
    assert found.difference == pytest.approx(summary(second)["accuracy"] - summary(first)["accuracy"])
    assert (found.num_items, found.better, found.worse) == (3, 2, 1)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.difference <= found.high


def test_failures_of_both_models_have_the_same_score() -> None:
    first = of({"a": [None], "b": [-1], "c": [1]})
    second = of({"a": [None], "b": [0.5], "c": [1]})
    assert paired_differences(first, second).tolist() == [0, 1.5, 0]
    assert paired_differences(second, first).tolist() == [0, -1.5, 0]


def newcombe(n: int, better: int, worse: int, both: int) -> tuple[float, float]:
    """Method 10 of Newcombe 1998 with his formula of phi, without a continuity correction."""
    e, f, g, h = both, better, worse, n - both - better - worse
    z = 1.959963984540054

    def wilson(x: int) -> tuple[float, float]:
        middle, root = 2 * x + z * z, z * math.sqrt(z * z + 4 * x * (1 - x / n))
        return (middle - root) / (2 * (n + z * z)), (middle + root) / (2 * (n + z * z))

    (l2, u2), (l3, u3) = wilson(f), wilson(g)
    phi = -f * g / math.sqrt(f * (n - f) * g * (n - g)) if f * g else 0.0
    assert e + h >= 0
    difference = (f - g) / n
    down = math.sqrt((f / n - l2) ** 2 - 2 * phi * (f / n - l2) * (u3 - g / n) + (u3 - g / n) ** 2)
    up = math.sqrt((u2 - f / n) ** 2 - 2 * phi * (u2 - f / n) * (g / n - l3) + (g / n - l3) ** 2)
    return difference - down, difference + up


@pytest.mark.parametrize(("n", "better", "worse"), [(50, 12, 2), (10, 0, 0), (100, 1, 0), (1000, 30, 25), (30, 30, 0)])
def test_the_interval_of_right_and_wrong_answers_combines_wilsons_limits(n: int, better: int, worse: int) -> None:
    differences = np.array([1.0] * better + [-1.0] * worse + [0.0] * (n - better - worse))
    assert difference_interval(differences) == pytest.approx(newcombe(n, better, worse, 0), abs=1e-12)


def test_the_interval_of_many_items_is_that_of_the_normal_distribution() -> None:
    differences = np.random.default_rng(1).normal(0.3, 1.0, size=20_000)
    error = differences.std(ddof=1) / math.sqrt(len(differences))
    expected = (differences.mean() - 1.96 * error, differences.mean() + 1.96 * error)
    assert difference_interval(differences, largest=10) == pytest.approx(expected, abs=0.03 * error)
    narrow, wide = difference_interval(differences, 0.5, 10), difference_interval(differences, 0.99, 10)
    assert wide[0] < expected[0] < narrow[0] < narrow[1] < expected[1] < wide[1]


def test_the_interval_scales_with_the_scores() -> None:
    differences = np.array([0.0, 0.0, 1.0, -0.5, 0.25, 0.0])
    scaled = tuple(10 * end for end in difference_interval(differences))
    assert difference_interval(10 * differences, largest=10) == pytest.approx(scaled)
    assert difference_interval(np.zeros(9), largest=10) == pytest.approx(
        tuple(10 * end for end in difference_interval(np.zeros(9)))
    )


@pytest.mark.parametrize("cluster", [1, 8])
@pytest.mark.parametrize(
    ("items", "share", "gain"), [(10, 0.3, 1.0), (30, 0.05, 0.5), (100, 0.01, 1.0), (100, 0.3, 0.75)]
)
def test_the_interval_covers_the_true_difference_and_is_hardly_wider_than_the_exact_one(
    items: int, share: float, gain: float, cluster: int
) -> None:
    """`make nightly` measures all cells, by `benchmarks.comparison_intervals`."""
    coverage, _, ratio = cell(items, share, cluster, gain, 2000, seed=0)
    assert coverage >= 0.93
    assert ratio <= 1.3


@pytest.mark.parametrize("n", [10, 30, 100])
def test_interval_and_p_value_have_one_verdict(n: int) -> None:
    verdicts = set()
    for better, worse in itertools.product(range(0, n + 1, max(1, n // 30)), range(9)):
        if better + worse <= n:
            scores = [(0.0, 1.0)] * better + [(1.0, 0.0)] * worse + [(0.0, 0.0)] * (n - better - worse)
            first, second = (of({str(i): [pair[side]] for i, pair in enumerate(scores)}) for side in (0, 1))
            found = compare(first, second)
            assert found.low is not None
            assert found.high is not None
            assert found.low <= found.difference <= found.high
            holds_zero = found.low <= 0 <= found.high
            assert holds_zero == (found.p_value >= 0.05), (better, worse)
            verdicts.add(holds_zero)
    assert verdicts == {True, False}


def brute_force(differences: list[float]) -> float:
    """All sign flips, by definition, in exact arithmetic: the differences are quarters."""
    quarters = [round(4 * value) for value in differences]
    flips = list(itertools.product((-1, 1), repeat=len(quarters)))
    sums = [abs(sum(sign * value for sign, value in zip(flip, quarters, strict=True))) for flip in flips]
    return sum(value >= abs(sum(quarters)) for value in sums) / len(flips)


@pytest.mark.parametrize("seed", range(20))
def test_the_p_value_is_that_of_all_sign_flips(seed: int) -> None:
    draw = random.Random(seed)
    differences = [draw.randrange(-4, 5) / 4 for _ in range(draw.randrange(1, 12))]
    assert sign_flip_p_value(np.array(differences)) == pytest.approx(brute_force(differences), abs=1e-12)


@pytest.mark.parametrize(("better", "worse"), [(6, 1), (3, 3), (8, 0), (0, 5), (20, 7), (40, 20)])
def test_one_sample_of_zero_or_one_gives_mcnemars_exact_test(better: int, worse: int) -> None:
    n, tail = better + worse, min(better, worse)
    exact = min(1.0, 2 * sum(math.comb(n, k) for k in range(tail + 1)) / 2**n)
    found = sign_flip_p_value(np.array([1.0] * better + [-1.0] * worse + [0.0] * 9))
    drawn_error = 0 if n <= ENUMERATED else 4 * math.sqrt(exact * (1 - exact) / RESAMPLES) + 1 / RESAMPLES
    assert found == pytest.approx(exact, abs=drawn_error + 1e-12)


def test_equal_models_have_p_1_and_no_draw_makes_it_0() -> None:
    same = of({"a": [1.0], "b": [0.0]})
    found = compare(same, same)
    assert (found.difference, found.p_value) == (0, 1)
    upper = 1.96**2 / (2 + 1.96**2)  # Wilson's limit of 0 of 2
    assert (found.low, found.high) == pytest.approx((-upper, upper), abs=1e-4)
    assert sign_flip_p_value(np.ones(100)) == 1 / (RESAMPLES + 1)


def test_equally_good_models_seldom_have_a_low_p_value() -> None:
    random_numbers = np.random.default_rng(3)
    found = [sign_flip_p_value(random_numbers.normal(size=10)) for _ in range(400)]
    assert np.mean(np.array(found) <= 0.05) == pytest.approx(0.05, abs=0.035)


def test_a_single_item_has_no_interval() -> None:
    found = compare(of({"a": [0, 0]}), of({"a": [1, 1]}))
    assert (found.difference, found.low, found.high, found.p_value) == (1, None, None, 1)


def test_other_items_are_refused() -> None:
    first = of({str(n): [1] for n in range(10)})
    second = of({"0": [1], "x": [0]})
    with pytest.raises(DataError, match=r"only the first has 1, 2, 3, 4, 5 and 4 more; only the second has x"):
        paired_differences(first, second)
    with pytest.raises(DataError, match="without samples"):
        compare([], [])


def test_lower_scores_are_better_and_a_failure_counts_as_the_highest_if_asked() -> None:
    first, second = of({"a": [4], "b": [2], "c": [3]}), of({"a": [1], "b": [None], "c": [2]})
    found = compare(first, second, lower_is_better=True)
    assert paired_differences(first, second, lower_is_better=True).tolist() == [-3, 2, -1]
    assert found.difference == pytest.approx(-2 / 3)
    assert (found.better, found.worse) == (2, 1)
