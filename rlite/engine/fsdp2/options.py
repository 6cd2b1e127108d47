"""Options of the train executor "fsdp2"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rlite.errors import ConfigError, did_you_mean

BalanceBy = Literal["tokens", "flops"]
DTYPES = ("float32", "float64", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Fsdp2Options:
    """What `build` accepts beside placement."""

    max_tokens_per_microbatch: int = 16384
    """most tokens in one forward for each worker: those that share a microbatch (tp_size x sp_size) take so many times
    as much, and the longest sequence must fit"""
    balance_by: BalanceBy = "tokens"
    """what ranks share evenly: tokens, or estimated operations (`sequence_flops`), of which attention takes the square
    of a sequence's length: worth it where some are longer than 12 times the model's width"""
    param_dtype: str = "float32"
    """master weights and optimizer state"""
    compute_dtype: str | None = None
    """forward and backward; default: bfloat16 on CUDA, the master's on CPU"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this global norm in train_batch; infinity is off"""
    tp_size: int = 1
    """workers that share each matrix (tensor and sequence parallel); divides those that hold one copy of the model"""
    sp_size: int = 1
    """workers that share the tokens of each microbatch (context parallel); divides those that hold one copy"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    use_liger_kernel: bool = False
    """RMSNorm, rotary embedding and SwiGLU as Triton kernels (package liger-kernel); GPUs only"""
    offload_optimizer: bool = False
    """keep the optimizer's state in host memory but for the moment of a step; on CPU slots it is there anyway"""
    seed: int = 0
    """plus its data rank: what torch's generator of each worker's process is seeded with when the engine is built"""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "compute_dtype"):
            value = getattr(self, name)
            if value == "float16":
                raise ConfigError(
                    f"{name}='float16': small gradients are lost in float16, and losses are not scaled here. "
                    "Use bfloat16, which needs no scaling"
                )
            if value is not None and value not in DTYPES:
                raise ConfigError(f"{name}={value!r}: {did_you_mean(str(value), DTYPES)}")
        if self.balance_by not in get_args(BalanceBy):
            raise ConfigError(f"balance_by={self.balance_by!r}: expected one of {', '.join(get_args(BalanceBy))}")
        for name in ("max_tokens_per_microbatch", "tp_size", "sp_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")
        if not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm={self.max_grad_norm}: expected more than 0")
