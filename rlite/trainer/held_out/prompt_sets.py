"""The sets that a reinforcement-learning run evaluates on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlite.errors import ConfigError
from rlite.evaluation.sets import EvaluationSet
from rlite.rollout import RolloutWorkflow
from rlite.trainer.held_out.options import UNNAMED, check_name, key_of, metric_of, metrics_of
from rlite.trainer.held_out.prompt_options import HeldOutPromptOptions
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.report import ReportedMetrics

ACCURACIES = ("accuracy", "accuracy_finished")
"""metrics of every evaluation by answers"""
Rows = Sequence[Mapping[str, Any]]


def make_sets(
    options: PpoConfig,
    workflow: RolloutWorkflow,
    rows: Rows | Mapping[str, Rows],
    workflows: RolloutWorkflow | Mapping[str, RolloutWorkflow] | None,
) -> dict[str, EvaluationSet]:
    """Return the sets to evaluate on, by name.

    Args:
        options: the run's config; a set without options in `test_data` has the defaults.
        workflow: of training. Its copy with the sampling for evaluation evaluates sets without a workflow.
        rows: rows of a single set, which may be none, or of several by name.
        workflows: workflow of all sets, or of some by name.

    Raises:
        ConfigError: a set samples several responses that are all the same, a workflow or options are of no set, or a
            name cannot be one.
    """
    by_name = rows if isinstance(rows, Mapping) else {UNNAMED: rows} if len(rows) else {}
    own = workflows if isinstance(workflows, Mapping) else dict.fromkeys(by_name, workflows)
    if unknown := own.keys() - by_name.keys():
        raise ConfigError(
            f"test_workflow of {sorted(unknown)[0]!r}: there are rows of {', '.join(by_name) or 'no set'}"
        )
    asked = {name for name, chosen in options.test_data.items() if name != UNNAMED or chosen.path is not None}
    if unknown := asked - by_name.keys():
        key = key_of(sorted(unknown)[0])
        raise ConfigError(
            f"{key}: there are rows of {', '.join(map(key_of, by_name)) or 'no set'}; expected some of {key}"
        )
    found = {}
    for name, table in by_name.items():
        check_name(name)
        chosen, ours = options.test_data.get(name, HeldOutPromptOptions()), own.get(name)
        found[name] = EvaluationSet(
            name=name,
            rows=table if chosen.limit is None else table[: chosen.limit],
            workflow=_for_evaluation(workflow, options, chosen) if ours is None else _own(ours, chosen),
            samples=chosen.samples,
            k=chosen.largest_k,
            solved_at=chosen.solved_at,
        )
        check_samples(found[name])
    return found


def reported_metrics(
    sets: Mapping[str, EvaluationSet], metrics: Sequence[str], of_steps: Sequence[str] = ()
) -> ReportedMetrics:
    """Return the metrics that a run shows: of evaluations the first, and at the end also the largest pass@k.

    Args:
        sets: the sets.
        metrics: metrics of every set, the most important first.
        of_steps: metrics of every step.
    """
    compared = metrics_of(sets, metrics)
    for name, each in sets.items():
        compared += [metric_of(name, f"{kind}@{each.k}") for kind in ("pass", "majority") if each.k > 1]
    return ReportedMetrics(
        of_steps=of_steps,
        headlines=metrics_of(sets, metrics[:1]),
        compared=compared,
        evaluated=logged_metrics(sets, metrics),
    )


def logged_metrics(sets: Mapping[str, EvaluationSet], metrics: Sequence[str]) -> list[str]:
    """Return the names under which metrics of evaluations are logged, from which the best model may be chosen.

    Args:
        sets: the sets.
        metrics: metrics of every set.
    """
    found = metrics_of(sets, metrics)
    for name, each in sets.items():
        found += [metric_of(name, f"pass@{k}") for k in range(1, each.k + 1)]
        found += [metric_of(name, metric) for metric in (f"majority@{each.k}", "truncated")]
    return found


def _for_evaluation(workflow: RolloutWorkflow, options: PpoConfig, chosen: HeldOutPromptOptions) -> RolloutWorkflow:
    """Return the workflow with the sampling of a set; a workflow without a `gconfig` stays as it is."""
    if workflow.gconfig is None:
        return workflow
    return workflow.sampled_by(options.rollout.sampling_of(chosen.sampling).gconfig(workflow.gconfig))


def _own(workflow: RolloutWorkflow, chosen: HeldOutPromptOptions) -> RolloutWorkflow:
    """Return a set's own workflow, with the sampling options that the set has set."""
    given = {name: value for name, value in chosen.sampling if value is not None}
    if workflow.gconfig is None or not given:
        return workflow
    greedy = given["temperature"] == 0 if "temperature" in given else workflow.gconfig.greedy
    return workflow.sampled_by(workflow.gconfig.new(**given, greedy=greedy))


def check_samples(chosen: EvaluationSet) -> None:
    """Check that several samples of a prompt can differ.

    Args:
        chosen: a set.

    Raises:
        ConfigError: they cannot.
    """
    gconfig = chosen.workflow.gconfig
    if chosen.samples > 1 and gconfig is not None and (gconfig.greedy or gconfig.temperature == 0):
        key = key_of(chosen.name)
        raise ConfigError(
            f"{key}.samples={chosen.samples}: at temperature 0 all responses to a prompt are the same; set "
            f"{key}.sampling.temperature above 0"
        )
