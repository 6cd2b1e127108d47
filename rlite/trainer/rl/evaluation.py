"""Metrics of an evaluation. Every episode counts, also a failed one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rlite.observability.console import ConsoleReporter
from rlite.rollout.collector.collector import Collected
from rlite.rollout.collector.lost import in_a_line, kind_of
from rlite.rollout.trajectories import first_rows

NUM_NAMED = 3
"""reasons that the console lists"""


def evaluation_metrics(found: Collected) -> dict[str, float]:
    """Return `accuracy`, the mean score of all episodes, or their mean reward if the workflow gives no scores.

    A failed episode counts 0, or the lowest score of the evaluation if that is below 0. `accuracy_finished` is the mean
    without failed episodes, and missing if all have failed. `num_errors` and `errors/REASON` count failed episodes.
    """
    num_errors = found.lost.total()
    kinds: Counter[str] = Counter()
    for reason, count in found.lost.items():
        kinds[kind_of(reason)] += count
    counts = {"num_errors": num_errors, **{f"errors/{kind}": count for kind, count in kinds.items()}}
    if found.batch is None:
        return {"accuracy": 0.0, **counts}
    key = "scores" if "scores" in found.batch else "rewards"
    scores = found.batch[key][first_rows(found.batch)].double()
    finished, wrong = scores.mean().item(), min(0.0, scores.min().item())
    share = num_errors / found.num_groups
    return {"accuracy": finished * (1 - share) + wrong * share, "accuracy_finished": finished, **counts}


class ErrorLimit:
    """Finds evaluations that are invalid because too many episodes failed, and reports the first of them.

    Args:
        max_share: share of failed episodes above which an evaluation is invalid.
        num_episodes: episodes of an evaluation.
    """

    def __init__(self, max_share: float, num_episodes: int) -> None:
        self._max_share = max_share
        self._num_episodes = num_episodes
        self._has_reported = False

    def is_kept(
        self, evaluation: Mapping[str, float], reasons: Counter[str], step: int, console: ConsoleReporter
    ) -> bool:
        """Return whether an evaluation is valid, and report the first invalid one.

        Args:
            evaluation: its metrics.
            reasons: failed episodes by reason.
            step: finished steps.
            console: gets the report.
        """
        num_errors = evaluation.get("num_errors", 0)
        is_valid = num_errors <= self._max_share * self._num_episodes
        if not is_valid and not self._has_reported:
            self._has_reported = True
            console.report(
                f"ALARM at step {step}: the evaluation is invalid, {num_errors:g} of {self._num_episodes} episodes "
                f"failed (test_data.max_error_share={self._max_share:g}); such evaluations choose no best checkpoint",
                [(f"{count} x", in_a_line(reason)) for reason, count in reasons.most_common(NUM_NAMED)],
            )
        return is_valid
