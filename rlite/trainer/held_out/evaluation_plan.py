"""Evaluations in words, for the plan of a run."""

from __future__ import annotations

from collections.abc import Collection

from rlite.evaluation.sets import EvaluationSet
from rlite.trainer.held_out.prompt_options import GeneratedOptions, HeldOutPromptOptions
from rlite.wording import counted


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
