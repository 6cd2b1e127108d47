"""A model of the same class and options as another, but small enough to run in milliseconds anywhere.

Configs have no common schema, so sizes are recognised by the names that transformers uses. Everything that is not a
size (number and kinds of layers, rotary embeddings, biases, windows) stays, because the small model stands for the
large one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlite.errors import ConfigError, StorageError, why_not_written
from rlite.nn.meta import real_tensors
from rlite.nn.transformers_warnings import quiet_transformers

NUM_HEADS, HEAD_DIM, ROPE_HEAD_DIM = 4, 16, 8
WINDOW = 5
"""length of sliding windows and chunks: shorter than the sequences of a check"""
MAX_DEPTH = 512
"""most layers of a model; a deeper one is not checked"""
VOCABULARY = 128
SPECIAL_IDS = 16
"""token ids below this may be special ones (padding, end of text)"""
CONTEXT = 64
"""length from which rotary embeddings depend on the length"""

SIZES = {
    **dict.fromkeys(("d_model", "hidden_size", "n_embd", "word_embed_proj_dim"), NUM_HEADS * HEAD_DIM),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), NUM_HEADS * HEAD_DIM),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "n_head", "num_attention_heads"), NUM_HEADS),
    "qk_head_dim": HEAD_DIM + ROPE_HEAD_DIM,
    "rotary_dim": ROPE_HEAD_DIM,
}
"""sizes by name"""
MOST = {
    **dict.fromkeys(("d_ff", "n_inner"), 6 * HEAD_DIM),
    **dict.fromkeys(("max_position_embeddings", "n_ctx", "n_positions"), 16 * CONTEXT),
}
"""largest values by name"""
KEY_HEADS = {"num_global_key_value_heads", "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"}
RANKS = ("lora_rank", "hidden_size_per_layer_input")
IDS = ("token_id", "token_ids", "token_index")
NOT_COPIED = {"architectures", "dtype", "model_type", "quantization_config", "transformers_version"}


def miniature(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a small `cls` in float32 on the CPU with random weights, in evaluation mode.

    Weights are wider than a fresh model's, so that a wrong mask or position changes the outputs visibly. The process's
    random state stays as it was.

    The small model has all layers of the large one, because code may tell layers apart by their numbers alone.

    For a config that it cannot use, the class raises its own error.

    Raises:
        ConfigError: the config has too many layers of different kinds.
    """
    with real_tensors(), torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(0)
        model = cls._from_config(miniature_config(config), dtype=torch.float32)
        with torch.no_grad():
            for module in model.modules():
                for parameter in module._parameters.values():
                    if parameter is not None:
                        _randomise(module, parameter)
    return model.eval()


@contextmanager
def saved(model: PreTrainedModel) -> Iterator[str]:
    """Write a checkpoint into a temporary folder, without transformers' progress bar.

    Yields:
        Path of the folder.

    Raises:
        StorageError: it could not be written.
    """
    with TemporaryDirectory() as folder:
        try:
            with quiet_transformers():
                model.save_pretrained(folder)
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"{folder}: a small model for the check of this model could not be written: {why_not_written(error)}"
            ) from error
        yield folder


def miniature_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return `config` with small sizes, and all its layers.

    Raises:
        ConfigError: there are too many layers to build them all.
    """
    names = {real: standard for standard, real in config.attribute_map.items()}
    values = {key: value for key, value in config.to_dict().items() if key not in NOT_COPIED and key[0] != "_"}
    standard = {names.get(key, key): value for key, value in values.items()}
    if (depth := standard.get("num_hidden_layers") or 0) > MAX_DEPTH:
        raise ConfigError(f"the check of a model builds at most {MAX_DEPTH} layers, and this one has {depth}")
    small = {}
    for key, value in values.items():
        if isinstance(part := vars(config).get(key), PreTrainedConfig):
            small[key] = miniature_config(part)
        elif key == "rope_parameters":
            small[key] = _small_rope(value)
        elif key == "per_layer_config" and value:
            small[key] = {int(row): {k: _small(k, v, standard) for k, v in part.items()} for row, part in value.items()}
        else:
            small[key] = _small(names.get(key, key), value, standard)
    return type(config)(**_with_distinct_ids(small))


def _small(name: str, value: Any, config: Mapping[str, Any]) -> Any:
    """Return the small value of the field that transformers calls `name`; what is no size stays."""
    if name == "head_dim" and value in (None, config.get("qk_rope_head_dim")):
        return HEAD_DIM if value is None else ROPE_HEAD_DIM
    if name == "num_key_value_heads" and value is None:
        return NUM_HEADS
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name in SIZES:
        return SIZES[name]
    if name in MOST:
        return min(value, MOST[name])
    if name in KEY_HEADS:
        if value < (config.get("num_key_value_heads") or 0):  # of some layers alone
            return 1
        return NUM_HEADS if value >= (config.get("num_attention_heads") or 0) else min(value, 2)
    if "rope_head_dim" in name and "nope" not in name:
        return ROPE_HEAD_DIM
    if "head_dim" in name:
        return HEAD_DIM * (1 + (value > (config.get("head_dim") or value)))  # those of some layers may be larger
    if name.endswith(RANKS):
        return HEAD_DIM
    if "intermediate" in name or "ffn" in name:
        return min(value, 6 * HEAD_DIM)
    if name.startswith("vocab_size"):
        return VOCABULARY  # of a smaller model, too: the sequences of a check have ids up to 100
    if ("window" in name and "layers" not in name and "pattern" not in name) or "chunk_size" in name:
        return min(value, WINDOW)
    return value


def _small_rope(rope: Any) -> Any:
    """Return rotary parameters, of all layers or by kind of layer, for heads of `HEAD_DIM`."""
    if not isinstance(rope, Mapping):
        return rope
    small = {key: _small_rope(value) for key, value in rope.items()}
    half = int(HEAD_DIM * (rope.get("partial_rotary_factor") or 1.0)) // 2
    for key in ("long_factor", "short_factor"):
        if key in rope:
            small[key] = rope[key][:half]
    if "mrope_section" in rope:
        small["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
    if "original_max_position_embeddings" in rope:
        # longer than every sequence of a check where angles depend on the longest one, else shorter than the longest
        is_fixed = rope.get("rope_type") not in LENGTH_DEPENDENT_ROPE
        small["original_max_position_embeddings"] = WINDOW if is_fixed else CONTEXT
    return small


LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""rotary embeddings whose angles change when the longest sequence of a forward passes a length"""


def _with_distinct_ids(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with a distinct id below `SPECIAL_IDS` for every special token."""
    found = [key for key, value in values.items() if key.endswith(IDS) and value is not None]
    ids = {key: number % SPECIAL_IDS for number, key in enumerate(found)}
    return {**values, **{key: [number] if isinstance(values[key], list) else number for key, number in ids.items()}}


def _randomise(module: nn.Module, parameter: nn.Parameter) -> None:
    noise = torch.randn(parameter.shape)
    if isinstance(module, nn.Embedding):
        parameter.copy_(noise / 2)
    elif parameter.dim() > 1:
        parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    else:
        parameter.add_(noise / 5)
