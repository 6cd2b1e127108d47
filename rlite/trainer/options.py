"""Options that several trainers share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from rlite.algorithms import Schedule
from rlite.errors import ConfigError
from rlite.nn.liger import check_liger_installed
from rlite.nn.lora import LoraOptions
from rlite.parallel.mesh import ParallelDims
from rlite.trainer.losses import AvgLevel
from rlite.trainer.modules import OptimizerOptions


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model that is trained, and how it lies on the devices: world = ddp_size x fsdp x sp_size x tp_size."""

    model_name: str
    """folder or hub name of a Hugging Face checkpoint"""
    ddp_size: int = 1
    """copies of the model; each is sharded over world / ddp_size devices"""
    tp_size: int = 1
    """devices that share each matrix (tensor parallel)"""
    sp_size: int = 1
    """devices that share the tokens of a sequence (context parallel)"""
    max_length_per_device: int = 16384
    """tokens of one microbatch on a device; the longest sequence is tp_size x sp_size times as long"""
    balance_by: Literal["tokens", "flops"] = "tokens"
    """what devices share evenly: tokens, or estimated operations, in which long sequences count for more"""
    use_liger_kernel: bool = False
    """RMSNorm, rotary embedding and SwiGLU as Triton kernels (package liger-kernel); GPUs only"""
    gradient_checkpointing: bool = True
    """recompute activations in the backward pass"""
    offload_optimizer: bool = True
    """keep AdamW's state in host memory between optimizer steps"""
    avg_level: AvgLevel = "token"
    """mean of the loss over: all tokens; sequences' means; tokens divided by a constant length (Dr. GRPO's paper). A
    sequence is a row: a trajectory of several rows has as many means, not one"""
    lr: float = 5e-6
    """peak learning rate of AdamW"""
    weight_decay: float = 1e-2
    """of AdamW"""
    max_grad_norm: float = 1.0
    """global norm to which gradients are clipped"""
    scheduler: Schedule = "cosine"
    """after the warm-up"""
    warmup_ratio: float = 0.1
    """share of all optimizer steps in which the rate rises"""
    lr_end: float = 0.0
    """rate at the last step, to which linear, cosine and polynomial fall"""
    power: float = 1.0
    """of scheduler=polynomial: the rate falls as (share of steps left)^power"""
    disable_dropout: bool = True
    """train without the dropout of the checkpoint's config, which exports keep; passes that only infer never have it"""
    lora: LoraOptions | None = None
    """train adapters beside the weights, which stay as they are; null trains the weights"""

    def __post_init__(self) -> None:
        check_model_options(self)

    def optimizer(self, total_steps: int) -> OptimizerOptions:
        """AdamW over so many optimizer steps."""
        return OptimizerOptions(
            lr=self.lr,
            weight_decay=self.weight_decay,
            scheduler=self.scheduler,
            warmup_steps=round(self.warmup_ratio * total_steps),
            total_steps=total_steps,
            lr_end=self.lr_end,
            power=self.power,
        )

    def build_options(self, world_size: int, seed: int) -> dict[str, Any]:
        """What `RliteTrainEngine.build` is given in a world of so many devices.

        Raises: ConfigError with the equation that does not hold.
        """
        dims = ParallelDims.of_world(world_size, self.ddp_size, self.sp_size, self.tp_size)
        return {
            "tensor_parallel_size": world_size // dims.copies,
            "data_parallel_size": dims.copies,
            "tp_size": self.tp_size,
            "sp_size": self.sp_size,
            "max_tokens_per_microbatch": self.max_length_per_device,
            "balance_by": self.balance_by,
            "max_grad_norm": self.max_grad_norm,
            "gradient_checkpointing": self.gradient_checkpointing,
            "use_liger_kernel": self.use_liger_kernel,
            "offload_optimizer": self.offload_optimizer,
            "seed": seed,
        }


def check_model_options(options: Any) -> None:
    """Raise ConfigError for what no model can be trained with. Options may be missing, or None."""
    if getattr(options, "use_liger_kernel", None):
        check_liger_installed()
    for name, most in (("lr", math.inf), ("weight_decay", math.inf), ("lr_end", math.inf), ("warmup_ratio", 1.0)):
        value = getattr(options, name, None)
        if value is not None and not (0 <= value <= most and math.isfinite(value)):
            between = "a finite number of at least 0" if most == math.inf else "a number between 0 and 1"
            raise ConfigError(f"{name}={value}: expected {between}")
    _check_schedule(options)
    if (longest := getattr(options, "max_length_per_device", None)) is not None and longest < 1:
        raise ConfigError(f"max_length_per_device={longest}: expected at least 1")


def _check_schedule(options: Any) -> None:
    lr, lr_end, power, scheduler = (getattr(options, name, None) for name in ("lr", "lr_end", "power", "scheduler"))
    if power is not None and not (power > 0 and math.isfinite(power)):
        raise ConfigError(f"power={power}: expected a finite number above 0")
    if scheduler is not None and power not in (None, 1.0) and scheduler != "polynomial":
        raise ConfigError(f"power={power} is of scheduler=polynomial; scheduler={scheduler} has none")
    if lr_end and scheduler == "constant":
        raise ConfigError(f"lr_end={lr_end}: scheduler=constant never falls; use linear, cosine or polynomial")
    if lr_end and lr is not None and lr_end >= lr:
        raise ConfigError(f"lr_end={lr_end}: expected less than lr={lr}, the peak from which the rate falls")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Rows to learn from."""

    path: str
    """JSON, JSONL, CSV, Parquet or Arrow file, datasets folder or hub name; optionally split@path"""
    max_length: int = 4096
    """longest row in tokens; a longer one is cut at its end, and counted"""
    batch_size: int = 128
    """rows (of preferences: pairs) in one optimizer step"""
    escape_special_tokens: bool = False
    """special tokens in messages, but for the assistant's, are plain text"""

    def __post_init__(self) -> None:
        for name, least in (("max_length", 2), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"data.{name}={getattr(self, name)}: expected at least {least}")


@dataclass(frozen=True, kw_only=True)
class TestDataOptions:
    """Rows to evaluate on."""

    path: str | None = None
    """as data.path; null evaluates nothing"""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What runs the workers."""

    launcher: Literal["inprocess", "torchrun", "ray"] | None = None
    """what starts the workers; default: torchrun under torchrun, else one process"""
    num_devices: int | None = None
    """devices to use; default: one on CPU, all GPUs"""
