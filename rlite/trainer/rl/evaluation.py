"""Metrics of an evaluation. Every episode counts, also a failed one."""

from __future__ import annotations

from collections import Counter

from rlite.batch import check_one_per_row
from rlite.rollout.collector.collector import Collected
from rlite.rollout.collector.lost import kind_of
from rlite.rollout.trajectories import first_rows


def evaluation_metrics(found: Collected) -> dict[str, float]:
    """Return `accuracy`, the mean score of all episodes, or their mean reward if the workflow gives no scores.

    A failed episode counts 0, or the lowest score of the evaluation if that is below 0. `accuracy_finished` is the mean
    without failed episodes, and missing if all have failed. `num_errors` and `errors/REASON` count failed episodes.

    Raises:
        DataError: `scores` or `rewards` is not [N].
    """
    num_errors = found.lost.total()
    kinds: Counter[str] = Counter()
    for reason, count in found.lost.items():
        kinds[kind_of(reason)] += count
    counts = {"num_errors": num_errors, **{f"errors/{kind}": count for kind, count in kinds.items()}}
    if found.batch is None:
        return {"accuracy": 0.0, **counts}
    key = "scores" if "scores" in found.batch else "rewards"
    check_one_per_row(found.batch, key)
    scores = found.batch[key][first_rows(found.batch)].double()
    finished, wrong = scores.mean().item(), min(0.0, scores.min().item())
    share = num_errors / found.num_groups
    return {"accuracy": finished * (1 - share) + wrong * share, "accuracy_finished": finished, **counts}
