"""Sets of prompts to evaluate on: which sets a run has, how they are answered, and which of their metrics it shows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlite.errors import ConfigError, DataError
from rlite.help import UNNAMED, check_name
from rlite.rollout import RolloutWorkflow
from rlite.trainer.held_out import KEY, SOLVED_AT, GeneratedOptions, HeldOutPromptOptions, key_of, metric_of, metrics_of
from rlite.trainer.options import SamplingOptions, SetSamplingOptions
from rlite.trainer.run.observer import ReportedMetrics
from rlite.trainer.run.schedule import interval, sampling_plan
from rlite.wording import counted

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts to evaluate on, and the way in which they are answered and scored."""

    name: str
    """"" for the only set of a run"""
    rows: Rows
    """at least one"""
    workflow: RolloutWorkflow
    """makes an episode of a row, with its score"""
    samples: int = 1
    """episodes of each row"""
    k: int = 1
    """largest k of pass@k, at most `samples`"""
    solved_at: float = SOLVED_AT
    """score from which an episode counts as solved"""

    def __post_init__(self) -> None:
        if not len(self.rows):
            raise DataError(f"the evaluation set {self.name!r} has no rows; expected at least one")

    def plan(self, own: GeneratedOptions, test_freq: int, rewards: Collection[str] = ()) -> str:
        """Return how many answers are generated, how they are sampled and judged, and when."""
        sampling = self.workflow.gconfig
        parts = [counted(len(self.rows), "prompt") + (f" x {self.samples}" if self.samples > 1 else "")]
        if sampling is not None:
            temperature = 0.0 if sampling.greedy else sampling.temperature
            how = sampling_plan(temperature, sampling.top_p, sampling.top_k)
            parts[0] += f" {how}" if temperature else f", {how}"
            parts.append(f"at most {sampling.max_new_tokens} new tokens")
        if own.workflow:
            parts.append(f"workflow {own.workflow}")
        elif names := own.reward or rewards:
            parts.append(f"reward {' + '.join(names)}")
        parts += [f"pass@{self.k}"] if self.k > 1 else []
        is_first = isinstance(own, HeldOutPromptOptions) and own.first
        return ", ".join([*parts, f"{'before step 1 and ' if is_first else ''}{interval(own.every or test_freq)}"])


def make_set(name: str, rows: Rows, workflow: RolloutWorkflow, own: GeneratedOptions) -> EvaluationSet:
    """Return a set of `test_data`."""
    rows = rows if own.limit is None else rows[: own.limit]
    made = EvaluationSet(name, rows, workflow, own.samples, own.k or own.samples, own.solved_at)
    gconfig = workflow.gconfig
    if made.samples > 1 and gconfig is not None and (gconfig.greedy or gconfig.temperature == 0):
        key = key_of(name)
        why = f"at temperature 0 all responses to a prompt are the same; set {key}.sampling.temperature above 0"
        raise ConfigError(f"{key}.samples={made.samples}: {why}")
    return made


def make_sets(
    options: Mapping[str, HeldOutPromptOptions],
    sampling_of: Callable[[SetSamplingOptions], SamplingOptions],
    workflow: RolloutWorkflow,
    rows: Rows | Mapping[str, Rows],
    workflows: RolloutWorkflow | Mapping[str, RolloutWorkflow] | None,
) -> dict[str, EvaluationSet]:
    """Return the sets to evaluate on, by name.

    `options`: `test_data`; a set without options has the defaults. `workflow`: workflow of training. Its copy with the
    sampling for evaluation evaluates sets without a workflow.
    """
    by_name = rows if isinstance(rows, Mapping) else {UNNAMED: rows} if len(rows) else {}
    own = workflows if isinstance(workflows, Mapping) else dict.fromkeys(by_name, workflows)
    if unknown := own.keys() - by_name.keys():
        there = ", ".join(by_name) or "no set"
        raise ConfigError(f"test_workflow of {sorted(unknown)[0]!r}: there are rows of {there}")
    asked = {name for name, chosen in options.items() if name != UNNAMED or chosen.path is not None}
    if unknown := asked - by_name.keys():
        key, there = key_of(sorted(unknown)[0]), ", ".join(map(key_of, by_name)) or "no set"
        raise ConfigError(f"{key}: there are rows of {there}; expected some of {key}")
    found = {}
    for name, table in by_name.items():
        check_name(KEY, name)
        chosen, ours = options.get(name, HeldOutPromptOptions()), own.get(name)
        sampling = sampling_of(chosen.sampling) if ours is None else chosen.sampling
        evaluating = workflow if ours is None else ours
        found[name] = make_set(name, table, _sampled(evaluating, sampling, evaluating is workflow), chosen)
    return found


def _sampled(workflow: RolloutWorkflow, sampling: SetSamplingOptions, is_copied: bool) -> RolloutWorkflow:
    """Return the workflow with the sampling options that are set; a workflow without a `gconfig` stays as it is.

    That of training is copied in any case: its sampling may change.
    """
    if workflow.gconfig is None:
        return workflow
    wanted = sampling.gconfig(workflow.gconfig)
    return workflow.sampled_by(wanted) if is_copied or wanted != workflow.gconfig else workflow


def reported_metrics(
    sets: Mapping[str, EvaluationSet], metrics: Sequence[str], of_steps: Sequence[str] = ()
) -> ReportedMetrics:
    """Return the metrics that a run shows: of evaluations the first, and at the end also the largest pass@k."""
    compared, evaluated = metrics_of(sets, metrics), metrics_of(sets, metrics)
    for name, each in sets.items():
        compared += [metric_of(name, f"{kind}@{each.k}") for kind in ("pass", "majority") if each.k > 1]
        evaluated += [metric_of(name, f"pass@{k}") for k in range(1, each.k + 1)]
        evaluated += [metric_of(name, metric) for metric in (f"majority@{each.k}", "truncated")]
    headlines = metrics_of(sets, metrics[:1])
    return ReportedMetrics(of_steps=of_steps, headlines=headlines, compared=compared, evaluated=evaluated)
