"""Tensor parallelism for inference: the block of each parameter that a rank holds, and forwards that combine blocks.

Shards are plain tensors. The plan is the model's own (`base_model_tp_plan` in transformers). Embedding and head are
also split over the vocabulary. Blocks are contiguous, and uneven if a size does not divide.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlite.errors import ConfigError
from rlite.parallel.shards import Box

COLUMN, ROW = "colwise", "rowwise"


def span(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return start and stop of this rank's part of `size` elements.

    Args:
        size: number of elements.
        rank: this rank.
        world_size: number of ranks. If it does not divide `size`, the first parts are longer by one.
    """
    base, extra = divmod(size, world_size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


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
        ConfigError: they do not.
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


def _check_blocks(model: PreTrainedModel, columns: Iterable[str], rows: Iterable[str]) -> None:
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


def check_tensor_parallel(model: PreTrainedModel, world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the linear layers that serving splits over the ranks, by columns and by rows.

    Raises:
        ConfigError: heads do not divide; or the model's plan or embedding is missing or unknown.
    """
    check_heads(model.config, world_size)
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding:
        raise ConfigError(
            f"{model.config.model_type!r} has an embedding of its own kind, {type(embedding).__name__}, "
            "which is not split; use tensor_parallel_size=1"
        )
    return split_linears(model)


class TensorParallelPlan:
    """Layout of one causal language model's parameters over the ranks of a group. The model may be on meta.

    Args:
        model: the model.
        group: the ranks; None is a single rank.

    Raises:
        ConfigError: heads do not divide; or the model's plan is missing or unknown.
    """

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup | None) -> None:
        self.model = model
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self._axis: dict[nn.Parameter, int] = {}
        self._rows: list[nn.Linear] = []
        if self.world_size > 1:
            columns, rows = check_tensor_parallel(model, self.world_size)
            self._rows = list(rows.values())
            for column in (*columns.values(), self._embedding, self._head):
                self._axis.update(dict.fromkeys(column.parameters(), 0))
            self._axis.update((row.get_parameter("weight"), 1) for row in self._rows)

    def box(self, parameter: nn.Parameter) -> Box:
        """Return the block of a whole parameter that belongs to this rank.

        Call it before the shard replaces the parameter.
        """
        box = [slice(0, n) for n in parameter.shape]
        axis = self._axis.get(parameter)
        if axis is not None:
            box[axis] = slice(*span(parameter.shape[axis], self.rank, self.world_size))
        return tuple(box)

    def install(self) -> None:
        """Replace the forwards of modules that need other ranks. Nothing changes for a single rank."""
        if self.group is None or self.world_size == 1:
            return
        vocab_size = self._embedding.num_embeddings
        start, _ = span(vocab_size, self.rank, self.world_size)
        self._embedding.forward = partial(_embedding_forward, self._embedding, start, self.group)
        self._head.forward = partial(_head_forward, self._head, self._head.forward, self._head.out_features, self.group)
        for module in self._rows:
            module.forward = partial(_row_forward, module, module.forward, self.group)  # type: ignore[method-assign]


def _embedding_forward(module: nn.Embedding, start: int, group: dist.ProcessGroup, ids: torch.Tensor) -> torch.Tensor:
    local = ids - start
    is_here = (local >= 0) & (local < module.weight.shape[0])
    out = F.embedding(local.where(is_here, 0), module.weight) * is_here[..., None]
    dist.all_reduce(out, group=group)
    return out


def _row_forward(module: nn.Linear, forward: Any, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    # the bias is whole on every rank and must count once
    out = forward(x) if module.bias is None else F.linear(x, module.weight)
    dist.all_reduce(out, group=group)
    return out if module.bias is None else out + module.bias


def _head_forward(
    module: nn.Linear, forward: Any, vocab_size: int, group: dist.ProcessGroup, x: torch.Tensor
) -> torch.Tensor:
    local = forward(x)
    world_size = group.size()
    sizes = [stop - start for start, stop in (span(vocab_size, r, world_size) for r in range(world_size))]
    local = F.pad(local, (0, max(sizes) - local.shape[-1])).contiguous()
    parts = [torch.empty_like(local) for _ in sizes]
    dist.all_gather(parts, local, group=group)
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)
