"""Tensor parallelism for inference: which block of each parameter a rank holds, and the forwards that make it whole.

Shards are plain tensors. The plan is the model's own (`base_model_tp_plan` in transformers); embedding and head are
split over the vocabulary besides. Blocks are contiguous, and uneven where a size does not divide.
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
    """Start and stop of this rank's part of `size` elements; where it does not divide, the first are longer by one."""
    base, extra = divmod(size, world_size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def attention_shape(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    """Return the numbers of layers, query heads and key heads of a causal language model, and the size of a head.

    Raises: ConfigError if the config does not state them: the model has no attention.
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
    """Raises: ConfigError if attention heads do not divide among so many ranks."""
    _, heads, key_heads, _ = attention_shape(config)
    for name, num in (("num_key_value_heads", key_heads), ("num_attention_heads", heads)):
        if num % world_size:
            raise ConfigError(
                f"tensor parallel over {world_size} does not divide {name}={num} of {config.model_type!r}; "
                f"choose a divisor of {num}"
            )


def split_linears(model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """The linear layers that the model's own plan splits by columns (its outputs) and by rows (its inputs), by name.

    One with an adapter is PEFT's layer, which holds the linear one as `base_layer`.

    Raises: ConfigError if the model has no plan or one that is not known here: with another style, or of which a block
        that mixes tokens has no part.
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
    """Every attention is such a block, as is mostly the MLP: columns to begin with, and a row that adds up."""
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
    """Return the linear layers that serving splits over so many ranks, by columns and by rows.

    Raises: ConfigError if heads do not divide, or the model has no plan or one that is not known here.
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
    """How the parameters of one causal language model lie on the ranks of a group. The model may be on meta.

    Raises: ConfigError if heads do not divide, or the model has no plan or one that is not known here.
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
        """The block of a whole parameter that belongs to this rank. Ask before its shard replaces it."""
        box = [slice(0, n) for n in parameter.shape]
        axis = self._axis.get(parameter)
        if axis is not None:
            box[axis] = slice(*span(parameter.shape[axis], self.rank, self.world_size))
        return tuple(box)

    def install(self) -> None:
        """Give the modules that need the other ranks a forward that asks them. Nothing to do for one rank."""
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
