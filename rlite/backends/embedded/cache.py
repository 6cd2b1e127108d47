"""The slot KV cache: its size, its memory layout, and the rows at which a token's keys and values are stored.

The module also holds the options of the embedded executor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from rlite.backends.embedded.scheduler import Move
from rlite.backends.models.architecture import rope_limit
from rlite.backends.models.batch_invariant import BLOCK
from rlite.config import Count
from rlite.data.routing import RoutingShape
from rlite.errors import ConfigError
from rlite.runtime.parallel.host_memory import give_back_cached_memory
from rlite.runtime.parallel.tensor import attention_shape
from rlite.runtime.replicas.replica import ExecutorOptions


class EmbeddedOptions(ExecutorOptions):
    """Options of `executor="torch"`. Each of `max_num_seqs` sequences has a slot in the KV cache.

    On a GPU, `gpu_memory_utilization` limits the number of slots.
    """

    max_prefill_tokens: Count = 4096
    """tokens of one prefill forward; longer prompts are prefilled in chunks"""
    cuda_graphs: bool = True
    """on one GPU, capture decode steps as CUDA graphs and replay them; needs some memory beside weights and KV cache"""
    deterministic: bool = False
    """a request with a seed gets bit-identical results, independent of other requests, at a lower speed. For Llama,
    Qwen2 and Qwen3 in float32 on CPU, log-probabilities also have the bits of a train engine with deterministic=true.
    Not covered for other models: requests whose cache is recomputed, because weights were written, the engine was
    offloaded, or a replica was lost"""


CONTEXT_LIMIT = 4096
"""upper bound of the default max_model_len, because every slot has room for the longest sequence"""
DECODE_ROWS = 16
"""slots of a decode step of fixed shape"""
GATHER_INDEX_BYTES = 64 << 20
"""bytes for cached row indices of slot groups; beyond it they are forgotten"""


class Targets(NamedTuple):
    """Row indices at which keys and values of some tokens are stored: `[tokens * kv_heads]` each, token-major."""

    rows: Tensor
    """rows of the flat values, and of the flat keys unless keys are blocked"""
    blocks: Tensor
    """rows of the flat blocked keys"""
    offsets: Tensor
    """positions within a block"""


class GatherIndex(NamedTuple):
    """Arguments of `embedding_bag` to decode some slots over their first `num_blocks` blocks."""

    num_blocks: int
    key_rows: Tensor
    key_starts: Tensor
    """start of each bag; one bag per slot, query head and block"""
    value_rows: Tensor
    value_starts: Tensor
    """start of each bag; one bag per slot and query head"""


class CacheShape(NamedTuple):
    """Sizes of a cache."""

    num_layers: int
    num_slots: int
    num_heads: int
    """number of query heads"""
    num_kv_heads: int
    max_len: int
    """positions of a slot; the cache rounds them up to whole blocks"""
    head_dim: int


@dataclass(frozen=True)
class CacheSizes:
    """Limits of one worker: the longest sequence, and the number of sequences that its KV cache holds."""

    options: EmbeddedOptions
    config: PreTrainedConfig
    dtype: torch.dtype
    """dtype of keys and values"""
    tp_size: int
    """number of ranks that share the heads"""

    @cached_property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, from the options or the model.

        Raises:
            ConfigError: the option exceeds the model's own limit.
        """
        config = self.config.get_text_config()
        limits = {"max_position_embeddings": config.max_position_embeddings}
        if (longest := rope_limit(config)) is not None:
            limits["length up to which rotary angles are the same for all sequences"] = longest
        name, limit = min(limits.items(), key=lambda item: item[1])
        length = self.options.max_model_len or min(limit, CONTEXT_LIMIT)
        if length > limit:
            raise ConfigError(f"max_model_len={length} is beyond the model's {name}={limit}")
        return length

    def cache_shape(self, num_slots: int) -> CacheShape:
        """Return the shape of a cache for `num_slots` sequences."""
        if self.options.deterministic:  # the last tile is as large as the others
            num_slots += -num_slots % DECODE_ROWS
        layers, heads, kv_heads, dim = attention_shape(self.config)
        return CacheShape(layers, num_slots, heads // self.tp_size, kv_heads // self.tp_size, self.max_model_len, dim)

    def affordable_slots(self, device: torch.device, group: dist.ProcessGroup | None) -> int:
        """Return the number of sequences that fit into the free memory; on CPU, return `max_num_seqs`.

        Args:
            device: device of the cache.
            group: the ranks of the replica, which all take the smallest number.

        Raises:
            ConfigError: not even one sequence fits.
        """
        options = self.options
        if device.type != "cuda":
            return options.max_num_seqs
        layers, spare, _, heads, length, dim = self.cache_shape(1)
        per_slot = 2 * layers * heads * length * dim * self.dtype.itemsize
        give_back_cached_memory()  # the driver counts it as taken
        free, total = torch.cuda.mem_get_info(device)
        budget = total * options.gpu_memory_utilization - (total - free) - (spare - 1) * per_slot
        slots = torch.tensor(min(options.max_num_seqs, int(budget // per_slot)), device=device)
        if group is not None:
            dist.all_reduce(slots, op=dist.ReduceOp.MIN, group=group)
        if slots < 1:
            needed, left = (f"{nbytes / 2**20:.0f} MiB" for nbytes in (per_slot, max(budget, 0)))
            raise ConfigError(
                f"one sequence of max_model_len={length} needs {needed} of KV cache, {left} are left at "
                f"gpu_memory_utilization={options.gpu_memory_utilization}; lower max_model_len or raise "
                "gpu_memory_utilization"
            )
        return int(slots)


class SlotCache:
    """Keys and values of every layer and slot, in one allocation each.

    Values are `[slots, kv_heads, max_len, head_dim]` per layer. Keys have the same shape, unless they are blocked: on
    CPU in float32 they are `[slots, kv_heads, max_len / BLOCK, head_dim, BLOCK]` if torch has fbgemm. A query's product
    with a block of keys is then a weighted sum of rows (see `DecodePlan`).

    The cache begins as zeros: a masked position still takes part in the product, with weight zero.

    Args:
        shape: sizes of the cache.
        dtype: dtype of keys and values.
        device: device of the memory.
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        # torch has the weighted sum of rows as a fast kernel where it has fbgemm
        has_fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
        self.is_blocked = has_fbgemm and device.type == "cpu" and dtype == torch.float32
        self.num_heads, self.num_kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.max_len = -(-shape.max_len // BLOCK) * BLOCK
        slots = (shape.num_layers, shape.num_slots, shape.num_kv_heads)
        plain = (*slots, self.max_len, self.head_dim)
        blocked = (*slots, self.max_len // BLOCK, self.head_dim, BLOCK)
        self.keys = _zeros(blocked if self.is_blocked else plain, dtype, device)
        self.values = _zeros(plain, dtype, device)
        row: tuple[int, ...] = (self.head_dim, BLOCK) if self.is_blocked else (self.head_dim,)
        self._flat_keys = [keys.view(-1, *row) for keys in self.keys]
        self.value_rows = [values.view(-1, self.head_dim) for values in self.values]
        """the rows that `GatherIndex.value_rows` indexes, per layer"""
        self.key_rows = [keys.view(-1, BLOCK) for keys in self.keys] if self.is_blocked else []
        """the rows that `GatherIndex.key_rows` indexes, per layer"""
        self.routing: Tensor | None = None
        """experts that were chosen where a token was read, `[slots, max_len, layers, K]`, -1 if that was not recorded;
        None: nothing was asked to be"""
        self._gather_indices: dict[tuple[int, int, int], GatherIndex] = {}
        self._index_bytes = 0

    @property
    def nbytes(self) -> int:
        """Size of keys and values in bytes."""
        return self.keys.nbytes + self.values.nbytes

    def targets(self, slots: Tensor, positions: Tensor) -> Targets:
        """Return the row indices of tokens at (slot, position). Both arguments are `[tokens]`."""
        heads = torch.arange(self.num_kv_heads, device=slots.device)
        rows = ((slots[:, None] * self.num_kv_heads + heads) * self.max_len + positions[:, None]).flatten()
        return Targets(rows, rows // BLOCK, rows % BLOCK)

    def write(self, layer: int, targets: Targets, key: Tensor, value: Tensor) -> None:
        """Write keys and values into one layer.

        Args:
            layer: index of the layer.
            targets: row indices of the tokens.
            key: `[tokens, kv_heads, head_dim]`.
            value: `[tokens, kv_heads, head_dim]`.
        """
        key, value = key.reshape(-1, self.head_dim), value.reshape(-1, self.head_dim)
        if self.is_blocked:
            self._flat_keys[layer][targets.blocks, :, targets.offsets] = key
        else:
            self._flat_keys[layer].index_copy_(0, targets.rows, key)
        self.value_rows[layer].index_copy_(0, targets.rows, value)

    def sequence(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first positions of one slot, `[1, kv_heads, length, head_dim]` each.

        Args:
            layer: index of the layer.
            slot: index of the slot.
            length: number of positions.
        """
        keys = self.keys[layer, slot]
        if self.is_blocked:
            keys = keys[:, : -(-length // BLOCK)].transpose(2, 3).flatten(1, 2)
        return keys[None, :, :length], self.values[layer, slot, None, :, :length]

    def at(self, layer: int, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of tokens, `[tokens, kv_heads, head_dim]` each.

        Args:
            layer: index of the layer.
            slots: `[tokens]`, slots of the tokens.
            positions: `[tokens]`, positions of the tokens.
        """
        if self.is_blocked:
            keys = self.keys[layer][slots, :, positions // BLOCK, :, positions % BLOCK]
        else:
            keys = self.keys[layer][slots, :, positions]
        return keys, self.values[layer][slots, :, positions]

    def gather_index(self, start: int, stop: int, blocks: int) -> GatherIndex:
        """Return the row indices of slots [start, stop) over their first `blocks` blocks; recent results are cached.

        Args:
            start: first slot.
            stop: end of the slots, exclusive.
            blocks: number of blocks per slot.
        """
        if (found := self._gather_indices.get((start, stop, blocks))) is not None:
            return found
        device, dim = self.values.device, self.head_dim
        num, heads = stop - start, self.num_heads
        # half of the memory to read wherever it is enough
        dtype = torch.int32 if self.values[0].numel() < 2**31 else torch.int64
        kv_heads = torch.arange(heads, device=device) // (heads // self.num_kv_heads)
        first = (torch.arange(start, stop, device=device)[:, None] * self.num_kv_heads + kv_heads)[..., None]
        value_rows = first * self.max_len + torch.arange(blocks * BLOCK, device=device)
        block = first * (self.max_len // BLOCK) + torch.arange(blocks, device=device)
        key_rows = block[..., None] * dim + torch.arange(dim, device=device)
        found = GatherIndex(
            blocks,
            key_rows.flatten().to(dtype),
            torch.arange(0, num * heads * blocks * dim, dim, dtype=dtype, device=device),
            value_rows.flatten().to(dtype),
            torch.arange(0, num * heads * blocks * BLOCK, blocks * BLOCK, dtype=dtype, device=device),
        )
        num_bytes = sum(indices.nbytes for indices in found[1:])
        if self._index_bytes + num_bytes > GATHER_INDEX_BYTES:
            self._gather_indices.clear()
            self._index_bytes = 0
        self._index_bytes += num_bytes
        self._gather_indices[start, stop, blocks] = found
        return found

    def record_routing(self, shape: RoutingShape) -> None:
        """Keep the chosen experts beside the keys and values from now on, and copy them with these."""
        if self.routing is None:
            sizes = self.keys.shape[1], self.max_len, shape.num_layers, shape.top_k
            self.routing = torch.full(sizes, -1, dtype=torch.int64).to(shape.dtype).to(self.values.device)

    def routing_of(self, slot: int, begin: int, length: int, steps: int) -> list[list[bytes]]:
        """Return the chosen experts of a burst, see `rlite.data.routing`: a list for each step.

        Args:
            slot: slot of the sequence.
            begin: first position that is told, in the list of the first step.
            length: tokens of the sequence at the first step.
            steps: number of steps.
        """
        assert self.routing is not None
        table = self.routing[slot, begin : length - 1 + steps].flatten(1).cpu()
        rows = [row.tobytes() for row in table.numpy()]
        first = length - begin
        return [rows[:first], *([row] for row in rows[first:])]

    def clear(self, slot: int) -> None:
        """Write zeros into a slot that may hold non-finite values, before another sequence uses it."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0

    def apply(self, moves: list[Move]) -> None:
        """Copy slots, one move after the other."""
        for move in moves:
            blocks = -(-move.length // BLOCK) if self.is_blocked else move.length
            for storage, stop in ((self.keys, blocks), (self.values, move.length)):
                storage[:, move.target, :, :stop] = storage[:, move.source, :, :stop]
            if self.routing is not None:
                self.routing[move.target, : move.length] = self.routing[move.source, : move.length]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On CPU, numpy reserves memory only for written pages, while torch would write all of them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    line = 64  # bytes of the cache line at which torch aligns
    memory = np.zeros(math.prod(shape) * dtype.itemsize + line, dtype=np.uint8)
    start = -memory.ctypes.data % line
    return torch.from_numpy(memory[start : start + memory.size - line]).view(dtype).view(shape)
