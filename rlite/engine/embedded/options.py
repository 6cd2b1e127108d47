"""Options of the embedded executor. No torch here: options are checked in the driver."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from rlite.config import Count, Options


class EmbeddedOptions(Options):
    """Options of `executor="torch"`."""

    max_model_len: Annotated[int, Ge(2)] | None = None
    """longest sequence, prompt and completion together; default: the model's own limit, at most 4096"""
    max_num_seqs: Count = 128
    """sequences decoded together; each has a slot in the KV cache"""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.9
    """fraction of a GPU's memory for weights and KV cache. It limits the number of slots on a GPU and is unused on
    CPU"""
    dtype: Literal["float32", "float16", "bfloat16", "float64"] | None = None
    """type of weights and KV cache; default: the checkpoint's"""
    seed: int = 0
    """seed of requests without a seed of their own"""
    max_prefill_tokens: Count = 4096
    """tokens of one prefill forward; longer prompts are prefilled in chunks"""
    cuda_graphs: bool = True
    """on one GPU, capture decode steps as CUDA graphs and replay them; needs some memory beside weights and KV cache"""
    deterministic: bool = False
    """a request with a seed gets bit-identical results whatever else is generated, at a lower speed. For Llama, Qwen2
    and Qwen3 in float32 on CPU, log-probabilities also have the bits of a train engine with deterministic=true. For
    other models, requests are excepted whose cache is recomputed, because weights were written, the engine was
    offloaded, or a replica was lost"""
