"""Tiny random mixtures of experts, shaped like released checkpoints, in folders as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.models.stored import stored_buffers

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 5},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 48},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
}
"""fields of a config beside the common sizes, by model type"""


def config_of(kind: str, **fields: Any) -> Any:
    """Config of a model with three layers of width 64, whose experts have width 32."""
    tokenizer = byte_tokenizer()
    shape = {
        "vocab_size": 264,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        **KINDS[kind],
        **fields,
    }
    return AutoConfig.for_model(kind, **shape)


def random_model(kind: str, seed: int = 0, **fields: Any) -> Any:
    """A model whose routers choose clearly, and whose correction biases change some choices."""
    config = config_of(kind, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, experts_implementation="eager")
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *stored_buffers(model).items()):
                scale = 0.1 if tensor.dim() == 1 or name.endswith("bias") else tensor.shape[-1] ** -0.5
                tensor.copy_(torch.randn_like(tensor) * scale + (name.endswith("norm.weight")))
    return model.eval()


def build_mixture_dir(path: Path, kind: str, **fields: Any) -> Path:
    """Write a checkpoint with its tokenizer to `path`, and return `path`."""
    model = random_model(kind, **fields)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path
