"""Configs shaped like released checkpoints, for `benchmarks.architectures` and for tests of single classes.

A class's default config often leaves out what its released checkpoints have: windows, mixtures of layers, rotary
scaling, tied embeddings, sparse layers. Each entry states the fields of one checkpoint's config.json that change how
the model computes. Sizes are the checkpoint's, because a check shrinks them itself (`miniature_config`). The number of
layers is cut to one period of the mixture and a little more, which `benchmarks.architectures` computes in seconds.

To add a class, add an entry under its model type. A class without an entry is checked by its default config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

Fields = Mapping[str, Any]
YARN: Fields = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3: Fields = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _longrope(num: int, **fields: Any) -> Fields:
    """Return `longrope` parameters with `num` factors, as Phi has them."""
    factors = {"short_factor": [1.0 + i / num for i in range(num)], "long_factor": [1.0 + i for i in range(num)]}
    return {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, **factors, **fields}


def _by_window(local: float, whole: Fields) -> Fields:
    """Return rotary parameters of layers with windows, and of the others."""
    return {"sliding_attention": {"rope_type": "default", "rope_theta": local}, "full_attention": whole}


RELEASED: Mapping[str, Mapping[str, Fields]] = {
    "llama": {
        "Llama-3.2-1B": {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
        | {"head_dim": 64, "hidden_size": 2048, "rope_parameters": LLAMA3},
        "Llama-3.1-8B": {
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_parameters": {**LLAMA3, "factor": 8.0},
        },
        "Llama-2-7B": {"num_attention_heads": 32, "num_key_value_heads": 32},
    },
    "qwen2": {
        "Qwen2.5-0.5B": {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896}
        | {"tie_word_embeddings": True, "use_sliding_window": False, "max_window_layers": 21},
        "Qwen2.5-7B with yarn": {"num_attention_heads": 28, "num_key_value_heads": 4, "rope_parameters": YARN}
        | {"hidden_size": 3584, "tie_word_embeddings": False},
    },
    "qwen3": {
        "Qwen3-0.6B": {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 1024}
        | {"tie_word_embeddings": True},
        "Qwen3-8B with yarn": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        | {"tie_word_embeddings": False, "rope_parameters": YARN},
    },
    "mistral": {
        "Mistral-7B-v0.1": {"num_key_value_heads": 8, "sliding_window": 4096},
        "Mistral-Nemo": {"num_key_value_heads": 8, "sliding_window": None, "head_dim": 128, "hidden_size": 5120},
    },
    "smollm3": {"SmolLM3-3B": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}},
    "phi3": {
        "Phi-3-mini-4k": {"sliding_window": 2047},
        "Phi-3-mini-128k": {"sliding_window": 262144, "max_position_embeddings": 131072}
        | {"rope_parameters": _longrope(48)},
        "Phi-4": {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 10, "sliding_window": None},
        "Phi-4-mini": {"num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True}
        | {"sliding_window": 262144, "max_position_embeddings": 131072}
        | {"rope_parameters": _longrope(48, partial_rotary_factor=0.75)},
    },
    "glm": {
        "glm-4-9b-chat": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    },
    "glm4": {
        "GLM-4-9B-0414": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "GLM-4-32B-0414": {"num_attention_heads": 48, "num_key_value_heads": 8, "hidden_size": 6144}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
        | {"attention_bias": False},
    },
    "olmo2": {
        "OLMo-2-7B": {"num_attention_heads": 32, "num_key_value_heads": 32},
        "OLMo-2-32B": {"num_attention_heads": 40, "num_key_value_heads": 8, "hidden_size": 5120},
    },
    "olmo3": {
        "Olmo-3-7B": {"num_hidden_layers": 5, "sliding_window": 4096, "max_position_embeddings": 65536}
        | {"rope_parameters": {**YARN, "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}},
        "Olmo-3-32B": {
            "num_hidden_layers": 5,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "hidden_size": 5120,
        },
    },
    "gemma": {
        "gemma-2b": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "hidden_size": 2048},
        "gemma-7b": {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256},
    },
    "gemma2": {
        "gemma-2-2b": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
        | {"num_hidden_layers": 5, "query_pre_attn_scalar": 256},
        "gemma-2-27b": {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "hidden_size": 4608}
        | {"num_hidden_layers": 4, "query_pre_attn_scalar": 144, "sliding_window": 4096},
    },
    "gemma3_text": {
        "gemma-3-1b": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "hidden_size": 1152}
        | {"num_hidden_layers": 8, "sliding_window": 512}
        | {"rope_parameters": _by_window(1e4, {"rope_type": "default", "rope_theta": 1e6})},
        "gemma-3-4b, its text model": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
        | {"num_hidden_layers": 8, "sliding_window": 1024, "hidden_size": 2560}
        | {"rope_parameters": _by_window(1e4, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0})},
    },
    "gemma3n_text": {"gemma-3n-E2B": {"num_hidden_layers": 10, "num_kv_shared_layers": 5, "intermediate_size": 8192}},
    "gemma4_text": {
        "gemma-4-E2B": {"num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 1536}
        | {"num_hidden_layers": 12, "num_kv_shared_layers": 6, "use_double_wide_mlp": True},
        "gemma-4-31B": {"num_attention_heads": 32, "num_key_value_heads": 16, "hidden_size": 5376}
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 4}
        | {"num_hidden_layers": 8, "sliding_window": 1024},
        "gemma-4-26B-A4B": {"num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 2816}
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 2}
        | {"num_hidden_layers": 6, "sliding_window": 1024, "enable_moe_block": True, "num_experts": 128}
        | {"top_k_experts": 8, "moe_intermediate_size": 704},
    },
    "granite_swa": {"with sinks and windows": {"num_hidden_layers": 5}},
    "gpt_oss": {
        "gpt-oss-20b": {"num_hidden_layers": 4, "num_local_experts": 32, "num_experts_per_tok": 4},
        "gpt-oss-120b": {"num_hidden_layers": 4, "num_local_experts": 128, "num_experts_per_tok": 4},
    },
    "minicpm3": {"MiniCPM3-4B": {"num_attention_heads": 40, "num_key_value_heads": 40, "num_hidden_layers": 3}},
    "deepseek_v3": {
        "DeepSeek-V3": {"num_hidden_layers": 4, "first_k_dense_replace": 3}
        | {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "beta_fast": 32, "beta_slow": 1}
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
        },
        "Moonlight-16B-A3B": {"num_hidden_layers": 3, "first_k_dense_replace": 1, "q_lora_rank": None}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 2048, "n_routed_experts": 64}
        | {
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.446,
        },
    },
    "glm4_moe_lite": {"GLM-4.7-Flash": {"num_hidden_layers": 3}},
    "mimo_v2_flash": {"MiMo-V2-Flash": {"num_hidden_layers": 7}},
}
"""fields by model type and name of the checkpoint"""


def released_config(config_class: type[PreTrainedConfig], name: str) -> PreTrainedConfig:
    """Return the config of a class that has the shape of a released checkpoint."""
    fields = {"num_hidden_layers": 2, **RELEASED[config_class.model_type][name]}
    return AutoConfig.for_model(config_class.model_type, **fields)
