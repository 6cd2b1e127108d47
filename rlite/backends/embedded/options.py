"""Options of the embedded executor. No torch here: options are checked in the driver."""

from __future__ import annotations

from rlite.config import Count
from rlite.runtime.replicas.options import ExecutorOptions


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
