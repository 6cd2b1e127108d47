"""Tensor parallelism of a Hugging Face model, for training and inference: which layers its own plan splits, and how."""

from __future__ import annotations

import fnmatch
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlite.errors import ConfigError

COLUMN, ROW = "colwise", "rowwise"


def attention_shape(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    """Return the numbers of layers, query heads and key heads of a causal language model, and the size of a head.

    Raises:
        ConfigError: the config does not state them, so the model has no attention.
    """
    text = config.get_text_config()
    key_heads, head_dim = (
        vars(text).get(text.attribute_map.get(key, key)) for key in ("num_key_value_heads", "head_dim")
    )
    try:
        heads = text.num_attention_heads
    except AttributeError as error:
        raise ConfigError(f"the config of {config.model_type!r} states no num_attention_heads") from error
    return text.num_hidden_layers, heads, key_heads or heads, head_dim or text.hidden_size // heads


def check_heads(config: PreTrainedConfig, world_size: int) -> None:
    """Check that the attention heads divide among the ranks.

    Raises:
        ConfigError: the heads do not divide.
    """
    _, heads, key_heads, _ = attention_shape(config)
    for name, num in (("num_key_value_heads", key_heads), ("num_attention_heads", heads)):
        if num % world_size:
            raise ConfigError(
                f"tensor parallel over {world_size} does not divide {name}={num} of {config.model_type!r}; "
                f"choose a divisor of {num}"
            )


def split_linears(model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Find the linear layers that the model's own plan splits.

    A layer with an adapter is PEFT's layer, which holds the linear layer as `base_layer`.

    Returns:
        Layers split by columns (their outputs) and layers split by rows (their inputs), by name.

    Raises:
        ConfigError: the model has no plan; or the plan has an unknown style, or leaves out a block that mixes tokens.
    """
    prefix = model.base_model_prefix + "."
    styles = {prefix + name: style for name, style in (model.config.base_model_tp_plan or {}).items()}
    if not styles:
        raise ConfigError(f"{model.config.model_type!r} has no tensor parallel plan; use one device for each copy")
    columns: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for name, module in (*model.named_modules(), *model.named_parameters()):
        style = next((s for pattern, s in styles.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if style is None or style.startswith("replicated"):
            continue
        if style not in (COLUMN, ROW) or not isinstance(getattr(module, "base_layer", module), nn.Linear):
            raise ConfigError(
                f"{model.config.model_type!r} asks for {style!r} at {name!r}, which is not supported; "
                "use one device for each copy"
            )
        (columns if style == COLUMN else rows)[name] = module
    _check_blocks(model, columns, rows)
    return columns, rows


def _check_blocks(model: PreTrainedModel, columns: Mapping[str, Any], rows: Mapping[str, Any]) -> None:
    """Check that every attention, and every other block in the plan, starts with columns and ends with one row.

    Raises:
        ConfigError: a block does not.
    """
    entries = ", ".join(sorted(model.config.base_model_tp_plan or {}))
    begins, ends = ([name.rpartition(".")[0] for name in names] for names in (columns, rows))
    split = set(begins) & {block for block, count in Counter(ends).items() if count == 1}
    # what mixes tokens knows its layer's number, for the cache
    mixers = {name for name, module in model.named_modules() if hasattr(module, "layer_idx")}
    layers = {name for name in mixers if any(block.startswith(f"{name}.") for block in split)}
    if others := sorted((mixers - layers | {*begins, *ends}) - split):
        raise ConfigError(
            f"the tensor parallel plan of {model.config.model_type!r} ({entries}) does not split {others[0]!r} between "
            "its columns and one row; use one device for each copy"
        )
    _check_per_head(model, {**columns, **rows})


def _check_per_head(model: PreTrainedModel, split: Mapping[str, Any]) -> None:
    """Check that no tensor between the columns and the row of a block has a part for each head or each column.

    Raises:
        ConfigError: there is such a tensor, which would be whole beside split columns.
    """
    _, heads, key_heads, head_dim = attention_shape(model.config)
    widths: dict[str, set[int]] = defaultdict(lambda: {heads, key_heads})
    for name, module in split.items():
        linear = getattr(module, "base_layer", module)
        widths[name.rpartition(".")[0]] |= {linear.out_features, linear.in_features}
    for name, parameter in model.named_parameters():
        block = next((block for block in widths if name.startswith(f"{block}.")), None)
        is_split = any(name.startswith(f"{part}.") for part in split)
        if block is not None and not is_split and parameter.numel() in widths[block] - {head_dim}:
            raise ConfigError(
                f"the tensor parallel plan of {model.config.model_type!r} leaves {name} {list(parameter.shape)} whole, "
                "which has a part for each head or column; use one device for each copy"
            )


@contextmanager
def bias_apart(row: nn.Module) -> Iterator[Any]:
    """Take away the bias of a layer that is split by rows: it is whole on every rank and must count once.

    Yields:
        The bias, or None.
    """
    bias, row._parameters["bias"] = row._parameters.get("bias"), None
    try:
        yield bias
    finally:
        row._parameters["bias"] = bias


def vocabulary_rows(weight: Tensor, ids: Tensor, start: int) -> Tensor:
    """Return this rank's summand of an embedding that is split over the vocabulary; zero for other ranks' tokens.

    Args:
        weight: this rank's rows.
        ids: token ids.
        start: token id of the first row.
    """
    local = ids - start
    is_here = (local >= 0) & (local < weight.shape[0])
    return F.embedding(local.where(is_here, 0), weight) * is_here[..., None]
