"""Tiny random checkpoints for tests and benchmarks: ordinary Hugging Face folders, made in a moment, not downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

Kind = Literal["qwen2", "qwen3", "llama"]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: 256 bytes and three special tokens, with a ChatML template."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END_OF_TEXT, TURN_START, TURN_END]
    core = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=END_OF_TEXT,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


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
    tokenizer = build_tokenizer()
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
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
