"""Tasks of lm-evaluation-harness: metrics, also of several samples of their answers, and rows of the record."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlite.evaluation.metrics import Sample, summary
from rlite.evaluation.record import Row, sample_of
from rlite.evaluation.statistics import clustered_standard_error

Lines = Sequence[Mapping[str, Any]]
"""lines of a journal: a task that has ended, or one sample of its answers"""


def task_metrics(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the metrics of tasks: TASK/METRIC and TASK/METRIC_stderr, with the harness's filter if it has a name.

    A metric that is not finite, such as the standard error of a single question, is left out.

    Args:
        results: the harness's `results`, by task.
    """
    for task, own in results.items():
        for key, value in own.items():
            metric, _, name = key.partition(",")
            if name and _is_finite(value):
                end = "_stderr" if metric.endswith("_stderr") else ""
                yield f"{_name(task, metric.removesuffix('_stderr'), name)}{end}", float(value)


def directions(
    results: Mapping[str, Mapping[str, Any]], higher_is_better: Mapping[str, Mapping[str, bool | None]]
) -> Iterator[tuple[str, bool]]:
    """Yield whether a higher value is better, for each metric of `task_metrics` of which the task says it.

    Args:
        results: the harness's `results`, by task.
        higher_is_better: the harness's `higher_is_better`, by task and metric.
    """
    for task, own in results.items():
        for key in own:
            metric, _, name = key.partition(",")
            is_higher = higher_is_better.get(task, {}).get(metric)
            if name and is_higher is not None:
                yield _name(task, metric, name), is_higher


def lower_is_better(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], higher_is_better: Mapping[str, Mapping[str, bool | None]]
) -> list[str]:
    """Return the tasks whose score, the first metric, is better the lower it is.

    Args:
        samples: the harness's `samples`, by task.
        higher_is_better: the harness's `higher_is_better`, by task and metric.
    """
    scored = {task: own[0]["metrics"][0] for task, own in samples.items() if own and own[0]["metrics"]}
    return [task for task, metric in scored.items() if higher_is_better.get(task, {}).get(metric) is False]


def task_values(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[float]]:
    """Return the values of each metric, one for each question in order, by the names of `task_metrics`.

    A metric with a value that is no finite number is left out.

    Args:
        samples: the harness's `samples`, by task.
    """
    found: dict[str, list[Any]] = {}
    for task, own in samples.items():
        for question in own:
            for metric in question["metrics"]:
                found.setdefault(_name(task, metric, question["filter"]), []).append(question[metric])
    return {name: [float(value) for value in values] for name, values in found.items() if all(map(_is_finite, values))}


def summary_of_tasks(lines: Lines, k: int | None = None) -> dict[str, float]:
    """Return the metrics of all tasks. Of several samples: their means, with errors clustered by question, and pass@k.

    Args:
        lines: all lines of a journal.
        k: largest k of pass@k; None: the number of samples.
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
    return clustered_standard_error(list(zip(*values, strict=True))) if all(is_mean) else None


def _passes(runs: Lines, k: int | None) -> Iterator[tuple[str, float]]:
    """Yield TASK/pass@k, with its standard error, of the tasks whose scores are all 0 or 1, and better if higher."""
    tasks: dict[str, list[Sample]] = {}
    for sample in (sample_of(row) for run in runs for row in run["rows"]):
        tasks.setdefault(task_of(sample), []).append(sample)
    for task in lowest_tasks(runs):
        tasks.pop(task, None)
    for task, own in tasks.items():
        num_samples = min(Counter(sample.item for sample in own).values())  # fewer where a score was no number
        if num_samples > 1 and all(sample.score in (0.0, 1.0, None) for sample in own):
            metrics = summary(own, min(num_samples, k or num_samples))
            yield from ((f"{task}/{name}", value) for name, value in metrics.items() if name.startswith("pass@"))


def task_of(sample: Sample) -> str:
    """Return the task of a sample."""
    return sample.item.rpartition("/")[0]


def lowest_tasks(lines: Lines) -> set[str]:
    """Return the tasks whose score is better the lower it is.

    Args:
        lines: lines of a journal.
    """
    return {task for line in lines for task in line.get("lower_is_better", ())}


def _name(task: str, metric: str, filter_name: str) -> str:
    return f"{task}/{metric}" + ("" if filter_name == "none" else f",{filter_name}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def task_rows(samples: Mapping[str, Sequence[Mapping[str, Any]]], sample: int = 0) -> Iterator[Row]:
    """Yield a row of the record for each question whose first metric is a number, of the first filter of its task.

    A number that is not finite is no score: the sample has failed.

    Args:
        samples: the harness's `samples`, by task.
        sample: number of the sample.
    """
    for task, own in samples.items():
        for question in own:
            metric = question["metrics"][0] if question["metrics"] else ""
            score = question.get(metric)
            if question["filter"] == own[0]["filter"] and isinstance(score, int | float):
                is_finite = math.isfinite(score)
                yield {
                    "step": 0,
                    "group": question["doc_id"],
                    "sample": sample,
                    "item": f"{task}/{question['doc_id']}",
                    "status": "evaluated" if is_finite else "failed",
                    "reason": "" if is_finite else f"{metric} is {score}",
                    "score": float(score) if is_finite else None,
                    "segments": list(_segments(question)),
                    "ended": time.time(),
                }


def _segments(question: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the prompt, and the answer: a text, or the likeliest of the choices."""
    arguments, answers = question["arguments"], [answer[0] for answer in question["resps"]]
    yield {"role": "prompt", "text": str(arguments[0][0])}
    if isinstance(answers[0], str):
        yield {"role": "model", "text": answers[0]}
    elif len(arguments[0]) > 1:
        likeliest = max(range(len(answers)), key=lambda number: answers[number][0])
        yield {"role": "model", "text": str(arguments[likeliest][1])}
