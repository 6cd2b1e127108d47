"""Choose which prompts are asked next: the seam `PromptSampler`, and samplers that are ready to use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlite import imports

if TYPE_CHECKING:
    from rlite.trainer.sampling.ready import CurriculumSampler, IntermediateSampler
    from rlite.trainer.sampling.sampler import PromptResult, PromptSampler, register_sampler

# lazy: options look up names of samplers, and import no numpy
__all__, __getattr__, __dir__ = imports.exports(
    __name__,
    {
        "rlite.trainer.sampling.ready": "CurriculumSampler IntermediateSampler",
        "rlite.trainer.sampling.sampler": "PromptResult PromptSampler register_sampler",
    },
)
