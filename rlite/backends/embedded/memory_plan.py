"""Limits of one worker: the longest sequence, and the number of sequences that its KV cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from rlite.backends.embedded.cache import CacheShape
from rlite.backends.embedded.deterministic import DECODE_ROWS
from rlite.backends.embedded.options import EmbeddedOptions
from rlite.backends.models.architecture import rope_limit
from rlite.errors import ConfigError
from rlite.runtime.parallel.host_memory import give_back_cached_memory
from rlite.runtime.parallel.tensor_plan import attention_shape

CONTEXT_LIMIT = 4096
"""upper bound of the default max_model_len, because every slot has room for the longest sequence"""


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of one worker's KV cache."""

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
        layers, heads, kv_heads, head_dim = attention_shape(self.config)
        return CacheShape(
            layers, num_slots, heads // self.tp_size, kv_heads // self.tp_size, self.max_model_len, head_dim
        )

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
            raise ConfigError(
                f"one sequence of max_model_len={length} needs {per_slot / 2**20:.0f} MiB of KV cache, "
                f"{max(budget, 0) / 2**20:.0f} MiB are left at "
                f"gpu_memory_utilization={options.gpu_memory_utilization}; "
                "lower max_model_len or raise gpu_memory_utilization"
            )
        return int(slots)
