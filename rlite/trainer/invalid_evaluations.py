"""Evaluations of which too many episodes have failed: they measure the grader, and not the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rlite.evaluation.metrics import selection_of
from rlite.evaluation.sets import Evaluation
from rlite.rollout.collector.lost_groups import cause_of
from rlite.trainer.held_out.options import UNNAMED, key_of, without_sets
from rlite.trainer.held_out.prompt_options import GeneratedOptions
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
        self._told: set[str] = set()

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
        self._report_selection(evaluation)
        name, num_errors, num_episodes = evaluation.set.name, evaluation.lost.total(), evaluation.set.num_episodes
        limit = self._options.get(name, GeneratedOptions()).max_error_share
        if num_errors <= limit * num_episodes:
            return True
        if name not in self._told:
            self._told.add(name)
            causes: Counter[str] = Counter()
            for reason, count in evaluation.lost.items():
                causes[cause_of(reason)] += count
            self._run.console.alarm(
                f"ALARM at step {self._run.step}: the evaluation{f' of {name}' if name else ''} is invalid, "
                f"{num_errors} of {num_episodes} episodes failed ({key_of(name)}.max_error_share={limit:g}); such "
                "evaluations choose no best checkpoint",
                [(f"{count} x", first_losses.get(cause, cause)) for cause, count in causes.most_common(NUM_REASONS)],
            )
        return False

    def _report_selection(self, evaluation: Evaluation) -> None:
        """Report failures that choose among answers, each cause once for each set."""
        name = evaluation.set.name
        for cause, facts in selection_of(evaluation.samples).alarms():
            if f"{name}/{cause}" not in self._told:
                self._told.add(f"{name}/{cause}")
                of_set = f" of {name}" if name else ""
                self._run.console.alarm(f"ALARM at step {self._run.step}: evaluation{of_set}: {cause}", facts)
