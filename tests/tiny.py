"""Tiny random checkpoints for tests and benchmarks: ordinary Hugging Face folders, made in a moment, not downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.nn.pretrained import quiet_transformers

Kind = Literal["qwen2", "qwen3", "llama"]


def build_model_dir(
    path: str | Path,
    kind: Kind = "qwen2",
    tie: bool = True,
    hidden: int = 128,
    layers: int = 2,
    **config: Any,
) -> Path:
    """Write a random checkpoint of `kind` with its tokenizer to `path`, and return `path`.

    The weights depend on the arguments alone (seed 0). They are spread wide (initializer_range 0.1), so that greedy
    text depends on its context. `config` overrides any field of the model's configuration.
    """
    path = Path(path)
    tokenizer = byte_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": tie,
        **config,
    }
    if kind == "qwen3":
        shape.setdefault("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    with quiet_transformers():
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def tokenizer_with_bos() -> PreTrainedTokenizerFast:
    """`byte_tokenizer` that begins every text with `<|endoftext|>`, as Llama's do with `<|begin_of_text|>`."""
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    begin = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = begin
    return tokenizer
