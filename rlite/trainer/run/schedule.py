"""The schedule of evaluations: which sets are due after a step, and how the plan of a run tells it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from rlite.trainer.run.training_run import TrainingRun


class EvaluationSchedule:
    """Decides which sets are due: every so many steps and at the end of the run, once after each step.

    A run that resumes owes the evaluations that its checkpoint lacks. They are due at once.

    `intervals`: steps between two evaluations, by the names of the sets. `first`: sets that are due before the first
    step, too.
    """

    def __init__(self, run: TrainingRun, intervals: Mapping[str, int], first: Collection[str] = ()) -> None:
        self.intervals = intervals
        self._run, self._first = run, first
        self._evaluated: dict[str, int] = {}
        """step of the last evaluation of each set"""
        self._owed: set[str] = set()

    def is_due(self, name: str) -> bool:
        """Return whether a set is due after this step, and not evaluated yet."""
        if self._evaluated.get(name) == self._run.step:
            return False
        if name in self._owed:
            return True
        return self._run.is_due(self.intervals[name]) if self._run.step else name in self._first

    def due(self) -> list[str]:
        """Return the names of the sets that are due after this step."""
        return list(filter(self.is_due, self.intervals))

    def mark(self, names: Iterable[str]) -> None:
        """Mark sets as evaluated, or their evaluation as begun, after this step."""
        for name in names:
            self._evaluated[name] = self._run.step
            self._owed.discard(name)

    def resume(self, owed: Iterable[str]) -> None:
        """Continue from a checkpoint.

        `owed`: sets whose evaluation the checkpoint lacks. The others are evaluated.
        """
        self._owed = self.intervals.keys() & owed
        if self._run.step:
            self._evaluated = dict.fromkeys(self.intervals.keys() - self._owed, self._run.step)


def topic_of(name: str) -> str:
    """Return the topic of a set in the plan: "evaluation NAME", or "evaluation" for a set without a name."""
    return f"evaluation {name}".strip()


def interval(every: int) -> str:
    """Return a number of steps between two evaluations in words."""
    return "every step" if every == 1 else f"every {every} steps"


def sampling_plan(temperature: float, top_p: float, top_k: int) -> str:
    """Return how tokens are sampled, in words.

    `temperature`: 0 is greedy. `top_p`: 1 is off. `top_k`: 0 and -1 are off.
    """
    if not temperature:
        return "greedy"
    cut = [f"top_p {top_p:g}"] if top_p < 1 else []
    cut += [f"top_k {top_k}"] if top_k > 0 else []
    return ", ".join([f"at temperature {temperature:g}", *cut])
