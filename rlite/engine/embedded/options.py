"""What a user may say to the embedded executor. No torch here: options are checked in the driver."""

from __future__ import annotations

from dataclasses import dataclass

from rlite.errors import ConfigError, did_you_mean

DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, kw_only=True)
class EmbeddedOptions:
    """Options of `executor="torch"`."""

    max_model_len: int | None = None
    """longest sequence, prompt and completion together; default: the model's own limit, at most 4096"""
    max_num_seqs: int = 128
    """sequences decoded together; each has a slot in the KV cache"""
    gpu_memory_utilization: float = 0.9
    """part of a GPU's memory that weights and KV cache may take; bounds the number of slots there, unused on CPU"""
    dtype: str | None = None
    """of weights and KV cache; default: the checkpoint's"""
    seed: int = 0
    """for requests without a seed of their own"""
    max_prefill_tokens: int = 4096
    """tokens of one prefill forward; longer prompts are prefilled in chunks"""
    cuda_graphs: bool = True
    """on one GPU, record decode steps and replay them; needs some memory beside weights and KV cache"""
    deterministic: bool = False
    """a request with a seed gets the same bits whatever else is generated, at a price in speed. Not for a request whose
    cache is computed again in its midst: weights were written, the engine was offloaded, or its replica was lost"""

    def __post_init__(self) -> None:
        rules = {
            "max_model_len": (self.max_model_len is None or self.max_model_len >= 2, "at least 2, or None"),
            "max_num_seqs": (self.max_num_seqs >= 1, "at least 1"),
            "gpu_memory_utilization": (0 < self.gpu_memory_utilization <= 1, "in (0, 1]"),
            "max_prefill_tokens": (self.max_prefill_tokens >= 1, "at least 1"),
        }
        for name, (holds, expected) in rules.items():
            if not holds:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected {expected}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is not a dtype; {did_you_mean(str(self.dtype), DTYPES)}")
