"""Options of the sampling of responses, in training, in evaluations and on the command line. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from annotated_types import Ge, Le

from rlite import config
from rlite.config import Count, Options
from rlite.types import LARGEST, SMALLEST, GenerationHyperparameters

SamplingOf = GenerationHyperparameters | Mapping[str, Any]
Temperature = Annotated[float, Ge(0), Le(LARGEST)]
TopP = Annotated[float, Ge(SMALLEST), Le(1)]
TopK = Annotated[int, Ge(-1)]


class SetSamplingOptions(Options):
    """The sampling of responses in a set; options that are not set are those of rollout.test_sampling_params."""

    temperature: Temperature | None = None
    """0 is greedy"""
    max_new_tokens: Count | None = None
    """longest response, in each turn"""
    top_p: TopP | None = None
    """1 is off"""
    top_k: TopK | None = None
    """0 is off"""
    stop: list[str] | None = None
    """texts that end a response; they may be special tokens, such as <|im_end|>"""
    stop_token_ids: list[Annotated[int, Ge(0)]] | None = None
    """tokens that end a response, beside the model's own end tokens"""

    def gconfig(self, base: SamplingOf | None = None, **changes: Any) -> GenerationHyperparameters:
        """Return these options as a request takes them, with changes; parameters that they lack are those of `base`."""
        given = {name: getattr(self, name) for name in SetSamplingOptions.model_fields} | changes
        given = {name: value for name, value in given.items() if value is not None}
        if "temperature" in given:
            given["greedy"] = given["temperature"] == 0
        return GenerationHyperparameters.from_mapping(base).new(**given)

    def completed_by(self, base: SetSamplingOptions) -> SamplingOptions:
        """Return these options, with each that is None taken from `base`."""
        return SamplingOptions(**dict(config.inherit(self, base)))

    def problems(self) -> Iterator[str]:
        """Yield nothing; raise ConfigError for a value that no request may have."""
        self.gconfig()
        yield from ()


class EvaluationSamplingOptions(SetSamplingOptions):
    """The sampling of responses in evaluations; options that are not set are those of training."""

    temperature: Temperature = 0.0
    """0 is greedy"""
    top_p: TopP = 1.0
    """1 is off"""
    top_k: TopK = 0
    """0 is off"""


class SamplingOptions(EvaluationSamplingOptions):
    """The sampling of responses."""

    temperature: Temperature = 1.0
    """0 is greedy"""
    max_new_tokens: Count = 1024
    """longest response, in each turn"""
    stop: list[str] = []
    """texts that end a response; they may be special tokens, such as <|im_end|>"""
    stop_token_ids: list[Annotated[int, Ge(0)]] = []
    """tokens that end a response, beside the model's own end tokens"""
