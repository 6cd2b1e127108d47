"""Options of sets of prompts to evaluate on. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pydantic import Field, field_validator

from rlite.config import Count, Options, Share
from rlite.evaluation.samples import SOLVED_AT
from rlite.rollout.registry import WORKFLOWS
from rlite.rollout.rewards.options import RewardOptions, named_by_function, single_or_named, with_names
from rlite.trainer.held_out import HeldOutOptions


class SetSamplingOptions(Options):
    """The sampling of responses in a set; options that are not set are those of rollout.test_sampling_params."""

    temperature: float | None = None
    """0 is greedy"""
    max_new_tokens: int | None = None
    """longest response, in each turn"""
    top_p: float | None = None
    """1 is off"""
    top_k: int | None = None
    """0 is off"""
    stop: list[str] | None = None
    """texts that end a response"""


class GeneratedOptions(HeldOutOptions):
    """Rows to evaluate on, by answers that the model generates if there is a reward or a workflow."""

    samples: Count = 1
    """responses to each prompt; more than one need a temperature above 0"""
    k: Count | None = None
    """largest k of the metrics pass@k; default: samples"""
    solved_at: float = SOLVED_AT
    """score from which a response counts as solved, for pass@k and majority@k"""
    max_error_share: Share = 0.1
    """share of episodes that may fail in an evaluation; with more it is invalid, and chooses no best model"""
    sampling: SetSamplingOptions = SetSamplingOptions()
    """sampling of the set"""
    reward: dict[str, RewardOptions] = Field(default={}, json_schema_extra=single_or_named)
    """rewards of the set, as reward.* of the run; default: the source of rewards of the run"""
    workflow: str | None = None
    """name of a registered workflow for the set; default: the source of rewards of the run"""

    @field_validator("reward", mode="wrap")
    @classmethod
    def _name_rewards(cls, value: Any, validate: Callable[[Any], Any]) -> dict[str, RewardOptions]:
        return named_by_function(validate(with_names(value)))

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
        if self.largest_k > self.samples:
            yield (
                f"k={self.k}: pass@{self.k} needs {self.k} samples of each prompt, and samples={self.samples}; raise "
                "samples, or lower k"
            )
        if self.workflow is not None and self.workflow not in WORKFLOWS:
            yield f"workflow: {WORKFLOWS.unknown(self.workflow)}"
        if self.workflow is not None and self.reward:
            yield "workflow: reward and workflow are given; expected one source of rewards"


class HeldOutPromptOptions(GeneratedOptions):
    """Prompts to evaluate on."""

    first: bool = True
    """evaluate before the first step, too"""
