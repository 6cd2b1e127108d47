"""A small model from nothing: a byte tokenizer and an untrained Qwen3, as an ordinary Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlite.errors import ConfigError
from rlite.nn.transformers_warnings import quiet_transformers

HEAD_DIM = 32
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte of UTF-8 and three tokens of ChatML.

    Ids 0 to 255 follow the order of byte-level BPE's alphabet. It is byte-level BPE without merges, so every text
    survives encoding and decoding, and `AutoTokenizer`, which picks a class by the model's type, reads it back
    unchanged. Turns end with `<|im_end|>`; `<|endoftext|>` is the padding.
    """
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END_OF_TEXT, TURN_START, TURN_END]
    core = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=END_OF_TEXT,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def build_tiny_qwen3(
    path: str | Path,
    *,
    seed: int,
    hidden_size: int = 192,
    intermediate_size: int = 384,
    num_layers: int = 2,
    num_key_value_heads: int = 2,
) -> Path:
    """Write an untrained Qwen3 (float32, tied embeddings) with `byte_tokenizer` to a folder.

    It suits prompts of about a hundred bytes and training from random weights: wide initial weights, and rotary
    frequencies that distinguish such short distances. The same arguments write the same weights; the process's
    random state is left unchanged.

    Args:
        path: the folder.
        seed: seed of the weights.
        hidden_size: width of the model.
        intermediate_size: width of the MLP.
        num_layers: layers.
        num_key_value_heads: heads of keys and values.

    Returns:
        The folder.

    Raises:
        ConfigError: the heads do not divide `hidden_size`, or the key-value heads the heads.
    """
    num_heads, rest = divmod(hidden_size, HEAD_DIM)
    if rest or num_heads % num_key_value_heads:
        raise ConfigError(
            "hidden_size must be head_dim x num_heads, and num_heads a multiple of num_key_value_heads; found "
            f"hidden_size={hidden_size}, head_dim={HEAD_DIM}, num_key_value_heads={num_key_value_heads}"
        )
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    with quiet_transformers():
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)
