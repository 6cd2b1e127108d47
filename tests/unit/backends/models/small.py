"""Small models of many classes, with a checkpoint that transformers wrote of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from rlite.backends.models.architecture import miniature_config
from rlite.backends.models.stored import stored_buffers
from rlite.nn.pretrained import quiet_transformers

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
TEXTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gpt_neox": {},
    "qwen3_moe": {},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "mixtral": {},
    "olmoe": {},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "glm4_moe": {"first_k_dense_replace": 1},
    "minimax_m2": {},
    "gpt_oss": {},
    "ernie4_5_moe": {},
    "granitemoe": {},
    "phimoe": {},
    "gemma4_text": {},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention"], "num_hidden_layers": 3},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "glm4_moe_lite": {},
    "falcon_h1": {},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "gemma2": {},
    "kimi_linear": {},
}
"""types of text models, with values of their configs"""
VOCABULARY = 320
"""enough for the tests' tokenizer"""
CONTAINERS = ("qwen3_5", "gemma3", "gemma4", "mistral3")


@cache
def text_model(kind: str) -> Any:
    """Return a small model of a type, with random weights and stored buffers."""
    config_class = type(transformers.AutoConfig.for_model(kind))
    known = {name: value for name, value in EXPERTS.items() if name in vars(config_class())}
    small = {} if kind == "gemma4_text" else {"num_hidden_layers": 2}
    config = miniature_config(config_class(**{**small, **known, **TEXTS[kind]}))
    if kind != "gemma4_text":
        config.vocab_size = VOCABULARY
    return _random(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


@cache
def container(kind: str) -> Any:
    """Return a small multimodal model of a type."""
    config = transformers.AutoConfig.for_model(kind)
    parts = {name: part for name in ("text_config", "vision_config") if (part := vars(config).get(name)) is not None}
    values = {name: miniature_config(part).to_dict() for name, part in parts.items()}
    if kind != "gemma4":
        values["text_config"]["vocab_size"] = VOCABULARY
    for part in values.values():
        if kind != "gemma4":
            part.update({name: 2 for name in ("num_hidden_layers", "depth") if name in part})
        if kind == "qwen3_5" and "layer_types" in part:
            part["layer_types"] = ["linear_attention", "full_attention"]
        elif kind == "gemma3" and "layer_types" in part:
            part["layer_types"] = ["sliding_attention", "full_attention"]
    config = type(config)(**values)
    return _random(transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)], config)


def _random(cls: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls._from_config(config, dtype=torch.float32).eval()
        for tensor in (*model.parameters(), *stored_buffers(model).values()):
            if tensor.is_floating_point():
                tensor.data.uniform_(-0.3, 0.3)
    return model


def written(model: Any, folder: Path, change: Callable[[dict[str, Tensor]], Any] | None = None) -> dict[str, Tensor]:
    """Write a model as transformers does, and return the tensors of the files."""
    with quiet_transformers():
        model.save_pretrained(folder)
    return tensors_in(folder)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in the files of a checkpoint."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def held(model: Any) -> dict[str, Tensor]:
    """Return a model's parameters and stored buffers."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *stored_buffers(model).items())}
