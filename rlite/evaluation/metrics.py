"""Metrics of an evaluation. Every episode counts, also a failed one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from statistics import NormalDist, fmean

from rlite.errors import DataError
from rlite.evaluation.journal import SOLVED_AT, Sample, reaches
from rlite.rollout.collector.lost_groups import Selection, kind_of
from rlite.wording import counted


def summary(
    samples: Sequence[Sample], ks: int = 1, solved_at: float = SOLVED_AT, confidence: float | None = None
) -> dict[str, float]:
    """Return the metrics of an evaluation.

        accuracy            mean score; a failed sample counts 0, or the lowest score if that is below 0
        accuracy_finished   mean score without failed samples; missing if all failed
        standard_error      of the accuracy, clustered by item; missing with one item
        pass@1..ks          probability that one of k samples is solved, averaged over items
        majority@ks         share of items whose most frequent answer is solved; missing if no sample has an answer
        truncated           share of finished samples that a limit cut off; missing if all failed
        NAME_standard_error of pass@k, majority@ks and truncated, clustered by item; missing with one item
        NAME_low, NAME_high interval of accuracy, pass@k, majority@ks and truncated, if all values are between 0 and 1
        num_errors          failed samples, and errors/KIND by kind
        length_failed       mean length of their answers, beside length_kept of the others; missing without both
        num_failed_attempts attempts that failed, and failed_attempts/KIND by kind; missing if none failed
        num_redrawn         samples whose model answered anew after a failure, and redrawn/KIND; missing if none did

    Args:
        samples: at least one; `ks` or more of each item.
        ks: largest k.
        solved_at: score from which a sample is solved.
        confidence: level of the intervals; None for no intervals.

    Raises:
        DataError: there are no samples, or an item has fewer than `ks`.
    """
    with_error = partial(_with_error, confidence=confidence)
    items = _by_item(samples, ks)
    finished = [sample.score for sample in samples if sample.score is not None]
    wrong = min([0.0, *finished])
    metrics = with_error("accuracy", [counted_scores(own, wrong) for own in items.values()])
    if finished:
        metrics["accuracy_finished"] = fmean(finished)
        cut = [[float(sample.truncated) for sample in own if sample.score is not None] for own in items.values()]
        metrics |= with_error("truncated", [own for own in cut if own])
    num_solved = [(len(own), sum(is_solved(sample, solved_at) for sample in own)) for own in items.values()]
    for k in range(1, ks + 1):
        metrics |= with_error(f"pass@{k}", [[pass_at_k(n, solved, k)] for n, solved in num_solved])
    if any(sample.answer is not None for sample in samples):
        metrics |= with_error(f"majority@{ks}", [[majority(own[:ks], solved_at)] for own in items.values()])
    found = selection_of(samples)
    seldom = {name: float(value) for name, value in found.counts().items() if value}
    return metrics | error_counts(samples) | seldom | (found.lengths() if finished else {})


def selection_of(samples: Sequence[Sample]) -> Selection:
    """Return what failures have done to the answers of an evaluation."""
    failed_attempts = Counter(kind for sample in samples for kind in sample.failed_attempts)
    kept = Counter(sample.length for sample in samples if sample.score is not None)
    return Selection(
        num_groups=len(samples),
        num_attempts=failed_attempts.total() + kept.total(),
        failed_attempts=failed_attempts,
        redrawn=Counter(sample.redrawn for sample in samples if sample.redrawn),
        failed=Counter(sample.length for sample in samples if sample.score is None and sample.length),
        kept=kept,
    )


def standard_error_of(metric: str) -> str:
    """Return the name of the standard error of a metric of `summary`."""
    return "standard_error" if metric == "accuracy" else f"{metric}_standard_error"


def is_solved(sample: Sample, solved_at: float = SOLVED_AT) -> bool:
    """Return whether a sample is finished and its score reaches `solved_at`."""
    return sample.score is not None and reaches(sample.score, solved_at)


def counted_scores(samples: Iterable[Sample], wrong: float = 0.0) -> list[float]:
    """Return the scores of samples; a failed sample has the score `wrong`."""
    return [wrong if sample.score is None else sample.score for sample in samples]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return an unbiased estimate of the probability that one of k samples is solved.

    1 - C(n - c, k) / C(n, k), equation 1 of "Evaluating Large Language Models Trained on Code", arXiv 2107.03374.

    Args:
        n: samples of an item.
        c: solved samples among them.
        k: samples that are drawn, at most n.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(samples: Iterable[Sample], solved_at: float = SOLVED_AT) -> float:
    """Return whether the most frequent answer of an item is solved, as 0 or 1.

    Samples without an answer, and failed ones, do not vote; without votes the item is not solved. Between equally
    frequent answers a random choice is made, and its expectation is returned. The same holds if samples with the same
    answer are solved and not solved: the mean over these samples counts.

    Args:
        samples: samples of one item.
        solved_at: score from which a sample is solved.
    """
    votes: dict[str, list[bool]] = {}
    for sample in samples:
        if sample.answer is not None and sample.score is not None:
            votes.setdefault(sample.answer, []).append(is_solved(sample, solved_at))
    most = max(map(len, votes.values()), default=0)
    return fmean([fmean(own) for own in votes.values() if len(own) == most]) if votes else 0.0


def clustered_standard_error(clusters: Iterable[Sequence[float]]) -> float:
    """Return the standard error of the mean of all scores, if the scores of a cluster are correlated.

    sqrt(G / (G - 1) sum_g (sum_i (s_gi - mean))^2) / n, with n scores in G clusters: the cluster-robust error of a
    regression on a constant, with the correction for few clusters. See section 2.2 of "Adding Error Bars to Evals",
    arXiv 2411.00640. With one score in each cluster it is the usual s / sqrt(n).

    Args:
        clusters: scores of each cluster; at least two clusters.
    """
    groups = list(clusters)
    n, mean = sum(map(len, groups)), fmean([score for group in groups for score in group])
    squares = math.fsum(math.fsum(score - mean for score in group) ** 2 for group in groups)
    return math.sqrt(squares * len(groups) / (len(groups) - 1)) / n


def score_limits(mean: float, variance: float, n: float, z: float, size: float = 1.0) -> tuple[float, float]:
    """Return the score interval of a mean of values between 0 and `size`, which is also right if all values are 0.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22, 1927; his interval if
    all values are 0 or `size`.

    Args:
        mean: mean of the values.
        variance: their variance.
        n: number of independent values.
        z: quantile of the normal distribution.
        size: largest value.
    """
    share = z * z / n
    middle = (mean + share * size / 2) / (1 + share)
    half = z * math.sqrt(variance / n + share * size**2 / (4 * n)) / (1 + share)
    return middle - half, middle + half


def error_counts(samples: Iterable[Sample]) -> dict[str, float]:
    """Return the number of failed samples, and the number of each kind of reason."""
    kinds = Counter(kind_of(sample.reason) for sample in samples if sample.score is None)
    return {"num_errors": float(kinds.total()), **{f"errors/{kind}": float(count) for kind, count in kinds.items()}}


def _by_item(samples: Sequence[Sample], ks: int) -> Mapping[str, list[Sample]]:
    """Return the samples of each item, in the order of their numbers.

    Raises:
        DataError: there are no samples, or an item has fewer than `ks`.
    """
    if not samples:
        raise DataError("an evaluation without samples has no metrics; expected at least one")
    ordered = sorted(samples, key=lambda sample: (sample.item, sample.sample))
    items = {item: list(own) for item, own in groupby(ordered, key=lambda sample: sample.item)}
    item, fewest = min(items.items(), key=lambda entry: len(entry[1]))
    if len(fewest) < ks:
        found = counted(len(fewest), "sample")
        raise DataError(f"pass@{ks}: item {item} has {found}; expected at least {ks} of each item")
    return items


def _with_error(name: str, clusters: Sequence[Sequence[float]], confidence: float | None) -> dict[str, float]:
    """Return the mean of all values under a name, and with several clusters its standard error and interval.

    If all values are 0, or all are 1, the error is half of the score interval of one standard error.
    """
    values = [value for own in clusters for value in own]
    mean = fmean(values)
    if len(clusters) == 1:
        return {name: mean}
    error, n = clustered_standard_error(clusters), float(len(clusters))
    if mean in {0.0, 1.0} and len(set(values)) == 1:
        low, high = score_limits(mean, 0.0, n, 1.0)
        error = (high - low) / 2
    elif error:
        n *= mean * (1 - mean) / error**2 / (n - 1)
    metrics = {name: mean, standard_error_of(name): error}
    if confidence is not None and min(values) >= 0 and max(values) <= 1:
        low, high = score_limits(mean, mean * (1 - mean), n, NormalDist().inv_cdf((1 + confidence) / 2))
        metrics |= {f"{name}_low": max(low, 0.0), f"{name}_high": min(high, 1.0)}
    return metrics
