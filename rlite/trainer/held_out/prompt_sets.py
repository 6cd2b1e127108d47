"""Sets of prompts that are evaluated by answers: their rewards, samples and metrics, in every trainer.

The schedule of evaluations: which sets are due after a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from rlite.errors import ConfigError
from rlite.evaluation.sets import EvaluationSet
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.trainer.held_out.options import GeneratedOptions, HeldOutPromptOptions, key_of, metric_of, metrics_of
from rlite.trainer.run.program_objects import REWARD, ProgramObjects
from rlite.trainer.run.training_run import ReportedMetrics, TrainingRun
from rlite.wording import counted

ACCURACIES = ("accuracy", "accuracy_finished")
"""metrics of every evaluation by answers"""


def reported_metrics(
    sets: Mapping[str, EvaluationSet], metrics: Sequence[str], of_steps: Sequence[str] = ()
) -> ReportedMetrics:
    """Return the metrics that a run shows: of evaluations the first, and at the end also the largest pass@k.

    Args:
        sets: the sets.
        metrics: metrics of every set, the most important first.
        of_steps: metrics of every step.
    """
    compared, evaluated = metrics_of(sets, metrics), metrics_of(sets, metrics)
    for name, each in sets.items():
        compared += [metric_of(name, f"{kind}@{each.k}") for kind in ("pass", "majority") if each.k > 1]
        evaluated += [metric_of(name, f"pass@{k}") for k in range(1, each.k + 1)]
        evaluated += [metric_of(name, metric) for metric in (f"majority@{each.k}", "truncated")]
    headlines = metrics_of(sets, metrics[:1])
    return ReportedMetrics(of_steps=of_steps, headlines=headlines, compared=compared, evaluated=evaluated)


def check_samples(chosen: EvaluationSet) -> None:
    """Check that several samples of a prompt can differ.

    Args:
        chosen: a set.

    Raises:
        ConfigError: the samples are all the same.
    """
    gconfig = chosen.workflow.gconfig
    if chosen.samples > 1 and gconfig is not None and (gconfig.greedy or gconfig.temperature == 0):
        key = key_of(chosen.name)
        raise ConfigError(
            f"{key}.samples={chosen.samples}: at temperature 0 all responses to a prompt are the same; set "
            f"{key}.sampling.temperature above 0"
        )


def own_rewards(options: GeneratedOptions, key: str, given: ProgramObjects) -> ChosenRewards:
    """Return the rewards that a set to evaluate on has of its own.

    Args:
        options: options of the set.
        key: the set's group of options.
        given: reward functions of a program, in place of those of the paths.
    """
    where = f"{key}.{REWARD}"
    return ChosenRewards(options.reward, given.functions(where), where)


def topic_of(name: str) -> str:
    """Return the topic of a set in the plan: "evaluation NAME", or "evaluation" for a set without a name."""
    return f"evaluation {name}".strip()


def answers_plan(chosen: EvaluationSet, own: GeneratedOptions, test_freq: int, rewards: Collection[str] = ()) -> str:
    """Return how many answers to a set are generated, how they are sampled and judged, and when.

    Args:
        chosen: the set.
        own: options of the set.
        test_freq: steps between two evaluations, if the set does not say.
        rewards: names of the run's rewards, for a set without a source of rewards.
    """
    sampling = chosen.workflow.gconfig
    parts = [counted(len(chosen.rows), "prompt") + (f" x {chosen.samples}" if chosen.samples > 1 else "")]
    if sampling is not None:
        temperature = 0.0 if sampling.greedy else sampling.temperature
        how = sampling_plan(temperature, sampling.top_p, sampling.top_k)
        parts[0] += f" {how}" if temperature else f", {how}"
        parts.append(f"at most {sampling.max_new_tokens} new tokens")
    if own.workflow:
        parts.append(f"workflow {own.workflow}")
    elif names := own.reward or rewards:
        parts.append(f"reward {' + '.join(names)}")
    parts += [f"pass@{chosen.k}"] if chosen.k > 1 else []
    is_first = isinstance(own, HeldOutPromptOptions) and own.first
    return ", ".join([*parts, f"{'before step 1 and ' if is_first else ''}{interval(own.every or test_freq)}"])


def losses_plan(num_items: int, every: int) -> str:
    """Return how many items have their loss measured, and when.

    Args:
        num_items: items of the set.
        every: steps between two evaluations.
    """
    return f"loss of {counted(num_items, 'item')}, {interval(every)}"


def interval(every: int) -> str:
    """Return a number of steps between two evaluations in words."""
    return "every step" if every == 1 else f"every {every} steps"


def sampling_plan(temperature: float, top_p: float, top_k: int) -> str:
    """Return how tokens are sampled, in words.

    Args:
        temperature: 0 is greedy.
        top_p: 1 is off.
        top_k: 0 and -1 are off.
    """
    if not temperature:
        return "greedy"
    cut = [f"top_p {top_p:g}"] if top_p < 1 else []
    cut += [f"top_k {top_k}"] if top_k > 0 else []
    return ", ".join([f"at temperature {temperature:g}", *cut])


class EvaluationSchedule:
    """Decides which sets are due: every so many steps and at the end of the run, once after each step.

    A run that resumes owes the evaluations that its checkpoint lacks. They are due at once.

    Args:
        run: counts the steps.
        intervals: steps between two evaluations, by the names of the sets.
        first: sets that are due before the first step, too.
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

    @property
    def has_owed(self) -> bool:
        """True if the checkpoint that the run resumed from lacks an evaluation that has not been made since."""
        return bool(self._owed)

    def mark(self, names: Iterable[str]) -> None:
        """Mark sets as evaluated, or their evaluation as begun, after this step."""
        for name in names:
            self._evaluated[name] = self._run.step
            self._owed.discard(name)

    def resume(self, owed: Iterable[str]) -> None:
        """Continue from a checkpoint.

        Args:
            owed: sets whose evaluation the checkpoint lacks. The others are evaluated.
        """
        self._owed = self.intervals.keys() & owed
        if self._run.step:
            self._evaluated = dict.fromkeys(self.intervals.keys() - self._owed, self._run.step)
