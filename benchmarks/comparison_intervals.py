"""Coverage and width of the confidence interval of a paired comparison, by simulation.

    python -m benchmarks.comparison_intervals --simulations 2000

Each cell draws evaluations of two models on `items` prompts, of which a share differs. With clusters of 8 samples, the
mean score of a differing prompt changes by a random number of eighths. The width is compared with that of the exact
interval: Clopper and Pearson's limits of gains and of losses, in place of the score limits, combined in the same way.
The command ends with an error if an interval covers the true difference in less than 93 % of the simulations, or is
wider than 1.3 times the exact one.
"""

from __future__ import annotations

import argparse
import math
from functools import cache
from itertools import product

import numpy as np

from rlite.evaluation.statistics import Floats, difference_interval

ITEMS, SHARES, CLUSTERS, GAINS = (10, 30, 100, 1000), (0.0, 0.01, 0.05, 0.3), (1, 8), (0.5, 0.75, 1.0)
LEAST_COVERAGE, MOST_WIDTH = 0.93, 1.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=2000, help="simulations of each cell")
    args = parser.parse_args()
    print("items  differing  samples  gains  coverage  width  of exact")
    failed = 0
    for number, (items, share, cluster, gain) in enumerate(product(ITEMS, SHARES, CLUSTERS, GAINS)):
        coverage, width, ratio = cell(items, share, cluster, gain, args.simulations, number)
        is_wrong = coverage < LEAST_COVERAGE or ratio > MOST_WIDTH
        failed += is_wrong
        print(
            f"{items:5}  {share:9.0%}  {cluster:7}  {gain:5.0%}  {coverage:8.1%}  {width:.4f}  {ratio:.2f}"
            f"{'  WRONG' if is_wrong else ''}",
            flush=True,
        )
    if failed:
        raise SystemExit(f"{failed} cells are wrong")


def cell(
    items: int, share: float, cluster: int, gain: float, simulations: int, seed: int
) -> tuple[float, float, float]:
    """Return coverage, mean width, and the ratio of the mean width to that of the exact interval."""
    random = np.random.default_rng(seed)
    truth = share * (2 * gain - 1) * (1.0 if cluster == 1 else (cluster + 1) / 2 / cluster)
    covered, width, exact = 0, 0.0, 0.0
    for _ in range(simulations):
        differences = draw(random, items, share, cluster, gain)
        low, high = difference_interval(differences)
        covered += low - 1e-12 <= truth <= high + 1e-12
        width += high - low
        exact += exact_width(items, int((differences > 0).sum()), int((differences < 0).sum()))
    return covered / simulations, width / simulations, width / exact


def draw(random: np.random.Generator, items: int, share: float, cluster: int, gain: float) -> Floats:
    """Return the differences of the items' mean scores between two models."""
    sizes = random.integers(1, cluster + 1, items) / cluster
    return (random.random(items) < share) * np.where(random.random(items) < gain, 1.0, -1.0) * sizes


@cache
def exact_width(n: int, gains: int, losses: int) -> float:
    (gain_low, gain_high), (loss_low, loss_high) = (clopper_pearson(count, n) for count in (gains, losses))
    gain, loss = gains / n, losses / n
    return math.hypot(gain - gain_low, loss_high - loss) + math.hypot(gain_high - gain, loss - loss_low)


@cache
def clopper_pearson(count: int, n: int, tail: float = 0.025) -> tuple[float, float]:
    """Return the exact limits of a share, by bisection of binomial tails."""

    def at_most(limit: int, share: float) -> float:
        return math.fsum(
            math.exp(
                math.lgamma(n + 1)
                - math.lgamma(k + 1)
                - math.lgamma(n - k + 1)
                + k * math.log(share)
                + (n - k) * math.log1p(-share)
            )
            for k in range(limit + 1)
        )

    def solve(is_below: object) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if is_below(middle) else (low, middle)  # type: ignore[operator]
        return low

    lower = 0.0 if count == 0 else solve(lambda share: 1 - at_most(count - 1, share) < tail)
    upper = 1.0 if count == n else solve(lambda share: at_most(count, share) > tail)
    return lower, upper


if __name__ == "__main__":
    main()
