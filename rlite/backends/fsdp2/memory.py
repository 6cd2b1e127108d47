"""Choice of the options that save memory, by the memory that is free when a train engine is built.

Gradient checkpointing costs a third more time, an optimizer's state on the host costs a copy in both directions at each
step, and resharded layers are gathered once more. Each is used only if the estimate of a rank's memory asks for it. The
results of training do not depend on the choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mode
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlite.backends.fsdp2.options import Fsdp2Options
from rlite.runtime.parallel.dims import ParallelDims
from rlite.runtime.parallel.host_memory import give_back_cached_memory

SAFE_SHARE = 0.8
"""share of the free memory that the estimate may take: the rest is for the estimate's error and for fragmentation"""
RESERVE = {"cuda": 2 << 30, "cpu": 1 << 28}
"""bytes of the output embedding's blocks and of libraries"""
SAVED_PER_FEATURE = 1.6
"""numbers that a layer keeps for its backward pass for each input and output of its matrices and each token: 72 kB per
token and layer of Qwen3-0.6B in bfloat16"""
ADAMW_STATES = 2


@dataclass(frozen=True)
class Savings:
    """The options that save memory."""

    gradient_checkpointing: bool
    offload_optimizer: bool
    reshard_after_forward: bool

    def text(self) -> str:
        """Return the options as `build` takes them."""
        return ", ".join(f"{name}={str(value).lower()}" for name, value in vars(self).items())


FASTEST = Savings(gradient_checkpointing=False, offload_optimizer=False, reshard_after_forward=False)
NAMES = tuple(vars(FASTEST))


@dataclass(frozen=True)
class Footprint:
    """Estimate of the bytes of one rank in training."""

    states: int
    """weights, gradients and reserve"""
    optimizer: int
    activations: int
    """kept for the backward pass of all layers"""
    checkpointed: int
    """the inputs of all layers, and what one layer keeps"""
    gathered: int
    """gathered weights of all layers"""
    gathered_units: int
    """gathered weights of two layers"""

    def total(self, savings: Savings) -> int:
        """Return the bytes with these options."""
        optimizer = 0 if savings.offload_optimizer else self.optimizer
        activations = self.checkpointed if savings.gradient_checkpointing else self.activations
        return self.states + optimizer + activations + self._gathered(savings)

    def _gathered(self, savings: Savings) -> int:
        return self.gathered_units if savings.reshard_after_forward else self.gathered


@dataclass(frozen=True)
class Choice:
    """Options that were chosen, and the reason."""

    savings: Savings
    chosen: Sequence[str]
    """names of the options that were not given"""
    needed: int
    """estimated bytes of a rank"""
    free: int
    """bytes that were free on the rank's device, the least of all ranks"""

    def text(self) -> str:
        """Return the choice in words for the start report."""
        by_memory = f"; chosen by free memory: {', '.join(self.chosen)}" if self.chosen else ""
        return f"{self.savings.text()}: about {self.needed / 2**30:.3g} of {self.free / 2**30:.3g} GiB free{by_memory}"


def choose(options: Fsdp2Options, footprint: Footprint, free: int, num_shards: int, device: str) -> Choice:
    """Return the fastest options that fit, or those that save most if none fits.

    `options`: options of the executor; a value that is not "auto" is kept. `free`: bytes that are free. `num_shards`:
    ranks that share the weights. A single rank has nothing to reshard. `device`: type of the device; an optimizer's
    state on a CPU is on the host already.
    """
    given = {name: value for name in NAMES if (value := getattr(options, name)) != "auto"}
    candidates = [replace(each, **given) for each in _candidates(num_shards > 1, device == "cuda")]
    fitting = (each for each in candidates if footprint.total(each) <= SAFE_SHARE * free)
    savings = next(fitting, candidates[-1])
    return Choice(savings, [name for name in NAMES if name not in given], footprint.total(savings), free)


def _candidates(can_reshard: bool, can_offload: bool) -> Iterator[Savings]:
    """Yield combinations from the fastest to those that save most."""
    savings = FASTEST
    yield savings
    for name, is_possible in (
        ("reshard_after_forward", can_reshard),
        ("gradient_checkpointing", True),
        ("offload_optimizer", can_offload),
    ):
        if is_possible:
            savings = replace(savings, **{name: True})
            yield savings


def footprint_of(
    module: Any, options: Fsdp2Options, dims: ParallelDims, compute: torch.dtype, device: str
) -> Footprint:
    """Return the estimate of a rank's memory for a module on meta."""
    master, units = getattr(torch, options.param_dtype), module.fsdp_units()
    num_parameters, num_trained = _numel(module, dims.tensor), _numel(module, dims.tensor, is_trained=True)
    per_token = [_saved_numbers(unit, module) * compute.itemsize for unit in units] or [0]
    inputs = sum(_width(unit) for unit in units) * compute.itemsize
    is_gathered = dims.num_shards > 1 or compute != master
    largest = max((_numel(unit, dims.tensor) for unit in units), default=0)
    tokens = options.max_tokens_per_microbatch
    return Footprint(
        states=(num_parameters + num_trained) // dims.num_shards * master.itemsize + RESERVE[device],
        optimizer=ADAMW_STATES * num_trained // dims.num_shards * master.itemsize,
        activations=int(sum(per_token)) * tokens,
        checkpointed=int(inputs + max(per_token)) * tokens,
        gathered=num_parameters * compute.itemsize * is_gathered,
        gathered_units=2 * largest * compute.itemsize * is_gathered,
    )


def _numel(module: nn.Module, tensor_ranks: int, is_trained: bool = False) -> int:
    """Return the parameters of a module that a tensor-parallel rank holds."""
    counted = (each.numel() for each in module.parameters() if each.requires_grad or not is_trained)
    return sum(counted) // tensor_ranks


def _matrices(unit: nn.Module) -> list[Tensor]:
    return [parameter for parameter in unit.parameters() if parameter.dim() > 1]


def _saved_numbers(unit: nn.Module, module: Any) -> float:
    """Return the numbers that a layer keeps for each token; of stacked experts, a token passes a few."""
    top_k = getattr(getattr(module, "config", None), "num_experts_per_tok", None) or 1
    sizes = (sum(each.shape[-2:]) * (top_k if each.dim() > 2 else 1) for each in _matrices(unit))
    return SAVED_PER_FEATURE * sum(sizes)


def _width(unit: nn.Module) -> int:
    """Return the width of a layer's input, from which most of its matrices read."""
    return mode(each.shape[-1] for each in matrices) if (matrices := _matrices(unit)) else 0


def free_bytes(device: torch.device, group: dist.ProcessGroup) -> int:
    """Return the bytes that are free for each rank, the least of all ranks; a collective.

    `device`: device of this rank. CPU slots share the memory of their host.
    """
    if device.type == "cuda":
        give_back_cached_memory()
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available // group.size()
    least = torch.tensor(free, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return int(least)
