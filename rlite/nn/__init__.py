"""Modules that users subclass: they carry an algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlite import imports

if TYPE_CHECKING:
    from rlite.backends.models.head_logprobs import linear_logprobs
    from rlite.backends.models.huggingface import HuggingFaceFsdp2ScoreModule, HuggingFaceFsdp2TrainModule
    from rlite.backends.models.lora import LoraTrainModule
    from rlite.nn.base import BaseTrainModule
    from rlite.nn.options import LoraOptions

# lazy, so that options import no torch
__all__, __getattr__, __dir__ = imports.exports(
    __name__,
    {
        "rlite.backends.models.head_logprobs": "linear_logprobs",
        "rlite.backends.models.huggingface": "HuggingFaceFsdp2TrainModule HuggingFaceFsdp2ScoreModule",
        "rlite.backends.models.lora": "LoraTrainModule",
        "rlite.nn.base": "BaseTrainModule",
        "rlite.nn.options": "LoraOptions",
    },
)
