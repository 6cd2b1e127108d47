"""Sets of prompts that are evaluated by answers: their rewards, samples and metrics, in every trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlite.errors import ConfigError
from rlite.evaluation.sets import EvaluationSet
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.trainer.held_out.options import key_of, metric_of, metrics_of
from rlite.trainer.held_out.prompt_options import GeneratedOptions
from rlite.trainer.run.program_objects import REWARD, ProgramObjects
from rlite.trainer.run.report import ReportedMetrics

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
