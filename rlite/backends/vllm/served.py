"""The weights that vLLM computes with, read back as blocks of the tensors that were loaded.

    qkv_proj, gate_up_proj      a block for each of the tensors that vLLM joined
    tensor parallelism          the block of this rank
    CPU                         vLLM keeps packed weights alone: the kernel multiplies them with the identity

Layers whose layout is not in `_layout` are left out: experts, and quantised or model-specific layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from rlite.runtime.parallel.shards import ParameterShard


def served_blocks(model: Any, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, list[tuple[ParameterShard, bool]]]:
    """Return the blocks of the parameters of one vLLM worker by the names of the tensors that were loaded.

    `wanted`: shapes of the loaded tensors by name. A head that is not among them is tied to the embedding. Returns
    blocks, and whether a kernel computed the values.
    """
    found: dict[str, list[tuple[ParameterShard, bool]]] = {}
    packed, modules = getattr(model, "packed_modules_mapping", {}), dict(model.named_modules())
    embedding = next((path for path, module in modules.items() if type(module) is VocabParallelEmbedding), "")
    for path, module in modules.items():
        is_tied = type(module) is ParallelLMHead and f"{path}.weight" not in wanted
        parent, dot, leaf = (embedding if is_tied else path).rpartition(".")
        dim, cuts = _layout(module)
        for attribute, tensor, is_computed in _tensors(module):
            own = (dim, cuts) if dim < tensor.dim() else (0, [(len(tensor), 0, len(tensor))])
            names, start = [leaf] if len(own[1]) == 1 else packed.get(leaf, ()), 0
            for name, (size, offset, total) in zip(names, own[1], strict=False):
                offsets, shape, full = [0] * tensor.dim(), list(tensor.shape), f"{parent}{dot}{name}.{attribute}"
                offsets[own[0]], shape[own[0]] = offset, total
                if wanted.get(full) == tuple(shape):
                    block = ParameterShard(tensor.narrow(own[0], start, size), tuple(offsets), tuple(shape))
                    found.setdefault(full, []).append((block, is_computed))
                start += size
    return found


def _layout(module: Any) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the dimension that a layer divides, and its blocks: size, offset in the global tensor, size of that.

    Another layer holds its tensors whole.
    """
    kind, size, rank = type(module), getattr(module, "tp_size", 1), getattr(module, "tp_rank", 0)
    if kind is linear.RowParallelLinear:
        return 1, [(module.input_size // size, rank * (module.input_size // size), module.input_size)]
    if kind in (VocabParallelEmbedding, ParallelLMHead):
        rows = module.shard_indices
        return 0, [(rows.num_org_elements, rows.org_vocab_start_index, module.org_vocab_size)]
    if kind not in (linear.QKVParallelLinear, linear.MergedColumnParallelLinear, linear.ColumnParallelLinear):
        return 9, []
    # keys and values of a rank may be those of its neighbours, too
    shared = getattr(module, "num_kv_head_replicas", 1)
    repeats = [1, shared, shared] if kind is linear.QKVParallelLinear else [1] * 9
    sizes = getattr(module, "output_sizes", None) or [module.output_size]
    return 0, [(n // size, rank // k * (n // size), n // k) for n, k in zip(sizes, repeats, strict=False)]


def _tensors(module: Any) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield the tensors that a layer computes with: names, values, and whether a kernel computed the values."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.numel() and parameter.dim():
            yield name, parameter, False
        size = getattr(module, "input_size_per_partition", getattr(module, "input_size", 0))
        if name == "weight" and size and (multiply := getattr(module, "cpu_linear", None)) is not None:
            yield name, multiply(torch.eye(size, dtype=parameter.dtype), parameter, None).T, True
