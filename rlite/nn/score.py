"""A number for each token from any causal model: reward models and critics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
from transformers.modeling_outputs import TokenClassifierOutput

from rlite.nn.huggingface import HuggingFaceFsdp2TrainModule, carried_class
from rlite.nn.pretrained import opening


class HuggingFaceFsdp2ScoreModule(HuggingFaceFsdp2TrainModule):
    """Base of reward models and critics: `class Critic(HuggingFaceFsdp2ScoreModule, Qwen2ForSequenceClassification)`.

    Losses see scores [T], one per token. Weights are those of a causal model with a new head (normal, of deviation 1 /
    (hidden size + 1), as in Stiennon et al. 2020), or of an earlier such model with its head. A saved checkpoint opens
    with `AutoModelForSequenceClassification`, whose score is that of the last token.
    """

    base_model: nn.Module
    base_model_prefix: str
    score: nn.Linear
    _config_options: ClassVar[Mapping[str, Any]] = {"num_labels": 1}

    def forward(self, *args: Any, **inputs: Any) -> TokenClassifierOutput:
        """Return scores [B, L, 1] as logits; transformers' own forward would keep only the last token's score."""
        return TokenClassifierOutput(logits=self.score(self.base_model(*args, **inputs).last_hidden_state))

    def compute_logits(self, data: Mapping[str, Any]) -> Tensor:
        """Return scores [T] of a pack."""
        return super().compute_logits(data)[:, 0]

    def missing_parameter(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the head of a model that has none yet, the same on every rank."""
        if name != "score.weight":
            return super().missing_parameter(name, shape)
        generator = torch.Generator().manual_seed(0)
        return torch.randn(shape, generator=generator, dtype=torch.float64) / (shape[1] + 1)

    def leaves_out(self, name: str) -> bool:
        """Return True for the output embedding of a causal model, in whose place the head is."""
        return super().leaves_out(name) or not name.startswith(f"{self.base_model_prefix}.")


def score_module(path: str | Path, carrier: type[HuggingFaceFsdp2ScoreModule]) -> Any:
    """Read the checkpoint at `path` on meta, as a subclass of `carrier` and its transformers class.

    Returns:
        The module.

    Raises:
        ConfigError: transformers has no sequence classification for this type of model.
    """
    what = "sequence classification for models"
    cls = carried_class(path, carrier, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, what)
    with init_empty_weights(), opening(path, "config of a model"):
        return cls.from_pretrained(path)
