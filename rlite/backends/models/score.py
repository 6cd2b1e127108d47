"""A scalar head on any causal model: reward models and critics."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import TokenClassifierOutput

from rlite.backends.models.huggingface import HuggingFaceFsdp2TrainModule
from rlite.nn.pretrained import end_ids, load_config, load_tokenizer, padding_token


class HuggingFaceFsdp2ScoreModule(HuggingFaceFsdp2TrainModule):
    """Base of reward models and critics: `class Critic(HuggingFaceFsdp2ScoreModule, Qwen2ForSequenceClassification)`.

    Losses see scores [T], one per token. Weights are those of a causal model with a new head (normal, of deviation 1 /
    (hidden size + 1), as in Stiennon et al. 2020), or of an earlier such model with its head. A saved checkpoint opens
    with `AutoModelForSequenceClassification`, whose score is that of the last token.
    """

    base_model: nn.Module
    base_model_prefix: str
    score: nn.Linear
    row_ends: frozenset[int] = frozenset()
    """ids of the last tokens of the rows that are learnt; an export pads with another token"""
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


def pad_apart(folder: Path, ends: Collection[int] = ()) -> None:
    """Let the config and the tokenizer of an exported scorer pad with a token with which no row ends.

    Args:
        folder: the export.
        ends: ids of tokens with which rows end; the model's end tokens by default.
    """
    if not (folder / "tokenizer_config.json").exists():
        return
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    ends = ends or {*end_ids(folder, config), tokenizer.eos_token_id}
    pad = padding_token(tokenizer, config.get_text_config().vocab_size, ends)
    if pad is None or pad == config.pad_token_id == tokenizer.pad_token_id:
        return
    token = tokenizer.convert_ids_to_tokens(pad)
    for name, change in {
        "config.json": {"pad_token_id": pad},
        "tokenizer_config.json": {"pad_token": token},
        "special_tokens_map.json": {"pad_token": token},
    }.items():
        if (file := folder / name).exists():
            file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **change}, indent=2), "utf-8")
