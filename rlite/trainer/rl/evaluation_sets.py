"""The sets that a reinforcement-learning run evaluates on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlite.errors import ConfigError
from rlite.evaluation.sets import EvaluationSet
from rlite.group_names import UNNAMED, check_name
from rlite.rollout import RolloutWorkflow
from rlite.trainer.held_out.options import KEY, key_of
from rlite.trainer.held_out.prompt_options import HeldOutPromptOptions
from rlite.trainer.held_out.prompt_sets import check_samples
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.sampling_options import SetSamplingOptions

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
        workflow: workflow of training. Its copy with the sampling for evaluation evaluates sets without a workflow.
        rows: rows of a single set, which may be none, or of several by name.
        workflows: workflow of all sets, or of some by name.

    Raises:
        ConfigError: a set samples several responses that are all the same, a workflow or options are of no set, or a
            name is not valid.
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
        check_name(KEY, name)
        chosen, ours = options.test_data.get(name, HeldOutPromptOptions()), own.get(name)
        sampling = options.rollout.sampling_of(chosen.sampling) if ours is None else chosen.sampling
        found[name] = EvaluationSet(
            name=name,
            rows=table if chosen.limit is None else table[: chosen.limit],
            workflow=_sampled(workflow if ours is None else ours, sampling),
            samples=chosen.samples,
            k=chosen.largest_k,
            solved_at=chosen.solved_at,
        )
        check_samples(found[name])
    return found


def _sampled(workflow: RolloutWorkflow, sampling: SetSamplingOptions) -> RolloutWorkflow:
    """Return the workflow with the sampling options that are set; a workflow without a `gconfig` stays as it is."""
    if workflow.gconfig is None or (wanted := sampling.gconfig(workflow.gconfig)) == workflow.gconfig:
        return workflow
    return workflow.sampled_by(wanted)
