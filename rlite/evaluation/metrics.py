"""Metrics of an evaluation, and the difference between two models that answered the same items.

Every episode counts, also a failed one. Tasks of lm-evaluation-harness keep the harness's metrics.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from rlite.errors import DataError
from rlite.evaluation import statistics
from rlite.rollout.collector.lost_groups import Selection, kind_of
from rlite.services.record.recorder import SEPARATOR
from rlite.trainer.held_out import SOLVED_AT, reaches
from rlite.wording import counted


@dataclass(frozen=True)
class Sample:
    """One answer of the model to one item, with its score."""

    item: str
    """name of the data item, which no other item has"""
    sample: int
    """number among the samples of the item, from 0"""
    score: float | None
    """None: the episode failed"""
    reason: str = ""
    """why the episode failed"""
    truncated: bool = False
    """a limit cut the model off"""
    answer: str | None = None
    """answer that the reward has named; None if it names none"""
    length: int = 0
    """tokens that the model wrote, in the last attempt"""
    failed_attempts: tuple[str, ...] = ()
    """kinds of the errors of the attempts that failed"""
    redrawn: str = ""
    """kind of the failure after which the model answered anew; empty if it did not"""

    def __post_init__(self) -> None:
        if self.score is not None and not math.isfinite(self.score):
            expected = "expected a finite number, or None with a reason"
            raise DataError(f"item {self.item}, sample {self.sample}: its score is {self.score}; {expected}")

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Sample:
        """Return the sample of a row of the record, as `rlite.evaluation.record.row_of` makes it."""
        return cls(
            item=row["item"],
            sample=row["sample"],
            score=row.get("reward") if row.get("score") is None else row["score"],
            reason=row["reason"],
            truncated=bool(row.get("truncated")),
            answer=row.get("answer"),
            length=row.get("response_tokens") or 0,
            failed_attempts=tuple(filter(None, (row.get("failed_attempts") or "").split(SEPARATOR))),
            redrawn=row.get("redrawn") or "",
        )


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

    `samples`: at least one; `ks` or more of each item. `confidence`: level of the intervals; None for no intervals.
    """
    with_error = partial(_with_error, confidence=confidence)
    items = _by_item(samples, ks)
    finished = finished_scores(samples)
    wrong = statistics.wrong_score(finished)
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
    found, kinds = selection_of(samples), Counter(kind_of(sample.reason) for sample in samples if sample.score is None)
    counts = {"num_errors": kinds.total()} | {f"errors/{kind}": count for kind, count in kinds.items()}
    counts |= {name: value for name, value in found.counts().items() if value}
    return metrics | {name: float(value) for name, value in counts.items()} | (found.lengths() if finished else {})


def selection_of(samples: Sequence[Sample]) -> Selection:
    """Return what failures have done to the answers of an evaluation."""
    attempts = Counter(kind for sample in samples for kind in sample.failed_attempts)
    redrawn = Counter(sample.redrawn for sample in samples if sample.redrawn)
    failed = Counter(sample.length for sample in samples if sample.score is None and sample.length)
    kept = Counter(sample.length for sample in samples if sample.score is not None)
    return Selection(len(samples), attempts.total() + kept.total(), attempts, redrawn, failed, kept)


def standard_error_of(metric: str) -> str:
    """Return the name of the standard error of a metric of `summary`."""
    return "standard_error" if metric == "accuracy" else f"{metric}_standard_error"


def is_solved(sample: Sample, solved_at: float = SOLVED_AT) -> bool:
    """Return whether a sample is finished and its score reaches `solved_at`."""
    return sample.score is not None and reaches(sample.score, solved_at)


def finished_scores(samples: Iterable[Sample]) -> list[float]:
    """Return the scores of the samples that have not failed."""
    return [sample.score for sample in samples if sample.score is not None]


def counted_scores(samples: Iterable[Sample], wrong: float = 0.0) -> list[float]:
    """Return the scores of samples; a failed sample has the score `wrong`."""
    return [wrong if sample.score is None else sample.score for sample in samples]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return an unbiased estimate of the probability that one of k samples is solved.

    1 - C(n - c, k) / C(n, k), equation 1 of "Evaluating Large Language Models Trained on Code", arXiv 2107.03374.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(samples: Iterable[Sample], solved_at: float = SOLVED_AT) -> float:
    """Return whether the most frequent answer of an item is solved, as 0 or 1.

    Samples without an answer, and failed ones, do not vote; without votes the item is not solved. Between equally
    frequent answers a random choice is made, and its expectation is returned. The same holds if samples with the same
    answer are solved and not solved: the mean over these samples counts.
    """
    votes = defaultdict[str, list[bool]](list)
    for sample in samples:
        if sample.answer is not None and sample.score is not None:
            votes[sample.answer].append(is_solved(sample, solved_at))
    most = max(map(len, votes.values()), default=0)
    return fmean([fmean(own) for own in votes.values() if len(own) == most]) if votes else 0.0


def _by_item(samples: Sequence[Sample], ks: int) -> Mapping[str, list[Sample]]:
    """Return the samples of each item, in the order of their numbers."""
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
    error, n = statistics.clustered_standard_error(clusters), float(len(clusters))
    if mean in {0.0, 1.0} and len(set(values)) == 1:
        low, high = statistics.score_limits(mean, 0.0, n, 1.0)
        error = (high - low) / 2
    elif error:
        n *= mean * (1 - mean) / error**2 / (n - 1)
    metrics = {name: mean, standard_error_of(name): error}
    if confidence is not None and min(values) >= 0 and max(values) <= 1:
        low, high = statistics.score_limits(mean, mean * (1 - mean), n, NormalDist().inv_cdf((1 + confidence) / 2))
        metrics |= {f"{name}_low": max(low, 0.0), f"{name}_high": min(high, 1.0)}
    return metrics


NEAREST = math.ulp(0.0)
"""end of an interval that begins beside 0"""
NUM_NAMED = 5
"""items that a message names"""


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

    `confidence`: level of the interval, between 0 and 1.
    """
    differences = paired_differences(first, second, lower_is_better)
    gains = -differences if lower_is_better else differences
    p_value = statistics.sign_flip_p_value(differences, seed)
    low, high = None, None
    if len(differences) > 1:
        scores = [0.0, *finished_scores([*first, *second])]
        low, high = statistics.difference_interval(differences, confidence, (max(scores) - min(scores)) or 1.0)
        low, high = _agreeing(low, high, differences.mean(), p_value < 1 - confidence)
    mean, better, worse = float(differences.mean()), int((gains > 0).sum()), int((gains < 0).sum())
    return Comparison(mean, low, high, confidence, p_value, len(differences), better, worse, lower_is_better)


def _agreeing(low: float, high: float, difference: float, is_significant: bool) -> tuple[float, float]:
    """Return the interval with 0 inside if the test does not reject equal models, else with 0 outside.

    The exact test decides, because the interval is approximate.
    """
    if not is_significant:
        return min(low, 0.0), max(high, 0.0)
    return (max(low, NEAREST), high) if difference > 0 else (low, min(high, -NEAREST))


def paired_differences(
    first: Sequence[Sample], second: Sequence[Sample], lower_is_better: bool = False
) -> statistics.Floats:
    """Return the second model's mean score less the first's, for each item, in the order of the items' ids."""
    wrong = statistics.wrong_score(finished_scores([*first, *second]), lower_is_better)
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
    scores = defaultdict[str, list[float]](list)
    for sample in samples:
        scores[sample.item] += counted_scores([sample], wrong)
    return {item: fmean(own) for item, own in scores.items()}


def _names(items: Sequence[str]) -> str:
    more = f" and {len(items) - NUM_NAMED} more" if len(items) > NUM_NAMED else ""
    return f"{', '.join(items[:NUM_NAMED])}{more}"


Lines = Sequence[Mapping[str, Any]]
"""lines of a journal: a task that has ended, or one sample of its answers"""


def task_metrics(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the metrics of tasks: TASK/METRIC and TASK/METRIC_stderr, with the harness's filter if it has a name.

    A metric that is not finite, such as the standard error of a single question, is left out.
    """
    for task, metric, name, value in _filtered(results):
        if _is_finite(value):
            end = "_stderr" if metric.endswith("_stderr") else ""
            yield f"{_name(task, metric.removesuffix('_stderr'), name)}{end}", float(value)


def directions(
    results: Mapping[str, Mapping[str, Any]], higher_is_better: Mapping[str, Mapping[str, bool | None]]
) -> Iterator[tuple[str, bool]]:
    """Yield whether a higher value is better, for each metric of `task_metrics` of which the task says it."""
    for task, metric, name, _ in _filtered(results):
        if (is_higher := higher_is_better.get(task, {}).get(metric)) is not None:
            yield _name(task, metric, name), is_higher


def lower_is_better(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], higher_is_better: Mapping[str, Mapping[str, bool | None]]
) -> list[str]:
    """Return the tasks whose score, the first metric, is better the lower it is."""
    scored = {task: own[0]["metrics"][0] for task, own in samples.items() if own and own[0]["metrics"]}
    return [task for task, metric in scored.items() if higher_is_better.get(task, {}).get(metric) is False]


def task_values(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[float]]:
    """Return the values of each metric, one for each question in order, by the names of `task_metrics`.

    A metric with a value that is no finite number is left out.
    """
    found = defaultdict[str, list[Any]](list)
    for task, question in ((task, question) for task, own in samples.items() for question in own):
        for metric in question["metrics"]:
            found[_name(task, metric, question["filter"])].append(question[metric])
    return {name: [float(value) for value in values] for name, values in found.items() if all(map(_is_finite, values))}


def summary_of_tasks(lines: Lines, k: int | None = None) -> dict[str, float]:
    """Return the metrics of all tasks. Of several samples: their means, with errors clustered by question, and pass@k.

    `k`: largest k of pass@k; None: the number of samples.
    """
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(line["task"] for line in lines):
        runs = [line for line in lines if line["task"] == name]
        metrics |= runs[0]["metrics"] if len(runs) == 1 else {**_means(runs), **dict(_passes(runs, k))}
    return metrics


def _means(runs: Lines) -> dict[str, float]:
    """Return the mean of each metric over the samples.

    A metric that is the mean of its values over the questions has a standard error. Of others, such as BLEU, the error
    of a mean over samples is unknown.
    """
    metrics: dict[str, float] = {}
    for name in runs[0]["metrics"]:
        found = [run["metrics"].get(name) for run in runs]
        if name.endswith("_stderr") or None in found:
            continue
        metrics[name] = math.fsum(found) / len(found)
        if (error := _error(name, runs)) is not None:
            metrics[f"{name}_stderr"] = error
    return metrics


def _error(name: str, runs: Lines) -> float | None:
    if len({run["metrics"][name] for run in runs}) == 1 and not any(name in run["values"] for run in runs):
        return runs[0]["metrics"].get(f"{name}_stderr")  # log-likelihoods of a group of tasks: the same in all samples
    values = [run["values"].get(name, ()) for run in runs]
    is_mean = [
        len(own) > 1 and math.isclose(math.fsum(own) / len(own), run["metrics"][name], rel_tol=1e-9, abs_tol=1e-12)
        for own, run in zip(values, runs, strict=True)
    ]
    return statistics.clustered_standard_error(list(zip(*values, strict=True))) if all(is_mean) else None


def _passes(runs: Lines, k: int | None) -> Iterator[tuple[str, float]]:
    """Yield TASK/pass@k, with its standard error, of the tasks whose scores are all 0 or 1, and better if higher."""
    tasks, lowest = defaultdict[str, list[Sample]](list), lowest_tasks(runs)
    for sample in (Sample.of_row(row) for run in runs for row in run["rows"]):
        if task_of(sample) not in lowest:
            tasks[task_of(sample)].append(sample)
    for task, own in tasks.items():
        num_samples = min(Counter(sample.item for sample in own).values())  # fewer where a score was no number
        if num_samples > 1 and all(sample.score in (0.0, 1.0, None) for sample in own):
            metrics = summary(own, min(num_samples, k or num_samples))
            yield from ((f"{task}/{name}", value) for name, value in metrics.items() if name.startswith("pass@"))


def task_of(sample: Sample) -> str:
    """Return the task of a sample."""
    return sample.item.rpartition("/")[0]


def lowest_tasks(lines: Lines) -> set[str]:
    """Return the tasks whose score is better the lower it is."""
    return {task for line in lines for task in line.get("lower_is_better", ())}


def _filtered(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str, Any]]:
    """Yield task, metric, filter and value of each entry that has a filter."""
    for task, own in results.items():
        for key, value in own.items():
            metric, _, name = key.partition(",")
            if name:
                yield task, metric, name, value


def _name(task: str, metric: str, filter_name: str) -> str:
    return f"{task}/{metric}" + ("" if filter_name == "none" else f",{filter_name}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
