"""The slot KV cache: its size, its memory layout, and the rows at which a token's keys and values are stored.

The module also holds the options of the embedded executor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from rlite.backends.embedded.scheduler import Move
from rlite.backends.embedded.state import SlotStates, state_bytes
from rlite.backends.models.architecture import rope_limit
from rlite.backends.models.batch_invariant import BLOCK
from rlite.backends.models.layout import AttentionLayer, AttentionLayers
from rlite.backends.models.mixers import State
from rlite.config import Count
from rlite.data.routing import RoutingShape
from rlite.errors import ConfigError
from rlite.runtime.parallel.host_memory import give_back_cached_memory
from rlite.runtime.parallel.tensor import max_positions
from rlite.runtime.replicas.replica import ExecutorOptions


class EmbeddedOptions(ExecutorOptions):
    """Options of `executor="torch"`. Each of `max_num_seqs` sequences has a slot in the KV cache.

    On a GPU, `gpu_memory_utilization` limits the number of slots.
    """

    max_prefill_tokens: Count = 4096
    """tokens of one prefill forward; longer prompts are prefilled in chunks"""
    cuda_graphs: bool = True
    """on one GPU, capture decode steps as CUDA graphs and replay them; needs some memory beside weights and KV cache"""
    speculation: Literal["auto"] | bool = "auto"
    """let texts of the same prompt, and earlier turns, propose tokens, several of which one decode step on CPU checks.
    Tokens and log-probabilities are those of single steps. "auto" does so while it saves time"""
    deterministic: bool = False
    """a request with a seed gets bit-identical results, independent of other requests, at a lower speed. For Llama,
    Qwen2, Qwen3 and Qwen3-MoE in float32 on CPU, log-probabilities also have the bits of a train engine with
    deterministic=true. Not covered for other models: requests whose cache is recomputed, because weights were written,
    the engine was offloaded, or a replica was lost"""


CONTEXT_LIMIT = 4096
"""upper bound of the default max_model_len, because every slot has room for the longest sequence"""
DECODE_ROWS = 16
"""slots of a decode step of fixed shape"""
NO_STATE: Mapping[int, State] = MappingProxyType({})
GATHER_INDEX_BYTES = 64 << 20
"""bytes for cached row indices of slot groups; beyond it they are forgotten"""


class Rows(NamedTuple):
    """Row indices at which a layer stores keys and values of some tokens: `[tokens * kv_heads]` each, token-major."""

    rows: Tensor
    """rows of the flat values, and of the flat keys unless keys are blocked"""
    blocks: Tensor
    """rows of the flat blocked keys"""
    offsets: Tensor
    """positions within a block"""


class Targets:
    """Places at which keys and values of some tokens are stored.

    Args:
        slots: `[tokens]`.
        positions: `[tokens]`.
        max_len: positions of a slot.
    """

    def __init__(self, slots: Tensor, positions: Tensor, max_len: int) -> None:
        self._slots, self._positions, self._max_len = slots, positions, max_len
        self._rows: dict[int, Rows] = {}

    def rows(self, num_kv_heads: int) -> Rows:
        """Return the row indices in a layer with so many heads."""
        if (found := self._rows.get(num_kv_heads)) is None:
            heads = torch.arange(num_kv_heads, device=self._slots.device)
            rows = (self._slots[:, None] * num_kv_heads + heads) * self._max_len + self._positions[:, None]
            rows = rows.flatten()
            found = self._rows[num_kv_heads] = Rows(rows, rows // BLOCK, rows % BLOCK)
        return found


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

    layers: AttentionLayers
    """the layers with attention, with the heads of this rank"""
    num_slots: int
    max_len: int
    """positions of a slot; the cache rounds them up to whole blocks"""

    @property
    def slot_elements(self) -> int:
        """Number of keys' and values' elements of one slot."""
        own = [layer for layer in self.layers.values() if layer.source is None]
        return self.max_len * sum(layer.num_key_heads * (layer.key_width + layer.value_width) for layer in own)


@dataclass(frozen=True)
class CacheSizes:
    """Limits of one worker: the longest sequence, and the number of sequences that its KV cache holds."""

    options: EmbeddedOptions
    config: PreTrainedConfig
    dtype: torch.dtype
    """dtype of keys and values"""
    layers: AttentionLayers
    """the layers with attention, with the heads of this rank"""
    state: Mapping[int, State] = field(default_factory=dict)
    """recurrent state of one sequence, by the number of the mixer; empty if the model has none"""

    @cached_property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, from the options or the model.

        Raises:
            ConfigError: the option exceeds the model's own limit.
        """
        config = self.config.get_text_config()
        limits = dict([max_positions(config)])
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
        return CacheShape(self.layers, num_slots, self.max_model_len)

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
        shape = self.cache_shape(1)
        # a model without attention has no keys and values
        per_slot = max(1, shape.slot_elements * self.dtype.itemsize + state_bytes(self.state))
        give_back_cached_memory()  # the driver counts it as taken
        free, total = torch.cuda.mem_get_info(device)
        budget = total * options.gpu_memory_utilization - (total - free) - (shape.num_slots - 1) * per_slot
        slots = torch.tensor(min(options.max_num_seqs, int(budget // per_slot)), device=device)
        if group is not None:
            dist.all_reduce(slots, op=dist.ReduceOp.MIN, group=group)
        if slots < 1:
            needed, left = (f"{nbytes / 2**20:.0f} MiB" for nbytes in (per_slot, max(budget, 0)))
            raise ConfigError(
                f"one sequence of max_model_len={shape.max_len} needs {needed} of KV cache, {left} are left at "
                f"gpu_memory_utilization={options.gpu_memory_utilization}; lower max_model_len or raise "
                "gpu_memory_utilization"
            )
        return int(slots)


class SlotCache:
    """Keys and values of every attention layer and slot. Layers of equal sizes have one allocation each.

    Values are `[slots, kv_heads, max_len, width]` per layer. Keys have the same layout, unless they are blocked: on
    CPU in float32 they are `[slots, kv_heads, max_len / BLOCK, width, BLOCK]` if torch has fbgemm. A query's product
    with a block of keys is then a weighted sum of rows (see `DecodePlan`).

    A layer that reads an earlier layer's keys and values has its tensors, and writes nothing.

    The cache begins as zeros: a masked position still takes part in the product, with weight zero.

    Args:
        shape: sizes of the cache.
        dtype: dtype of keys and values.
        device: device of the memory.
        state: recurrent state of one sequence, by the number of the mixer.
    """

    def __init__(
        self, shape: CacheShape, dtype: torch.dtype, device: torch.device, state: Mapping[int, State] = NO_STATE
    ) -> None:
        self.states = SlotStates(state, shape.num_slots)
        # torch has the weighted sum of rows as a fast kernel where it has fbgemm
        has_fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
        self.is_blocked = has_fbgemm and device.type == "cpu" and dtype == torch.float32
        self.layers, self.dtype, self.device = shape.layers, dtype, device
        self._num_slots = shape.num_slots
        self.max_len = -(-shape.max_len // BLOCK) * BLOCK
        self.keys: dict[int, Tensor] = {}
        """keys by layer"""
        self.values: dict[int, Tensor] = {}
        """values by layer"""
        self._storages: list[tuple[Tensor, Tensor]] = []
        """keys and values [layers, slots, ...] of the layers of one kind"""
        by_kind: dict[AttentionLayer, list[int]] = {}
        for index, layer in shape.layers.items():
            by_kind.setdefault(layer, []).append(index)
        for layer, indices in by_kind.items():
            if layer.source is None:
                self._storages.append(storage := self._allocate(layer, len(indices), shape.num_slots))
                for index, keys, values in zip(indices, *storage, strict=True):
                    self.keys[index], self.values[index] = keys, values
        for index, layer in shape.layers.items():
            if layer.source is not None:
                self.keys[index], self.values[index] = self.keys[layer.source], self.values[layer.source]
        self._flat_keys = {
            i: keys.view(-1, *keys.shape[-2 if self.is_blocked else -1 :]) for i, keys in self.keys.items()
        }
        self.value_rows = {i: values.view(-1, values.shape[-1]) for i, values in self.values.items()}
        """the rows that `GatherIndex.value_rows` indexes, per layer"""
        self.key_rows = {i: keys.view(-1, BLOCK) for i, keys in self.keys.items()} if self.is_blocked else {}
        """the rows that `GatherIndex.key_rows` indexes, per layer"""
        self.routing: Tensor | None = None
        """experts that were chosen where a token was read, `[slots, max_len, layers, K]`, -1 if that was not recorded;
        None: nothing was asked to be"""
        self._gather_indices: dict[tuple[int, ...], GatherIndex] = {}
        self._index_bytes = 0

    def _allocate(self, layer: AttentionLayer, num_layers: int, num_slots: int) -> tuple[Tensor, Tensor]:
        slots, width = (num_layers, num_slots, layer.num_key_heads), layer.key_width
        row = (self.max_len // BLOCK, width, BLOCK) if self.is_blocked else (self.max_len, width)
        keys = _zeros((*slots, *row), self.dtype, self.device)
        return keys, _zeros((*slots, self.max_len, layer.value_width), self.dtype, self.device)

    @property
    def nbytes(self) -> int:
        """Size of keys, values and recurrent states in bytes."""
        return self.states.nbytes + sum(keys.nbytes + values.nbytes for keys, values in self._storages)

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of the memory."""
        return tuple(tensor.data_ptr() for storage in self._storages for tensor in storage)

    def targets(self, slots: Tensor, positions: Tensor) -> Targets:
        """Return the places of tokens at (slot, position). Both arguments are `[tokens]`."""
        return Targets(slots, positions, self.max_len)

    def write(self, layer: int, targets: Targets, key: Tensor, value: Tensor) -> None:
        """Write keys and values into one layer.

        Args:
            layer: index of the layer.
            targets: places of the tokens.
            key: `[tokens, kv_heads, key width]`.
            value: `[tokens, kv_heads, value width]`.
        """
        if self.layers[layer].source is not None:
            return
        rows = targets.rows(key.shape[1])
        key, value = key.reshape(-1, key.shape[-1]), value.reshape(-1, value.shape[-1])
        if self.is_blocked:
            self._flat_keys[layer][rows.blocks, :, rows.offsets] = key
        else:
            self._flat_keys[layer].index_copy_(0, rows.rows, key)
        self.value_rows[layer].index_copy_(0, rows.rows, value)

    def sequence(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first positions of one slot, `[1, kv_heads, length, width]` each.

        Args:
            layer: index of the layer.
            slot: index of the slot.
            length: number of positions.
        """
        keys = self.keys[layer][slot]
        if self.is_blocked:
            keys = keys[:, : -(-length // BLOCK)].transpose(2, 3).flatten(1, 2)
        return keys[None, :, :length], self.values[layer][slot, None, :, :length]

    def at(self, layer: int, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of tokens, `[tokens, kv_heads, width]` each.

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

    def gather_index(self, layer: int, start: int, stop: int, blocks: int) -> GatherIndex:
        """Return the row indices of slots [start, stop) over their first `blocks` blocks; recent results are cached.

        Args:
            layer: index of the layer. Layers with the same heads and width of keys have the same row indices.
            start: first slot.
            stop: end of the slots, exclusive.
            blocks: number of blocks per slot.
        """
        heads, num_kv_heads, dim = self.layers[layer][:3]
        if (found := self._gather_indices.get((heads, num_kv_heads, dim, start, stop, blocks))) is not None:
            return found
        device, num = self.device, stop - start
        # half of the memory to read wherever it is enough
        dtype = torch.int32 if max(self.keys[layer].numel(), self.values[layer].numel()) < 2**31 else torch.int64
        kv_heads = torch.arange(heads, device=device) // (heads // num_kv_heads)
        first = (torch.arange(start, stop, device=device)[:, None] * num_kv_heads + kv_heads)[..., None]
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
        self._gather_indices[heads, num_kv_heads, dim, start, stop, blocks] = found
        return found

    def record_routing(self, shape: RoutingShape) -> None:
        """Keep the chosen experts beside the keys and values from now on, and copy them with these."""
        if self.routing is None:
            sizes = self._num_slots, self.max_len, shape.num_layers, shape.top_k
            self.routing = torch.full(sizes, -1, dtype=torch.int64).to(shape.dtype).to(self.device)

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
        for keys, values in self._storages:
            keys[:, slot] = 0
            values[:, slot] = 0
        self.states.drop(slot)

    def apply(self, moves: list[Move]) -> None:
        """Copy slots, one move after the other."""
        for move in moves:
            blocks = -(-move.length // BLOCK) if self.is_blocked else move.length
            for keys, values in self._storages:
                for storage, stop in ((keys, blocks), (values, move.length)):
                    storage[:, move.target, :, :stop] = storage[:, move.source, :, :stop]
            self.states.copy(move.source, move.target)
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
