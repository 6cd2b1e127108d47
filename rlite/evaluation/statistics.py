"""Statistics of evaluations: clustered errors, score intervals, and the test of a paired difference. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist, fmean

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
"""draws of sign flips that are not enumerated"""
ENUMERATED = 20
"""items with a difference up to which all sign flips are enumerated"""
CHUNK = 1_000_000
"""random numbers that are held at once"""
Floats = NDArray[np.float64]


def wrong_score(scores: Iterable[float], lower_is_better: bool = False) -> float:
    """Return the score of a failed sample: 0, or the worst of these scores if it is worse than 0."""
    return (max if lower_is_better else min)([0.0, *scores])


def clustered_standard_error(clusters: Iterable[Sequence[float]]) -> float:
    """Return the standard error of the mean of all scores, if the scores of a cluster are correlated.

    `clusters`: scores of each cluster; at least two clusters.
    """
    groups = list(clusters)
    n, mean = sum(map(len, groups)), fmean([score for group in groups for score in group])
    deviations = np.array([math.fsum(score - mean for score in group) for group in groups])
    return clustered_errors(deviations, np.zeros(1, np.int64), np.array([n])).item()


def clustered_errors(deviations: Floats, begins: NDArray[np.int64], numbers: NDArray[np.int64]) -> Floats:
    """Return the standard errors of several means of clustered scores; not finite for the mean of one cluster.

    sqrt(G / (G - 1) sum_g (sum_i (s_gi - mean))^2) / n, with n scores in G clusters: the cluster-robust error of a
    regression on a constant (Liang and Zeger, 1986), with the correction for few clusters. See section 2.2 of "Adding
    Error Bars to Evals", arXiv 2411.00640. With one score in each cluster it is the usual s / sqrt(n).

    `deviations`: sum over each cluster of the scores less their mean [G], the clusters of a mean side by side.
    `begins`: first cluster of each mean [M]. `numbers`: scores of each mean [M].
    """
    clusters = np.diff(begins, append=len(deviations))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt(np.add.reduceat(deviations**2, begins) * clusters / (clusters - 1)) / numbers


def score_limits(mean: float, variance: float, n: float, z: float, size: float = 1.0) -> tuple[float, float]:
    """Return the score interval of a mean of values between 0 and `size`, which is also right if all values are 0.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22, 1927; his interval if
    all values are 0 or `size`.
    """
    share = z * z / n
    middle = (mean + share * size / 2) / (1 + share)
    half = z * math.sqrt(variance / n + share * size**2 / (4 * n)) / (1 + share)
    return middle - half, middle + half


def difference_interval(differences: Floats, confidence: float = 0.95, largest: float = 1.0) -> tuple[float, float]:
    """Return a confidence interval of the mean difference that is also right if few items differ, or none.

    Gains and losses each have a score interval (Wilson 1927), and the limits are combined as in method 10 of Newcombe,
    "Improved confidence intervals for the difference between binomial proportions based on paired data", Statistics in
    Medicine 17, 1998. For scores of 0 and 1 it is that method; for other scores, the largest difference takes the place
    of 1. For many items it is mean +- z s / sqrt(n).

    `differences`: one for each item [n]. `confidence`: level of the interval, between 0 and 1.
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


def _part(part: Floats, size: float, z: float) -> tuple[float, float, float, float]:
    """Return mean, lower and upper limit, and variance of the gains, or of the losses, of all items."""
    mean, variance = float(part.mean()), float(part.var())
    low, high = score_limits(mean, variance, len(part), z, size)
    return mean, min(max(low, 0.0), mean), max(high, mean), variance


def sign_flip_p_value(differences: Floats, seed: int = 0) -> float:
    """Return the p-value of a paired permutation test, two-sided.

    If both models are equally good, the sign of each difference is random: the p-value is the share of sign flips whose
    mean is at least as far from 0. Up to `ENUMERATED` items with a difference, all flips are enumerated; with one
    sample of 0 or 1 for each item this is McNemar's exact test. Otherwise `RESAMPLES` flips are drawn, and the p-value
    is (b + 1) / (RESAMPLES + 1), which is valid: equation 2 of Phipson and Smyth, arXiv 1603.05766.

    `differences`: one for each item [n].
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


def _all_flips(changed: Floats) -> Floats:
    """Return the sums [2^n] of the differences with all combinations of signs."""
    sums = np.zeros(1)
    for difference in changed:
        sums = np.concatenate([sums - difference, sums + difference])
    return sums
