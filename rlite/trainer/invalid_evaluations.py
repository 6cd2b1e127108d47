"""Evaluations of which too many episodes have failed: they measure the grader, and not the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlite.evaluation.metrics import selection_of
from rlite.evaluation.sets import Evaluation
from rlite.rollout.collector.lost_groups import cause_of
from rlite.suggestions import UNNAMED
from rlite.trainer.held_out.options import GeneratedOptions, key_of, without_sets
from rlite.trainer.run.training_run import TrainingRun

NUM_REASONS = 3
"""reasons for failed episodes that the console lists"""


class InvalidEvaluations:
    """Finds invalid evaluations, and reports the first one of each set.

    Args:
        options: options of the sets by name; a set without options has the defaults.
        run: counts the steps, and has the console.
    """

    def __init__(self, options: Mapping[str, GeneratedOptions], run: TrainingRun) -> None:
        self._options, self._run = options, run
        self._told: set[tuple[str, str]] = set()
        """sets, and what has been reported of them"""

    def without(
        self, metrics: Mapping[str, float], evaluations: Sequence[Evaluation], first_losses: Mapping[str, str]
    ) -> Mapping[str, float]:
        """Return logged metrics without those of invalid evaluations.

        Args:
            metrics: metrics of these evaluations, and maybe of others.
            evaluations: evaluations of generated answers.
            first_losses: an example of each cause of lost groups.
        """
        invalid = [each.set.name for each in evaluations if not self.is_valid(each, first_losses)]
        return {} if UNNAMED in invalid else without_sets(invalid, metrics)

    def is_valid(self, evaluation: Evaluation, first_losses: Mapping[str, str]) -> bool:
        """Return whether few enough episodes of an evaluation failed, and report the first invalid one of each set.

        Args:
            evaluation: evaluation of a set.
            first_losses: an example of each cause of lost groups.
        """
        name, num_errors, num_episodes = evaluation.set.name, evaluation.lost.total(), evaluation.set.num_episodes
        for cause, facts in selection_of(evaluation.samples).alarms():
            self._alarm_once(name, cause, "evaluation", f": {cause}", facts)
        limit = self._options.get(name, GeneratedOptions()).max_error_share
        if num_errors <= limit * num_episodes:
            return True
        causes: Counter[str] = Counter()
        for reason, count in evaluation.lost.items():
            causes[cause_of(reason)] += count
        how = (
            f" is invalid, {num_errors} of {num_episodes} episodes failed ({key_of(name)}.max_error_share={limit:g}); "
            "such evaluations choose no best checkpoint"
        )
        rows = [(f"{count} x", first_losses.get(cause, cause)) for cause, count in causes.most_common(NUM_REASONS)]
        self._alarm_once(name, "invalid", "the evaluation", how, rows)
        return False

    def _alarm_once(self, name: str, cause: str, what: str, how: str, rows: Any) -> None:
        """Report a cause, once for each set."""
        if (name, cause) not in self._told:
            self._told.add((name, cause))
            of_set = f" of {name}" if name else ""
            self._run.console.alarm(f"ALARM at step {self._run.step}: {what}{of_set}{how}", rows)
