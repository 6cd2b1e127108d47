"""Tensor parallelism for inference: the block of each parameter that a rank holds, and forwards that combine blocks.

Shards are plain tensors. The plan is the model's own (`base_model_tp_plan` in transformers). Embedding and head are
also split over the vocabulary. Blocks are contiguous, and uneven if a size does not divide.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from rlite.errors import ConfigError
from rlite.runtime.parallel.shards import Box
from rlite.runtime.parallel.tensor_plan import bias_apart, check_heads, split_linears, vocabulary_rows


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
    out = vocabulary_rows(module.weight, ids, start)
    dist.all_reduce(out, group=group)
    return out


def _row_forward(module: nn.Linear, forward: Any, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    with bias_apart(module) as bias:
        out = forward(x)
    dist.all_reduce(out, group=group)
    return out if bias is None else out + bias


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
