"""Options of sets of prompts to evaluate on. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from rlite.config import Count, Finite, Share
from rlite.evaluation.samples import SOLVED_AT
from rlite.rollout.environments.options import WorkflowName
from rlite.rollout.rewards.options import Rewards
from rlite.trainer.held_out.options import HeldOutOptions
from rlite.trainer.sampling_options import SetSamplingOptions


class GeneratedOptions(HeldOutOptions):
    """Rows to evaluate on, by answers that the model generates if there is a reward or a workflow."""

    samples: Count = 1
    """responses to each prompt; more than one need a temperature above 0"""
    k: Count | None = None
    """largest k of the metrics pass@k; default: samples"""
    solved_at: Finite = SOLVED_AT
    """score from which a response counts as solved, for pass@k and majority@k"""
    max_error_share: Share = 0.1
    """share of episodes that may fail in an evaluation; with more it is invalid, and chooses no best model"""
    sampling: SetSamplingOptions = SetSamplingOptions()
    """sampling of the set"""
    reward: Rewards = {}
    """rewards of the set, as reward.* of the run; default: the source of rewards of the run"""
    workflow: WorkflowName | None = None
    """name of a registered workflow for the set; default: the source of rewards of the run"""

    @property
    def of_answers(self) -> list[str]:
        """Names of the options of generated answers that are not at their defaults."""
        default = dict(GeneratedOptions())
        names = ("samples", "k", "solved_at", "max_error_share", "sampling")
        return [name for name in names if getattr(self, name) != default[name]]

    @property
    def is_generated(self) -> bool:
        """True if the set has a source of rewards of its own."""
        return bool(self.reward) or self.workflow is not None

    @property
    def largest_k(self) -> int:
        """Largest k of pass@k."""
        return self.samples if self.k is None else self.k

    def problems(self) -> Iterator[str]:
        """Yield a message for each rule of samples and of sources of rewards that does not hold."""
        yield from problems_of_k(self.k, self.samples)
        if self.workflow is not None and self.reward:
            yield "workflow: reward and workflow are given; expected one source of rewards"


def problems_of_k(k: int | None, samples: int) -> Iterator[str]:
    """Yield a message if there are too few samples of each prompt for pass@k.

    Args:
        k: largest k; None is `samples`.
        samples: samples of each prompt.
    """
    if k is not None and k > samples:
        yield f"k={k}: pass@{k} needs {k} samples of each prompt, and samples={samples}; raise samples, or lower k"


class HeldOutPromptOptions(GeneratedOptions):
    """Prompts to evaluate on."""

    first: bool = True
    """evaluate before the first step, too"""
