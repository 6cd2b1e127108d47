"""Configs shaped like released checkpoints, for `benchmarks.architectures` and for tests of single classes.

A class's default config often leaves out what its released checkpoints have: windows, mixtures of layers, rotary
scaling, tied embeddings, sparse layers. Each entry states the fields of one checkpoint's config.json that change how
the model computes. Sizes are the checkpoint's, because a check shrinks them itself (`miniature_config`). The number of
layers is cut to one period of the mixture and a little more, which `benchmarks.architectures` computes in seconds.

To add a class, add an entry under its model type. A class without an entry is checked by its default config.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

Fields = Mapping[str, Any]
Maker = Callable[[], PreTrainedConfig]
DEPTH = 8
"""layers of a default config"""
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


HYBRID: Fields = {"num_hidden_layers": 5}
"""a period of three gated delta nets and full attention, which the configs make themselves, and a layer more"""
QUARTER: Fields = {"rope_type": "default", "partial_rotary_factor": 0.25}
MROPE: Fields = {**QUARTER, "rope_theta": 1e7, "mrope_interleaved": True, "mrope_section": [11, 11, 10]}
GEMMA_3: Fields = {
    "num_hidden_layers": 8,
    "sliding_window": 1024,
    "rope_parameters": _by_window(1e4, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}),
}
NEMOTRON: Fields = {"num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64}
GRANITE: Fields = {
    "embedding_multiplier": 12,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
}
GRANITE_H: Fields = {
    **GRANITE,
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "position_embedding_type": None,
}
MULTIPLIERS: Fields = {
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.65,
    "key_multiplier": 0.39,
    "lm_head_multiplier": 0.039,
    "mlp_multipliers": [0.88, 0.58],
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
    "ssm_out_multiplier": 0.23,
}
"""Falcon-H1's factors of what its parts add"""

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
        | {"rope_parameters": _by_window(5e5, {**YARN, "rope_theta": 5e5, "factor": 8.0})},
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
        | {"rope_parameters": {**YARN, "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "Kimi-K2": {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 384}
        | {"num_attention_heads": 64, "num_key_value_heads": 64, "routed_scaling_factor": 2.827}
        | {"n_group": 1, "topk_group": 1}
        | {"rope_parameters": {**YARN, "rope_theta": 5e4, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "Moonlight-16B-A3B": {"num_hidden_layers": 3, "first_k_dense_replace": 1, "q_lora_rank": None}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 2048, "n_routed_experts": 64}
        | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "n_shared_experts": 2}
        | {"routed_scaling_factor": 2.446},
    },
    "deepseek_v2": {
        "DeepSeek-V2-Lite": {"first_k_dense_replace": 1, "q_lora_rank": None, "num_experts_per_tok": 6}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 2048, "n_group": 1, "topk_group": 1}
        | {"rope_parameters": {**YARN, "rope_theta": 1e4, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}},
        "DeepSeek-V2": {"first_k_dense_replace": 1, "n_routed_experts": 160, "num_experts_per_tok": 6}
        | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0},
    },
    "dots1": {
        "dots.llm1": {"num_hidden_layers": 3, "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {"first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    },
    "dbrx": {
        "dbrx": {"n_layers": 2, "n_heads": 48, "d_model": 6144}
        | {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 5e5}}
        | {"ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}}
    },
    "exaone4": {
        "EXAONE-4.0-1.2B": {"num_key_value_heads": 8, "hidden_size": 2048, "tie_word_embeddings": True}
        | {"sliding_window": None, "layer_types": ["full_attention"] * 2}
        | {"rope_parameters": {**LLAMA3, "rope_theta": 1e6, "factor": 16.0}},
        "EXAONE-4.0-32B": {"num_hidden_layers": 5, "num_attention_heads": 40, "num_key_value_heads": 8}
        | {"hidden_size": 5120, "rope_parameters": {**LLAMA3, "rope_theta": 1e6, "factor": 16.0}},
    },
    "cohere2": {
        "command-r7b": {"num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"hidden_size": 4096, "logit_scale": 0.25},
    },
    "stablelm": {
        "stablelm-2-1.6b": {"hidden_size": 2048, "use_qkv_bias": True},
        "stablelm-2-12b": {"hidden_size": 5120, "num_key_value_heads": 8, "qk_layernorm": True}
        | {"use_parallel_residual": True},
    },
    "glm4_moe": {
        "GLM-4.5-Air": {"num_hidden_layers": 3, "attention_bias": True, "head_dim": 128},
        "GLM-4.5, 4.6 and 4.7": {"num_hidden_layers": 5, "attention_bias": True, "head_dim": 128, "use_qk_norm": True}
        | {"hidden_size": 5120, "n_routed_experts": 160, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5},
    },
    "glm4_moe_lite": {"GLM-4.7-Flash": {"num_hidden_layers": 3}},
    "mimo_v2_flash": {"MiMo-V2-Flash": {"num_hidden_layers": 7}},
    "qwen2_moe": {
        "Qwen1.5-MoE-A2.7B": {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60}
        | {"num_experts_per_tok": 4, "sliding_window": None},
        "Qwen2-57B-A14B": {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}
        | {"num_experts": 64, "num_experts_per_tok": 8, "sliding_window": None},
    },
    "qwen3_moe": {
        "Qwen3-30B-A3B": {"head_dim": 128, "norm_topk_prob": True, "num_local_experts": 128},
        "Qwen3-235B-A22B with yarn": {"num_attention_heads": 64, "head_dim": 128, "norm_topk_prob": True}
        | {"hidden_size": 4096, "rope_parameters": YARN},
    },
    "qwen3_next": {"Qwen3-Next-80B-A3B": {**HYBRID, "rope_parameters": {**QUARTER, "rope_theta": 1e7}}},
    "qwen3_5_text": {
        "Qwen3.5-0.8B": {**HYBRID, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
        | {"linear_num_value_heads": 16, "tie_word_embeddings": True, "rope_parameters": MROPE},
        "Qwen3.5-9B": {**HYBRID, "rope_parameters": MROPE},
        "Qwen3.6-27B": {**HYBRID, "hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4}
        | {"linear_num_value_heads": 48, "rope_parameters": MROPE},
    },
    "qwen3_5": {
        "Qwen3.5-4B": {"tie_word_embeddings": True, "vision_config": {"depth": 2}}
        | {"text_config": {**HYBRID, "hidden_size": 2560, "tie_word_embeddings": True, "rope_parameters": MROPE}},
        "Qwen3.6-27B": {"vision_config": {"depth": 2}}
        | {"text_config": {**HYBRID, "hidden_size": 5120, "linear_num_value_heads": 48, "rope_parameters": MROPE}},
    },
    "qwen3_5_moe_text": {
        "Qwen3.5-35B-A3B": {**HYBRID, "rope_parameters": MROPE},
        "Qwen3.5-397B-A17B": {**HYBRID, "hidden_size": 4096, "num_attention_heads": 32, "num_experts": 512}
        | {"num_experts_per_tok": 10, "linear_num_value_heads": 64, "rope_parameters": MROPE},
    },
    "qwen3_5_moe": {
        "Qwen3.6-35B-A3B": {"vision_config": {"depth": 2}, "text_config": {**HYBRID, "rope_parameters": MROPE}}
    },
    "mixtral": {
        "Mixtral-8x7B": {"num_attention_heads": 32, "num_key_value_heads": 8},
        "Mixtral-8x22B": {"num_attention_heads": 48, "num_key_value_heads": 8, "hidden_size": 6144},
    },
    "olmoe": {"OLMoE-1B-7B": {"num_attention_heads": 16, "num_key_value_heads": 16, "clip_qkv": None}},
    "minimax_m2": {"MiniMax-M2": {"rotary_dim": 64, "num_attention_heads": 48, "num_key_value_heads": 8}},
    "ernie4_5_moe": {
        "ERNIE-4.5-21B-A3B": {"num_hidden_layers": 3, "moe_layer_end_index": 2},
        "ERNIE-4.5-300B-A47B": {"num_hidden_layers": 5, "moe_layer_end_index": 4, "moe_layer_start_index": 3}
        | {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "moe_k": 8}
        | {"moe_num_shared_experts": 0, "tie_word_embeddings": False},
    },
    "granitemoe": {
        "granite-3.1-3b-a800m": {"num_local_experts": 40, "num_experts_per_tok": 8, "tie_word_embeddings": True}
        | {"num_attention_heads": 24, "num_key_value_heads": 8, **GRANITE}
    },
    "kimi_linear": {
        "Kimi-Linear-48B-A3B": {"num_hidden_layers": 5}
        | {"layer_types": [*["linear_attention"] * 3, "full_attention", "linear_attention"]}
    },
    "nemotron_h": {
        "Nemotron-H-8B": {"hybrid_override_pattern": "M-M-*-M-", **NEMOTRON, "num_attention_heads": 32},
        "Nemotron-Nano-9B-v2": {"hybrid_override_pattern": "M-M-MM-*-M", **NEMOTRON, "hidden_size": 4480}
        | {"num_attention_heads": 40},
        "Nemotron-3-Nano-30B-A3B": {"hybrid_override_pattern": "MEMEM*EME", **NEMOTRON, "hidden_size": 2688}
        | {"num_key_value_heads": 2, "mamba_num_heads": 64, "n_routed_experts": 128, "num_experts_per_tok": 6}
        | {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5},
        "Nemotron-3-Super-120B-A12B": {"hybrid_override_pattern": "MEMEM*EME", **NEMOTRON, "moe_latent_size": 1024}
        | {"num_key_value_heads": 2, "n_routed_experts": 512, "num_experts_per_tok": 22, "routed_scaling_factor": 5.0}
        | {"moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376, "num_nextn_predict_layers": 1},
    },
    "falcon_h1": {
        "Falcon-H1-0.5B": {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
        | {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, **MULTIPLIERS},
        "Falcon-H1-1.5B-Deep": {"hidden_size": 1280, "num_attention_heads": 6, "num_key_value_heads": 2}
        | {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 256, **MULTIPLIERS}
        | {"num_hidden_layers": 4},
        "Falcon-H1-34B": {"hidden_size": 5120, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128}
        | {"mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_d_head": 128, "mamba_n_groups": 2, **MULTIPLIERS}
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    },
    "bamba": {"Bamba-9B": {"num_hidden_layers": 5, "attn_layer_indices": [3], "mamba_d_state": 128}},
    "granitemoehybrid": {
        "granite-4.0-h-tiny": {"layer_types": [*["mamba"] * 3, "attention", "mamba"], **GRANITE_H}
        | {"num_local_experts": 64, "num_experts_per_tok": 6, "tie_word_embeddings": True},
        "granite-4.0-h-small": {"layer_types": [*["mamba"] * 3, "attention", "mamba"], **GRANITE_H}
        | {"num_local_experts": 72, "num_experts_per_tok": 10, "tie_word_embeddings": True},
        "granite-4.0-h-micro": {"layer_types": [*["mamba"] * 3, "attention", "mamba"], **GRANITE_H}
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "tie_word_embeddings": True},
        "granite-4.0-micro": {"num_hidden_layers": 2, "layer_types": ["attention"] * 2, **GRANITE}
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope"}
        | {"num_attention_heads": 40, "num_key_value_heads": 8, "hidden_size": 2560, "tie_word_embeddings": True}
        | {"mamba_expand": 2, "mamba_n_heads": 128, "mamba_d_head": 40},
    },
    "lfm2": {
        "LFM2-1.2B": {"layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]}
        | {"num_hidden_layers": 5, "hidden_size": 2048, "block_auto_adjust_ff_dim": True},
        "LFM2-2.6B": {"layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]}
        | {"num_hidden_layers": 5, "block_auto_adjust_ff_dim": False, "intermediate_size": 10752},
    },
    "lfm2_moe": {
        "LFM2-8B-A1B": {"layer_types": ["conv", "conv", "full_attention", "conv", "conv"], "num_hidden_layers": 5}
        | {"num_dense_layers": 2},
        "LFM2-24B-A2B": {"layer_types": ["conv", "conv", "full_attention", "conv", "conv"], "num_hidden_layers": 5}
        | {"num_dense_layers": 2, "num_experts": 64},
    },
    "olmo_hybrid": {
        "Olmo-Hybrid-7B": {"num_hidden_layers": 5, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
        "Olmo-Hybrid-7B with rotary embeddings": {"num_hidden_layers": 5}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    },
    "gemma3": {
        "gemma-3-4b": {"vision_config": {"num_hidden_layers": 2, "image_size": 56, "patch_size": 14}}
        | {"mm_tokens_per_image": 4, "text_config": {**GEMMA_3, "num_attention_heads": 8, "hidden_size": 2560}},
        "gemma-3-27b": {"vision_config": {"num_hidden_layers": 2, "image_size": 56, "patch_size": 14}}
        | {"mm_tokens_per_image": 4, "text_config": {**GEMMA_3, "num_attention_heads": 32, "hidden_size": 5376}},
    },
    "gemma4": {
        "gemma-4-E2B": {"vision_config": {"num_hidden_layers": 2}, "audio_config": {"num_hidden_layers": 2}}
        | {
            "text_config": {"num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 1536}
            | {"num_hidden_layers": 12, "num_kv_shared_layers": 6, "use_double_wide_mlp": True}
        },
    },
}
"""fields by model type and name of the checkpoint"""


def released_config(config_class: type[PreTrainedConfig], name: str) -> PreTrainedConfig:
    """Return the config of a class that has the shape of a released checkpoint."""
    fields = dict(RELEASED[config_class.model_type][name])
    if "layer_types" in fields:
        fields["num_hidden_layers"] = len(fields["layer_types"])
    elif not config_class.sub_configs and "hybrid_override_pattern" not in fields:
        fields.setdefault("num_hidden_layers", 2)
    return AutoConfig.for_model(config_class.model_type, **fields)


def compare(
    folder: Path, types: Sequence[str], devices: int, verdicts_of: Callable[[str, Maker], Mapping[str, Any]]
) -> None:
    """Write the result of each config of some classes that has none yet, and before it the config's type and name."""
    for kind, name, make in configs(types):
        file = result_file(folder, kind, name, devices)
        if not file.exists():
            current_file(folder, os.getppid()).write_text(f"{kind}\n{name}")
            part = file.with_suffix(".part")
            part.write_text(json.dumps(verdicts_of(name, make), indent=0))
            part.rename(file)


def configs(types: Sequence[str] | None = None) -> Iterator[tuple[str, str, Maker]]:
    """Yield model types with names and makers of the configs of their classes; released configs come first."""
    for config_class in sorted(classes(types), key=lambda config_class: config_class.model_type not in RELEASED):
        yield from ((config_class.model_type, *each) for each in configs_of(config_class))


def classes(types: Sequence[str] | None = None) -> list[type[PreTrainedConfig]]:
    """Return the config classes of transformers' mapping, or those of some model types, by type."""
    found = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING), key=lambda config_class: config_class.model_type)
    return [each for each in found if types is None or each.model_type in types]


def result_file(folder: Path, model_type: str, name: str, devices: int) -> Path:
    """Return the file of a config's result; its name changes with the fields of a released config."""
    fields = json.dumps(RELEASED.get(model_type, {}).get(name), sort_keys=True, default=str)
    return folder / f"{model_type}--{hashlib.sha256(f'{name} {fields}'.encode()).hexdigest()[:12]}--{devices}.json"


def current_file(folder: Path, process: int) -> Path:
    """Return the file with the type and name of the config that a child of a process compares."""
    return folder / f"current-{process}"


def configs_of(config_class: type[PreTrainedConfig]) -> Iterator[tuple[str, Maker]]:
    """Yield names and makers of the configs of a class: those of released checkpoints, or the default one."""
    names = RELEASED.get(config_class.model_type, {})
    yield from ((name, partial(released_config, config_class, name)) for name in names)
    if not names:
        yield "", partial(default_config, MODEL_FOR_CAUSAL_LM_MAPPING[config_class], config_class)


def default_config(cls: type[PreTrainedModel], config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return the default config of a class: the text part if the model takes that alone, and a decoder's.

    It has at most `DEPTH` layers if the class can be built so, because deep models take long.
    """
    config = config_class()
    if vars(cls).get("config_class", config_class) is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    config = shallow(config)
    if vars(config).get("is_decoder") is False:
        config.is_decoder = True
    return config


def shallow(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config of the same class with at most `DEPTH` layers; the same if its class makes none of it."""
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if not isinstance(depth := vars(config).get(name), int) or depth <= DEPTH:
        return config
    try:
        return type(config)(**{name: DEPTH})
    except Exception:  # of any kind: the class's own code
        return config
