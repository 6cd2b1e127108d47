"""The memory of the engine that generates, for `rlite plan`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from rlite.engine.embedded.memory_plan import MemoryPlan
from rlite.engine.embedded.options import EmbeddedOptions
from rlite.engine.registry import registered_executors
from rlite.errors import ConfigError, did_you_mean
from rlite.parallel.tensor_plan import check_heads
from rlite.trainer.commands.options import RolloutPlanOptions


@dataclass(frozen=True, kw_only=True)
class RolloutMemory:
    """Bytes of generation on one device."""

    weights: int
    kv_cache: int
    num_seqs: int
    """sequences of `max_model_len` tokens that fit into the cache"""
    max_model_len: int

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return self.weights + self.kv_cache


def rollout_memory(
    options: RolloutPlanOptions, config: PreTrainedConfig, num_parameters: int, device_memory_gib: float | None
) -> RolloutMemory:
    """Return the memory that a replica takes on each of its devices.

    Executor torch allocates a slot of `max_model_len` tokens for each of `max_num_seqs` sequences, as far as they fit.
    The other executors fill the memory that they may have with cache. If the memory is not given, the cache is counted
    for `max_num_seqs` sequences of `max_model_len` tokens.

    Args:
        options: options of the engine.
        config: config of the model.
        num_parameters: parameters of the model.
        device_memory_gib: memory of one device; None if it is not known.

    Raises:
        ConfigError: the executor is unknown, the sizes do not divide the model, or not even one sequence fits.
    """
    known = registered_executors("inference")
    if options.executor not in known:
        raise ConfigError(f"rollout.executor={options.executor}: {did_you_mean(options.executor, known)}")
    check_heads(config, options.tp_size)
    is_embedded, dtype = options.executor == "torch", getattr(torch, options.dtype)
    longest = config.get_text_config().max_position_embeddings
    length = options.max_model_len or (None if is_embedded else longest)
    slots = MemoryPlan(EmbeddedOptions(max_model_len=length), config, dtype, options.tp_size)
    layers, _, _, heads, length, dim = slots.cache_shape(1)
    per_sequence = 2 * layers * heads * length * dim * dtype.itemsize
    weights = num_parameters * dtype.itemsize // options.tp_size
    num_seqs, cache = options.max_num_seqs, options.max_num_seqs * per_sequence
    if device_memory_gib is not None:
        room = int(device_memory_gib * options.gpu_memory_utilization * 2**30) - weights
        num_seqs = min(num_seqs, room // per_sequence) if is_embedded else room // per_sequence
        cache = num_seqs * per_sequence if is_embedded else room
        if num_seqs < 1:
            raise ConfigError(
                f"rollout: one sequence of max_model_len={length} needs {per_sequence / 2**30:.2f} GiB of KV cache, "
                f"and the weights leave {max(room, 0) / 2**30:.2f} GiB of device_memory_gib={device_memory_gib:g} at "
                f"gpu_memory_utilization={options.gpu_memory_utilization:g}; raise rollout.tp_size, or lower "
                "rollout.max_model_len"
            )
    return RolloutMemory(weights=weights, kv_cache=cache, num_seqs=num_seqs, max_model_len=length)
