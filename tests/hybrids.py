"""Tiny models with layers that carry a state, shaped like released checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlite.assembly.quickstart.run import byte_tokenizer

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**DELTA, "partial_rotary_factor": 0.25},
    "olmo_hybrid": {**DELTA, "num_key_value_heads": 4, "linear_num_key_heads": 4},
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 8,
    },
    # these have experts, too
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "kimi_linear": {
        **LATENT,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 16,
    },
    "jamba": {
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
}


def hybrid_config(kind: str, **fields: Any) -> Any:
    default = AutoConfig.for_model(kind)
    sizes = {key: value for key, value in SIZES.items() if hasattr(default, key)}
    return type(default)(**{**sizes, "vocab_size": 264, **HYBRIDS[kind], **fields})


def hybrid(kind: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A model in which a state that runs on shows, and rounding does not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(hybrid_config(kind, **fields)).to(dtype).eval()
        with torch.no_grad():
            for module in model.modules():
                for parameter in module.parameters(recurse=False):
                    noise = torch.randn(parameter.shape, dtype=dtype)
                    if isinstance(module, nn.Embedding):
                        parameter.copy_(noise * 4)
                    elif parameter.dim() > 1:
                        parameter.copy_(noise * parameter.shape[-1] ** -0.5)
                    else:
                        parameter.add_(noise / 5)
    return model


def save_hybrid(model: Any, folder: Path) -> Path:
    """Write a checkpoint with the tensors' names in the model."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save_pretrained(folder)
    return folder
