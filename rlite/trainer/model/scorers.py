"""Modules of reward models: decoders with a head for each token, and encoders that read a whole text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlite.errors import ConfigError
from rlite.nn import HuggingFaceFsdp2TrainModule
from rlite.nn.pretrained import load_config, score_class
from rlite.trainer.model.modules import CriticModule, PolicyModule, critic_module, made


class LabelModule(CriticModule):
    """A decoder that classifies. A token's score is the logit of one label."""

    _config_options: ClassVar[Mapping[str, Any]] = {}
    label: int = 0

    def compute_logits(self, data: Mapping[str, Any]) -> Tensor:
        """Return the label's logits [T] of a pack."""
        return HuggingFaceFsdp2TrainModule.compute_logits(self, data)[:, self.label]


class EncoderModule(PolicyModule):
    """A classifier with attention in both directions. Every token of a sequence has the sequence's score."""

    has_narrow_outputs: bool = True
    label: int = 0

    def check_architecture(self) -> None:
        """Accept the model: transformers' own forward computes padded batches."""

    def check_gpu_kernels(self) -> None:
        """Accept the model: transformers' own forward computes padded batches."""

    def prefix_obstacle(self) -> str:
        """Return why tokens with which sequences begin alike are not computed once."""
        return "an encoder reads the end of a text before its beginning"

    def compute_logits(self, data: Mapping[str, Any]) -> Tensor:
        """Return the label's logits [T] of a pack, which is computed as a padded batch."""
        lengths = data["cu_seqlens"].diff()
        columns = {"input_ids": self.config.pad_token_id or 0, "token_type_ids": 0}
        inputs = {
            name: pad_sequence(data[name].split(lengths.tolist()), batch_first=True, padding_value=padding)
            for name, padding in columns.items()
            if name in data
        }
        places = torch.arange(int(lengths.max()), device=lengths.device)
        logits = self(**inputs, attention_mask=(places < lengths[:, None]).long()).logits
        return logits[:, self.label].repeat_interleave(lengths)


def scorer_module(path: str, what: str, label: int) -> Any:
    """Return the module of a reward model, on meta."""
    config = load_config(path)
    if config.is_encoder_decoder:
        raise ConfigError(f"{what}: {config.model_type} has an encoder and a decoder; expected one of them")
    module: Any = critic_module(path)
    if not is_decoder(module):
        module = made(score_class, EncoderModule, path, None, None, True)
    elif config.num_labels > 1:
        module = made(score_class, LabelModule, path, None, None, True)
    module.label = label
    return module


def is_decoder(module: Any) -> bool:
    """Return whether a model has a score for each token, of what it has read until there."""
    return hasattr(module, "score")
