"""The difference between two models that answered the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np
from numpy.typing import NDArray

from rlite.errors import DataError
from rlite.evaluation.journal import Sample
from rlite.evaluation.metrics import counted_scores, score_limits

RESAMPLES = 10_000
"""draws of sign flips that are not enumerated"""
NEAREST = math.ulp(0.0)
"""end of an interval that begins beside 0"""
ENUMERATED = 20
"""items with a difference up to which all sign flips are enumerated"""
CHUNK = 1_000_000
"""random numbers that are held at once"""
NUM_NAMED = 5
"""items that a message names"""

Differences = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """The paired difference of two mean scores, such as accuracies: the second less the first."""

    difference: float
    low: float | None
    """lower end of the confidence interval; None with a single item"""
    high: float | None
    """upper end of the confidence interval; None with a single item"""
    confidence: float
    """level of the interval"""
    p_value: float
    """two-sided p-value of the hypothesis that both models are equally good; the interval holds 0 if it is not below
    1 - confidence"""
    num_items: int
    better: int
    """items at which the second model has the better mean score"""
    worse: int
    """items at which the second model has the worse mean score"""
    lower_is_better: bool = False
    """true if a lower score is better, as of a perplexity"""


def compare(
    first: Sequence[Sample],
    second: Sequence[Sample],
    confidence: float = 0.95,
    seed: int = 0,
    lower_is_better: bool = False,
) -> Comparison:
    """Return the difference between two evaluations of the same items.

    The samples of an item are correlated. An item therefore counts once, with the difference of its mean scores. A
    failed sample counts 0, or the worst score of both models if that is worse than 0, so that failures of both models
    are equal; `summary` knows one model alone. The same arguments give the same result.

    Args:
        first: samples of the first model.
        second: samples of the second model.
        confidence: level of the interval, between 0 and 1.
        seed: seed of the draws.
        lower_is_better: whether a lower score is better.

    Raises:
        DataError: there are no samples, or the items of the two differ.
    """
    differences = paired_differences(first, second, lower_is_better)
    gains = -differences if lower_is_better else differences
    p_value = sign_flip_p_value(differences, seed)
    low, high = None, None
    if len(differences) > 1:
        scores = [0.0, *(sample.score for sample in (*first, *second) if sample.score is not None)]
        low, high = difference_interval(differences, confidence, (max(scores) - min(scores)) or 1.0)
        low, high = _agreeing(low, high, differences.mean(), p_value < 1 - confidence)
    return Comparison(
        difference=float(differences.mean()),
        low=low,
        high=high,
        confidence=confidence,
        p_value=p_value,
        num_items=len(differences),
        better=int((gains > 0).sum()),
        worse=int((gains < 0).sum()),
        lower_is_better=lower_is_better,
    )


def _agreeing(low: float, high: float, difference: float, is_significant: bool) -> tuple[float, float]:
    """Return the interval with 0 inside if the test does not reject equal models, else with 0 outside.

    The exact test decides, because the interval is approximate.
    """
    if not is_significant:
        return min(low, 0.0), max(high, 0.0)
    return (max(low, NEAREST), high) if difference > 0 else (low, min(high, -NEAREST))


def paired_differences(first: Sequence[Sample], second: Sequence[Sample], lower_is_better: bool = False) -> Differences:
    """Return the second model's mean score less the first's, for each item, in the order of the items' ids.

    Args:
        first: samples of the first model.
        second: samples of the second model.
        lower_is_better: whether a lower score is better, which decides the score of failed samples.

    Raises:
        DataError: there are no samples, or the items of the two differ.
    """
    worst = max if lower_is_better else min
    wrong = worst([0.0, *(sample.score for sample in (*first, *second) if sample.score is not None)])
    before, after = mean_scores(first, wrong), mean_scores(second, wrong)
    if before.keys() != after.keys():
        unshared = {"first": before.keys() - after.keys(), "second": after.keys() - before.keys()}
        only = [f"only the {name} has {_names(sorted(own))}" for name, own in unshared.items() if own]
        raise DataError(f"a paired comparison needs the same items in both evaluations, and {'; '.join(only)}")
    if not before:
        raise DataError("a comparison without samples; expected at least one of each model")
    return np.array([after[item] - before[item] for item in sorted(before)])


def mean_scores(samples: Sequence[Sample], wrong: float) -> dict[str, float]:
    """Return the mean score of each item; a failed sample has the score `wrong`."""
    scores: dict[str, list[float]] = {}
    for sample in samples:
        scores.setdefault(sample.item, []).extend(counted_scores([sample], wrong))
    return {item: fmean(own) for item, own in scores.items()}


def difference_interval(
    differences: Differences, confidence: float = 0.95, largest: float = 1.0
) -> tuple[float, float]:
    """Return a confidence interval of the mean difference that is also right if few items differ, or none.

    Gains and losses each have a score interval (Wilson 1927), and the limits are combined as in method 10 of Newcombe,
    "Improved confidence intervals for the difference between binomial proportions based on paired data", Statistics in
    Medicine 17, 1998. For scores of 0 and 1 it is that method; for other scores, the largest difference takes the place
    of 1. For many items it is mean +- z s / sqrt(n).

    Args:
        differences: one for each item [n].
        confidence: level of the interval, between 0 and 1.
        largest: largest possible difference of an item.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    size, num_differing = float(np.abs(differences).max()), np.count_nonzero(differences)
    # the largest of m differences is that much smaller than the largest possible one, if all are equally likely
    size = min(largest, size * (num_differing + 1) / num_differing) if num_differing else largest
    (gain, gain_low, gain_high, gain_variance), (loss, loss_low, loss_high, loss_variance) = (
        _part(np.maximum(part, 0), size, z) for part in (differences, -differences)
    )
    # no item has both a gain and a loss: their covariance is -gain * loss
    spread = math.sqrt(gain_variance * loss_variance)
    correlation = -gain * loss / spread if spread else 0.0

    def distance(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one**2 + other**2 - 2 * correlation * one * other))

    low = gain - loss - distance(gain - gain_low, loss_high - loss)
    return low, gain - loss + distance(gain_high - gain, loss - loss_low)


def _part(part: Differences, size: float, z: float) -> tuple[float, float, float, float]:
    """Return mean, lower and upper limit, and variance of the gains, or of the losses, of all items."""
    mean, variance = float(part.mean()), float(part.var())
    low, high = score_limits(mean, variance, len(part), z, size)
    return mean, min(max(low, 0.0), mean), max(high, mean), variance


def sign_flip_p_value(differences: Differences, seed: int = 0) -> float:
    """Return the p-value of a paired permutation test, two-sided.

    If both models are equally good, the sign of each difference is random: the p-value is the share of sign flips whose
    mean is at least as far from 0. Up to `ENUMERATED` items with a difference, all flips are enumerated; with one
    sample of 0 or 1 for each item this is McNemar's exact test. Otherwise `RESAMPLES` flips are drawn, and the p-value
    is (b + 1) / (RESAMPLES + 1), which is valid: equation 2 of Phipson and Smyth, arXiv 1603.05766.

    Args:
        differences: one for each item [n].
        seed: seed of the draws.
    """
    changed = differences[differences != 0]
    far = abs(changed.sum()) - 1e-9 * np.abs(changed).sum()  # equal sums differ by rounding
    if len(changed) <= ENUMERATED:
        return float((np.abs(_all_flips(changed)) >= far).mean())
    random, n = np.random.default_rng(seed), len(changed)
    rows = max(1, CHUNK // n)
    sizes = [(min(rows, RESAMPLES - begun), n) for begun in range(0, RESAMPLES, rows)]
    sums = [random.choice((-1.0, 1.0), size=size) @ changed for size in sizes]
    return float((np.abs(np.concatenate(sums)) >= far).sum() + 1) / (RESAMPLES + 1)


def _all_flips(changed: Differences) -> Differences:
    """Return the sums [2^n] of the differences with all combinations of signs."""
    sums = np.zeros(1)
    for difference in changed:
        sums = np.concatenate([sums - difference, sums + difference])
    return sums


def _names(items: Sequence[str]) -> str:
    more = f" and {len(items) - NUM_NAMED} more" if len(items) > NUM_NAMED else ""
    return f"{', '.join(items[:NUM_NAMED])}{more}"
