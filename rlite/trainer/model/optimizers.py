"""The optimizer of a module that is trained: parameter groups by name, and AdamW or Muon for each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rlite.errors import ConfigError
from rlite.nn.base import BaseTrainModule
from rlite.runtime.parallel.fsdp import CombinedOptimizer, ShardedMuon
from rlite.trainer.model.options import OptimizerOptions, ParameterGroupOptions

REST = ParameterGroupOptions(pattern="")
"""the parameters that no pattern matches"""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with one optimizer, learning rate and weight decay."""

    names: list[str]
    is_muon: bool
    lr: float
    """peak learning rate"""
    weight_decay: float


def parameter_groups(module: BaseTrainModule, options: OptimizerOptions) -> list[ParameterGroup]:
    """Divide a module's parameters into groups, and freeze the groups with `freeze`.

    Muon takes matrices inside of layers, and the matrix of each expert. Embeddings, heads, norms, biases and the
    adapters of experts stay with AdamW.

    `module`: the module on meta, with its weights tied. Returns the groups of trained parameters, Muon's first.
    """
    matched = _match(module, options)
    hidden = {id(parameter) for unit in module.fsdp_units() for parameter in _matrices(unit)}
    groups = []
    for is_muon in (True, False) if options.name == "muon" else (False,):
        for group, names in matched:
            in_muon = [options.name == "muon" and id(module.get_parameter(name)) in hidden for name in names]
            if own := [name for name, is_hidden in zip(names, in_muon, strict=True) if is_hidden == is_muon]:
                decay = options.weight_decay if group.weight_decay is None else group.weight_decay
                lr = options.lr * group.lr_factor
                groups.append(ParameterGroup(names=own, is_muon=is_muon, lr=lr, weight_decay=decay))
    if not groups:
        raise ConfigError("parameter_groups: they freeze every parameter, so nothing is left to train")
    if options.name == "muon" and not groups[0].is_muon:
        raise ConfigError("optimizer=muon: no matrix inside of layers is trained; use adamw")
    return groups


def make_optimizer(module: nn.Module, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
    """Return the optimizer of a module with weights.

    Muon's update has the root mean square of AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training"), so both
    take the same learning rate and weight decay.
    """
    muon, adamw = list[dict[str, object]](), list[dict[str, object]]()
    for group in groups:
        own = [module.get_parameter(name) for name in group.names]
        (muon if group.is_muon else adamw).append({"params": own, "lr": group.lr, "weight_decay": group.weight_decay})
    optimizers: list[torch.optim.Optimizer] = [ShardedMuon(muon, adjust_lr_fn="match_rms_adamw")] if muon else []
    if adamw:
        # fused: each parameter's memory is passed over once instead of ten times
        optimizers.append(torch.optim.AdamW(adamw, fused=True))
    return optimizers[0] if len(optimizers) == 1 else CombinedOptimizer(*optimizers)


def _matrices(unit: nn.Module) -> list[nn.Parameter]:
    """Return the matrices of a layer and the stacks of its experts' matrices, without stacks of other things."""
    stacks, other = [], set[int]()
    for module in unit.modules():
        if isinstance(vars(module).get("num_experts"), int):  # of experts, of PEFT's wrappers around them, or a block's
            own = [parameter for parameter in module._parameters.values() if parameter is not None]
            stacks += [parameter for parameter in own if parameter.ndim == 3]
            if "parameter_name" in vars(module) or any(parameter.ndim == 3 for parameter in own):
                other |= {id(parameter) for parameter in module.parameters()}
    return [*stacks, *(p for p in unit.parameters() if p.ndim == 2 and id(p) not in other)]


def _match(module: nn.Module, options: OptimizerOptions) -> list[tuple[ParameterGroupOptions, list[str]]]:
    """Return each group that is trained with the names of its parameters, those of no group first."""
    rest = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    trained = []
    for key, group in options.parameter_groups.items():
        names = [name for name in rest if re.search(group.pattern, name)]
        if not names:
            why = f"no trained parameter outside of earlier groups has such a name; there are {_examples(rest)}"
            raise ConfigError(f"parameter_groups.{key}.pattern={group.pattern}: {why}")
        rest = [name for name in rest if name not in names]
        if group.freeze:
            for name in names:
                module.get_parameter(name).requires_grad_(False)
        else:
            trained.append((group, names))
    return [(REST, rest), *trained]


def _examples(names: list[str]) -> str:
    """Return names without repeating those that differ by the number of their layer."""
    examples = {re.sub(r"\.\d+\.", ".N.", name): name for name in reversed(names)}
    return ", ".join(reversed(examples.values())) or "none left"
