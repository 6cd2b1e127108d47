"""The paged KV cache: its size, its memory layout, and the rows at which a token's keys and values are stored.

The module also holds the options of the embedded executor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from rlite.backends.embedded.pages import TRASH, num_pages
from rlite.backends.embedded.scheduler import Copies
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
from rlite.runtime.parallel.upload import upload
from rlite.runtime.replicas.replica import ExecutorOptions


class EmbeddedOptions(ExecutorOptions):
    """Options of `executor="torch"`. At most `max_num_seqs` sequences share the pages of the KV cache.

    On a GPU, `gpu_memory_utilization` limits the number of pages.
    """

    kv_cache_memory_bytes: Count | None = None
    """memory of keys and values on each device. If it is too small for `max_num_seqs` sequences, fewer run at once, and
    a sequence may be interrupted and prefilled again. Default: room for `max_num_seqs` sequences of `max_model_len`
    tokens, on a GPU as far as memory is free; on CPU, memory is taken when a page is first used"""
    paged_kernel: bool = False
    """on a GPU, decode with rlite's Triton kernel, which reads the pages in place. Without it, with a Triton that is
    missing, or if the kernel computes something else than PyTorch at build, each step gathers all keys and values. Off
    until it has been measured on a GPU"""
    flash_attention_3: bool = False
    """on Hopper GPUs, prefill by FlashAttention 3 (package flash_attn_3), in the whole process; elsewhere torch's"""
    max_prefill_tokens: Count = 4096
    """tokens of one prefill forward; longer prompts are prefilled in chunks"""
    cuda_graphs: bool = True
    """on one GPU, capture decode steps as CUDA graphs and replay them; needs some memory beside weights and KV cache"""
    speculation: Literal["auto"] | bool = False
    """let texts of the same prompt, and earlier turns, propose tokens, several of which one decode step on CPU checks.
    Tokens and log-probabilities are those of single steps. "auto" does so while it saves time"""
    deterministic: bool = False
    """a request with a seed gets bit-identical results, independent of other requests, at a lower speed. For Llama,
    Qwen2, Qwen3 and Qwen3-MoE in float32 on CPU, log-probabilities also have the bits of a train engine with
    deterministic=true. Not covered for other models: requests whose cache is recomputed, because weights were written,
    the engine was offloaded, or a replica was lost"""


CONTEXT_LIMIT = 4096
"""upper bound of the default max_model_len, because the cache has room for the longest sequence in every row"""
DECODE_ROWS = 16
"""rows of a decode step of fixed shape"""
NO_STATE: Mapping[int, State] = MappingProxyType({})
GATHER_INDEX_BYTES = 64 << 20
"""bytes for cached row indices of groups of sequences; beyond it they are forgotten"""
LOGITS_COPIES = 4
"""float32 copies of the logits that sampling needs on a GPU"""


class Targets:
    """Places at which keys and values of some tokens are stored.

    `rows`: `[tokens]`, page * BLOCK + position within the page.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def blocks(self, num_kv_heads: int) -> tuple[Tensor, Tensor]:
        """Return for each token and head the block of a layer with so many heads, and the position within it."""
        if (found := self._blocks.get(num_kv_heads)) is None:
            heads = torch.arange(num_kv_heads, device=self.rows.device)
            blocks = (self.rows[:, None] // BLOCK * num_kv_heads + heads).flatten()
            offsets = (self.rows % BLOCK).repeat_interleave(num_kv_heads)
            found = self._blocks[num_kv_heads] = blocks, offsets
        return found


class GatherIndex(NamedTuple):
    """Arguments of `embedding_bag` to decode some sequences over their first `num_blocks` pages."""

    num_blocks: int
    key_rows: Tensor
    key_starts: Tensor
    """start of each bag; one bag per sequence, query head and page"""
    value_rows: Tensor
    value_starts: Tensor
    """start of each bag; one bag per sequence and query head"""


class CacheShape(NamedTuple):
    """Sizes of a cache."""

    layers: AttentionLayers
    """the layers with attention, with the heads of this rank"""
    num_pages: int
    """the page of rows without a sequence included"""
    num_states: int = 0
    """slots of recurrent states"""

    @property
    def page_elements(self) -> int:
        """Number of keys' and values' elements of one page."""
        own = [layer for layer in self.layers.values() if layer.source is None]
        return BLOCK * sum(layer.num_key_heads * (layer.key_width + layer.value_width) for layer in own)


@dataclass(frozen=True)
class CacheSizes:
    """Limits of one worker: the longest sequence, and the number of pages that its KV cache has."""

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
        """Longest sequence in tokens, from the options or the model."""
        config = self.config.get_text_config()
        limits = dict([max_positions(config)])
        if (longest := rope_limit(config)) is not None:
            limits["length up to which rotary angles are the same for all sequences"] = longest
        name, limit = min(limits.items(), key=lambda item: item[1])
        length = self.options.max_model_len or min(limit, CONTEXT_LIMIT)
        if length > limit:
            raise ConfigError(f"max_model_len={length} is beyond the model's {name}={limit}")
        return length

    @property
    def pages_per_sequence(self) -> int:
        """Pages of the longest sequence."""
        return num_pages(self.max_model_len)

    @property
    def page_bytes(self) -> int:
        """Bytes of keys and values of one page."""
        return CacheShape(self.layers, 1).page_elements * self.dtype.itemsize

    def cache_shape(self, device: torch.device, group: dist.ProcessGroup | None) -> CacheShape:
        """Return the shape of the largest cache that is needed and fits."""
        options, least = self.options, self.pages_per_sequence + 1
        rows = options.max_num_seqs
        most = rows * self.pages_per_sequence + 1
        if options.deterministic:  # the last tile is as large as the others
            rows += -rows % DECODE_ROWS
        elif self.state:  # states are kept, too
            rows *= 2
        budget, origin = options.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        if budget is None and device.type == "cuda":
            budget, origin = self._free_bytes(device, rows), "gpu_memory_utilization"
        if budget is not None and self.page_bytes:
            pages = torch.tensor(min(most, max(0, budget) // self.page_bytes), device=device)
            if group is not None:
                dist.all_reduce(pages, op=dist.ReduceOp.MIN, group=group)
            most = int(pages)
        if most < least:
            needed, left = (f"{nbytes / 2**20:.1f} MiB" for nbytes in (least * self.page_bytes, max(budget or 0, 0)))
            raise ConfigError(
                f"one sequence of max_model_len={self.max_model_len} needs {needed} of KV cache, {left} are left at "
                f"{origin}={getattr(options, origin)}; lower max_model_len or raise {origin}"
            )
        return CacheShape(self.layers, most, rows)

    def _free_bytes(self, device: torch.device, num_states: int) -> int:
        """Return the bytes of a GPU that are left for keys and values."""
        options, vocab_size = self.options, self.config.get_text_config().vocab_size
        give_back_cached_memory()  # the driver counts it as taken
        free, total = torch.cuda.mem_get_info(device)
        reserved = num_states * state_bytes(self.state) + LOGITS_COPIES * 4 * options.max_num_seqs * vocab_size
        return int(total * options.gpu_memory_utilization) - (total - free) - reserved


class PagedCache:
    """Keys and values of every attention layer and page. Layers of equal sizes have one allocation each.

    Keys and values are `[pages, BLOCK, kv_heads, width]` per layer, unless they are blocked: on CPU in float32, if
    torch has fbgemm, keys are `[pages, kv_heads, width, BLOCK]` and values `[pages, kv_heads, BLOCK, width]`. A query's
    product with a block of keys is then a weighted sum of rows (see `DecodePlan`).

    A layer that reads an earlier layer's keys and values has its tensors, and writes nothing.

    The cache begins as zeros: a masked position still takes part in the product, with weight zero.

    `state`: recurrent state of one sequence, by the number of the mixer.
    """

    def __init__(
        self, shape: CacheShape, dtype: torch.dtype, device: torch.device, state: Mapping[int, State] = NO_STATE
    ) -> None:
        self.states = SlotStates(state, shape.num_states)
        # torch has the weighted sum of rows as a fast kernel where it has fbgemm
        has_fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
        self.is_blocked = has_fbgemm and device.type == "cpu" and dtype == torch.float32
        self.layers, self.dtype, self.device = shape.layers, dtype, device
        self._num_pages = shape.num_pages
        self.keys: dict[int, Tensor] = {}
        """keys by layer"""
        self.values: dict[int, Tensor] = {}
        """values by layer"""
        self._storages: list[tuple[Tensor, Tensor]] = []
        """keys and values [layers, pages, ...] of the layers of one kind"""
        by_kind: dict[AttentionLayer, list[int]] = {}
        for index, layer in shape.layers.items():
            by_kind.setdefault(layer, []).append(index)
        for layer, indices in by_kind.items():
            if layer.source is None:
                self._storages.append(storage := self._allocate(layer, len(indices)))
                for index, keys, values in zip(indices, *storage, strict=True):
                    self.keys[index], self.values[index] = keys, values
        for index, layer in shape.layers.items():
            if layer.source is not None:
                self.keys[index], self.values[index] = self.keys[layer.source], self.values[layer.source]
        self.value_rows = {i: values.view(-1, values.shape[-1]) for i, values in self.values.items()}
        """the rows that `GatherIndex.value_rows` indexes, per layer"""
        self.key_rows = {i: keys.view(-1, BLOCK) for i, keys in self.keys.items()} if self.is_blocked else {}
        """the rows that `GatherIndex.key_rows` indexes, per layer"""
        self.routing: Tensor | None = None
        """experts that were chosen where a token was read, `[pages * BLOCK, layers, K]`, -1 if that was not recorded;
        None: nothing was asked to be"""
        self._gather_indices: dict[tuple[int, int, int, int, bytes], GatherIndex] = {}
        self._index_bytes = 0

    def _allocate(self, layer: AttentionLayer, num_layers: int) -> tuple[Tensor, Tensor]:
        pages, heads, width, values = num_layers, layer.num_key_heads, layer.key_width, layer.value_width
        keys = (heads, width, BLOCK) if self.is_blocked else (BLOCK, heads, width)
        positions = (heads, BLOCK) if self.is_blocked else (BLOCK, heads)
        make = partial(_zeros, dtype=self.dtype, device=self.device)
        return make((pages, self._num_pages, *keys)), make((pages, self._num_pages, *positions, values))

    @property
    def nbytes(self) -> int:
        """Size of keys, values and recurrent states in bytes."""
        return self.states.nbytes + sum(keys.nbytes + values.nbytes for keys, values in self._storages)

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of the memory."""
        return tuple(tensor.data_ptr() for storage in self._storages for tensor in storage)

    def write(self, layer: int, targets: Targets, key: Tensor, value: Tensor) -> None:
        """Write keys and values into one layer.

        `key`: `[tokens, kv_heads, key width]`. `value`: `[tokens, kv_heads, value width]`.
        """
        if self.layers[layer].source is not None:
            return
        if self.is_blocked:
            blocks, offsets = targets.blocks(key.shape[1])
            self.keys[layer].flatten(0, 1)[blocks, :, offsets] = key.flatten(0, 1)
            self.value_rows[layer].index_copy_(0, blocks * BLOCK + offsets, value.flatten(0, 1))
        else:
            for storage, new in ((self.keys, key), (self.values, value)):
                storage[layer].flatten(0, 1).index_copy_(0, targets.rows, new)

    def gathered(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of whole pages, `[sequences, kv_heads, pages * BLOCK, width]` each.

        `table`: pages of each sequence, `[sequences, pages]`.
        """
        keys, values = self.keys[layer][table], self.values[layer][table]
        if self.is_blocked:
            return keys.permute(0, 2, 1, 4, 3).flatten(2, 3), values.transpose(1, 2).flatten(2, 3)
        return keys.flatten(1, 2).transpose(1, 2), values.flatten(1, 2).transpose(1, 2)

    def at(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of tokens, `[tokens, kv_heads, width]` each."""
        keys, values = self.keys[layer], self.values[layer]
        if self.is_blocked:
            pages, offsets = rows // BLOCK, rows % BLOCK
            return keys[pages, :, :, offsets], values[pages, :, offsets]
        return keys.flatten(0, 1)[rows], values.flatten(0, 1)[rows]

    def gather_index(self, layer: int, table: Tensor) -> GatherIndex:
        """Return the row indices of sequences over their pages; recent results are cached.

        `layer`: index of the layer. Layers with the same heads and width of keys have the same row indices. `table`:
        pages of each sequence, `[sequences, pages]`.
        """
        heads, num_kv_heads, dim = self.layers[layer][:3]
        key = heads, num_kv_heads, dim, len(table), table.numpy().tobytes()
        if (found := self._gather_indices.get(key)) is not None:
            return found
        device, (num, blocks) = self.device, table.shape
        # half of the memory to read wherever it is enough
        dtype = torch.int32 if max(self.keys[layer].numel(), self.values[layer].numel()) < 2**31 else torch.int64
        kv_heads = torch.arange(heads, device=device) // (heads // num_kv_heads)
        block = (table[:, None] * num_kv_heads + kv_heads[:, None]).to(dtype)[..., None]
        found = GatherIndex(
            blocks,
            (block * dim + torch.arange(dim, dtype=dtype, device=device)).flatten(),
            torch.arange(0, num * heads * blocks * dim, dim, dtype=dtype, device=device),
            (block * BLOCK + torch.arange(BLOCK, dtype=dtype, device=device)).flatten(),
            torch.arange(0, num * heads * blocks * BLOCK, blocks * BLOCK, dtype=dtype, device=device),
        )
        num_bytes = sum(indices.nbytes for indices in found[1:])
        if self._index_bytes + num_bytes > GATHER_INDEX_BYTES:
            self._gather_indices.clear()
            self._index_bytes = 0
        self._index_bytes += num_bytes
        self._gather_indices[key] = found
        return found

    def record_routing(self, shape: RoutingShape) -> None:
        """Keep the chosen experts beside the keys and values from now on, and copy them with these."""
        if self.routing is None:
            sizes = self._num_pages * BLOCK, shape.num_layers, shape.top_k
            self.routing = torch.full(sizes, -1, dtype=torch.int64).to(shape.dtype).to(self.device)

    def routing_of(self, pages: Sequence[int], begin: int, length: int, steps: int) -> list[list[bytes]]:
        """Return the chosen experts of a burst, see `rlite.data.routing`: a list for each step."""
        assert self.routing is not None
        rows = upload(rows_of_pages(pages, begin, length - 1 + steps), self.device)
        table = self.routing[rows].flatten(1).cpu()
        found = [row.tobytes() for row in table.numpy()]
        first = length - begin
        return [found[:first], *([row] for row in found[first:])]

    def clear(self, pages: Sequence[int]) -> None:
        """Write zeros into pages that may hold non-finite values, before another sequence uses them."""
        for storage in self._storages:
            for tensor in storage:
                tensor[:, list(pages)] = 0

    def apply(self, copies: Copies) -> None:
        """Copy pages and states, one after the other."""
        for source, target in copies.pages:
            for storage in self._storages:
                for tensor in storage:
                    tensor[:, target] = tensor[:, source]
            if self.routing is not None:
                routing = self.routing.unflatten(0, (-1, BLOCK))
                routing[target] = routing[source]
        for source, target in copies.states:
            self.states.copy(source, target)


def rows_of_pages(pages: Sequence[int], start: int, stop: int) -> np.ndarray:
    """Return the places (see `Targets`) of some positions of a sequence.

    `stop`: end of the positions, exclusive.
    """
    positions = np.arange(start, stop)
    return np.asarray(pages, dtype=np.int64)[positions // BLOCK] * BLOCK + positions % BLOCK


def block_table(pages: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the pages of sequences as a table `[sequences, most pages]`, filled up with page TRASH."""
    table = np.full((len(pages), max(map(len, pages))), TRASH, dtype=np.int64)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    return upload(table, device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On CPU, numpy reserves memory only for written pages, while torch would write all of them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    line = 64  # bytes of the cache line at which torch aligns
    memory = np.zeros(math.prod(shape) * dtype.itemsize + line, dtype=np.uint8)
    start = -memory.ctypes.data % line
    return torch.from_numpy(memory[start : start + memory.size - line]).view(dtype).view(shape)
