"""Parameters of one rank that learn together: the whole module, or one of several adapters beside its layers.

An adapter of this file is two factors beside each of its linear layers, which every rank holds whole. They are no
parameters of the module, so FSDP and the module's checkpoints do not know them. Hooks add their products while the
adapter is active. Gradients accumulate on each rank, and are averaged over the ranks once, before a step. Adapters
therefore come and go while the module lives, each with its own layers, rank, gradients and optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rlite.backends.fsdp2.options import Fsdp2Options
from rlite.backends.models import batch_invariant, linear
from rlite.backends.models.lora import LoraTrainModule, base_name, endings, initial_factor, stored_layers, target_layers
from rlite.backends.models.routing import NO_ROUTING
from rlite.errors import CheckpointError, ConfigError, why_not_written
from rlite.nn.base import BaseTrainModule
from rlite.nn.options import LoraOptions
from rlite.runtime.parallel import fsdp
from rlite.runtime.parallel.context_parallel import reduce_scatter
from rlite.runtime.replicas.adapters import AdapterWeights, Factors, check_fit
from rlite.runtime.storage.atomic import publish, seal, staging

OPTIMIZER = "optimizer.pt"
"""file of an adapter's optimizer state, beside PEFT's files"""
ADDED_APART = "with tp_size={} training adds products in another order than serving; leave tp_size or deterministic out"


class Learner(ABC):
    """The accumulated gradients of some parameters, and their optimizer."""

    weight = 0.0
    """weight of the accumulated gradients"""
    is_sum = False
    """the accumulated gradients are those of a sum; otherwise of a weighted mean"""
    is_finite = True
    """true if every loss with accumulated gradients is finite"""

    @property
    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None if there is none."""

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that may have gradients."""

    @abstractmethod
    def clip(self, max_norm: float, mesh: fsdp.TrainMesh, group: dist.ProcessGroup) -> float:
        """Scale the gradients, as averaged over ranks, down to a global norm; a collective.

        Returns the norm before clipping.
        """

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the module compute with these parameters, and give gradients to them alone, inside the block."""
        yield

    def begin(self, is_sum: bool) -> None:
        """Prepare for the gradients of a further batch."""
        if not self.has_gradients():
            self.weight, self.is_finite = 0.0, True
        elif self.weight == 0:
            self.forget()  # gradients that a method of the user's left
        if self.weight and is_sum != self.is_sum:
            told = "gradients of a mean and of a sum cannot add up: one has a loss_weight_fn, the other has none"
            raise ConfigError(f"forward_backward: {told}; call optimizer_step between them")
        self.is_sum = is_sum

    def has_gradients(self) -> bool:
        """Return whether any gradient is accumulated. A method of the user's module may have made or dropped it."""
        return any(parameter.grad is not None for parameter in self.parameters())

    def accumulated(self) -> dict[str, Any]:
        """Return plain values that belong to the accumulated gradients."""
        return {"weight": self.weight, "is_finite": self.is_finite, "is_sum": self.is_sum}

    def resume(self, accumulated: Mapping[str, Any]) -> None:
        """Take over the result of `accumulated`; {} stands for no gradients."""
        self.weight, self.is_finite = accumulated.get("weight", 0.0), accumulated.get("is_finite", True)
        self.is_sum = accumulated.get("is_sum", False)

    def divisor(self, weight: float) -> float:
        """Return the number by which gradients are divided while they accumulate."""
        return 1.0 if self.is_sum else weight

    def scale_to(self, divisor: float) -> None:
        """Divide the accumulated gradients by another number than before."""
        if self.weight and (factor := self.divisor(self.weight) / divisor) != 1.0:
            torch._foreach_mul_([fsdp.local_tensor(p.grad) for p in self.parameters() if p.grad is not None], factor)

    def forget(self) -> None:
        """Drop the accumulated gradients."""
        for parameter in self.parameters():
            parameter.grad = None
        self.weight, self.is_finite = 0.0, True

    def set(self, settings: Mapping[str, Any]) -> None:
        """Set options of the optimizer, for this step and later ones."""
        groups = self.optimizer.param_groups if self.optimizer else []
        for group in groups:
            if unknown := settings.keys() - group.keys():
                told = f"{type(self.optimizer).__name__} has no {sorted(unknown)[0]}"
                raise ConfigError(f"optimizer_step: {told}; it has {', '.join(group.keys() - {'params'})}")
        for group in groups:
            group.update(settings)


class WholeModule(Learner):
    """The user's module, with the optimizer that it makes itself."""

    def __init__(self, module: BaseTrainModule) -> None:
        self._module = module

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The module's optimizer, which its methods may replace."""
        return self._module.optimizer

    def parameters(self) -> list[nn.Parameter]:
        """Return the module's parameters."""
        return list(self._module.parameters())

    def clip(self, max_norm: float, mesh: fsdp.TrainMesh, group: dist.ProcessGroup) -> float:
        """Scale the gradients down; see `Learner.clip`. FSDP has averaged them."""
        return fsdp.clip_gradients(self._module.parameters(), max_norm, mesh, group)

    def forget(self) -> None:
        """Drop the accumulated gradients, and what is known of the routers."""
        super().forget()
        (self._module.routing or NO_ROUTING).forget()


class Adapter(Learner):
    """A low-rank adapter beside linear layers of a module, with an AdamW of its own."""

    def __init__(
        self, module: BaseTrainModule, options: LoraOptions, seed: int, engine: Fsdp2Options, mesh: fsdp.TrainMesh
    ) -> None:
        self.options, self._module, self._mesh = options, module, mesh
        self._product = batch_invariant.linear if engine.deterministic else linear.linear
        self._scale, dtype = options.alpha / options.rank, getattr(torch, engine.param_dtype)
        self.factors = {name: self._initial(name, dtype, seed) for name in target_layers(module, options)}
        self._stored = {stored: n for stored, (n, _) in stored_layers(module).items() if n in self.factors}
        """names of the layers by their names in PEFT's files"""
        self._optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.0)

    def _initial(self, name: str, dtype: torch.dtype, seed: int) -> Factors:
        """Return factors with the initial values of a module's own adapter; see `initial_factor`."""
        layer: Any = self._module.get_submodule(name)
        down = initial_factor(f"{name}.lora_A.default.weight", (self.options.rank, layer.in_features), seed)
        up = torch.zeros(layer.out_features, self.options.rank)
        return Factors(*(nn.Parameter(each.to(self._module.device, dtype)) for each in (down, up)))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The adapter's AdamW."""
        return self._optimizer

    def parameters(self) -> list[nn.Parameter]:
        """Return the factors of all layers, in the order of the module."""
        return [p for pair in self.factors.values() for p in pair]  # type: ignore[misc]

    def divisor(self, weight: float) -> float:
        """Return 1: gradients are those of a sum until `clip`, so that calls of any sizes add up without rounding."""
        return 1.0

    def clip(self, max_norm: float, mesh: fsdp.TrainMesh, group: dist.ProcessGroup) -> float:
        """Average the gradients over all ranks, each of which has tokens of its own, and scale them down."""
        parameters = self.parameters()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat /= mesh.num_averaged * (1.0 if self.is_sum else self.weight)
        parts = flat.split([p.numel() for p in parameters])
        gradients = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        norms = torch._foreach_norm(gradients, dtype=torch.promote_types(gradients[0].dtype, torch.float32))
        norm = float(torch.stack(norms).double().square().sum().sqrt())
        if norm > max_norm:
            torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
        return norm

    @contextmanager
    def active(self) -> Iterator[None]:
        """Add the adapter's products to the outputs of its layers, and freeze the module, inside the block."""
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        hooks = []
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            for name, factors in self.factors.items():
                layer: Any = self._module.get_submodule(name)
                has_part = self._mesh.dims.tensor > 1 and layer.weight.placements[-1].is_shard(1)
                add = self._add_row if has_part else self._add
                hooks.append(layer.register_forward_hook(partial(add, factors)))
            yield
        finally:
            for handle in hooks:
                handle.remove()
            for parameter in trained:
                parameter.requires_grad_(True)

    def _add(self, factors: Factors, layer: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Return the output with the product added. A layer that is split by its outputs has a part of them here."""
        down, up = (factor.to(args[0].dtype) for factor in factors)
        if output.shape[-1] < len(up):
            up = self._own(up, 0)
        return output + self._product(self._product(args[0], down), up) * self._scale

    def _add_row(self, factors: Factors, layer: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Return the output of a layer that is split by its inputs, which has all outputs of this rank's tokens."""
        x, (down, up) = args[0], (factor.to(args[0].dtype) for factor in factors)
        if x.shape[-1] == down.shape[1]:  # the layer takes its part of a whole input
            x = self._own(x, -1)
        hidden = reduce_scatter(self._product(x, self._own(down, 1)), self._mesh.tensor.get_group(), dim=-2)
        return output + self._product(hidden, up) * self._scale

    def _own(self, whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(self._mesh.dims.tensor, dim)[self._mesh.tensor_rank]

    # -- values --------------------------------------------------------------------------------------------------

    def state(self, is_whole: bool) -> dict[str, Any]:
        """Return the state to resume from, as tensors on CPU and plain values.

        `is_whole`: with what all ranks have alike; otherwise this rank's gradients alone.
        """
        own: dict[str, Any] = {**self.accumulated(), "gradients": [p.grad for p in self.parameters()]}
        if is_whole:
            own |= {"options": self.options.model_dump(), "values": self.parameters()}
            own["optimizer"] = self._optimizer.state_dict()
        return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), own)

    @torch.no_grad()
    def take_state(self, whole: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Resume from a state."""
        self._optimizer.load_state_dict(whole["optimizer"])
        for parameter, value, gradient in zip(self.parameters(), whole["values"], own["gradients"], strict=True):
            parameter.copy_(value)
            parameter.grad = None if gradient is None else gradient.to(parameter)
        self.resume(own)

    def weights(self) -> AdapterWeights:
        """Return copies of the values on CPU."""
        copies = {
            stored: Factors(*(each.detach().cpu().clone() for each in self.factors[name]))
            for stored, name in self._stored.items()
        }
        return AdapterWeights(self.options.rank, self.options.alpha, copies)

    @torch.no_grad()
    def take(self, given: AdapterWeights, state: Mapping[str, Any] | None) -> None:
        """Take over the values of an adapter of equal shapes, and the state of its optimizer.

        Accumulated gradients are dropped.

        `state`: state of the optimizer; None begins anew, with the settings so far.
        """
        if state is None:
            self._optimizer.state.clear()
        else:
            before, why = self._optimizer.state_dict(), "its tensors have other shapes"
            try:
                self._optimizer.load_state_dict(dict(state))
                fits = all(own["exp_avg"].shape == p.shape for p, own in self._optimizer.state.items())
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                fits, why = False, str(error)
            if not fits:
                self._optimizer.load_state_dict(before)
                raise CheckpointError(f"the optimizer's state belongs to another adapter: {why}")
        self.forget()
        for stored, name in self._stored.items():
            for own, value in zip(self.factors[name], given.factors[stored], strict=True):
                own.copy_(value)

    def write(self, path: Path, facts: Mapping[str, Any], has_state: bool) -> None:
        """Write PEFT's files and the optimizer's state, whole or not at all. Gradients are left out.

        `facts`: JSON-serialisable facts, sealed with the files.
        """
        try:
            folder = staging(path)
            self.weights().write(folder, base_name(self._module), sorted(endings(self._module, self.factors)))
            if has_state:
                torch.save(self._optimizer.state_dict(), folder / OPTIMIZER)
            seal(folder, facts)
            publish(folder, path)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save makes either of a full disk
            raise CheckpointError(f"{path}: could not be written: {why_not_written(error)}") from error

    def move(self, device: torch.device) -> None:
        """Move the factors, their gradients and the optimizer's state."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(device)
            parameter.grad = None if parameter.grad is None else parameter.grad.to(device)
        for state in self._optimizer.state.values():
            state.update({k: v.to(device) for k, v in state.items() if k != "step"})


def check_adapter(module: BaseTrainModule, options: Fsdp2Options, adapter: LoraOptions) -> LoraOptions:
    """Refuse an adapter that cannot be trained beside a module, before a worker makes it.

    Returns the options with the whole names of the layers.
    """
    has_own = isinstance(module, LoraTrainModule) and module.lora is not None
    obstacles = {
        "the module has adapters of its own (actor.lora, add_lora)": has_own,
        ADDED_APART.format(options.tp_size): options.tp_size > 1 and options.deterministic,
        f"compile={options.compile!r} has compiled the layers without adapters; leave it out": bool(options.compile),
        "router_aux_loss_coef trains the whole module; leave it out": options.router_aux_loss_coef > 0,
        f"dropout={adapter.dropout} would draw from other adapters' numbers; set it to 0": adapter.dropout > 0,
        "target_parameters: experts have no adapters by name; leave them out": bool(adapter.target_parameters),
    }
    if found := [told for told, is_there in obstacles.items() if is_there]:
        raise ConfigError(f"adapters by name: {found[0]}")
    layers, known = target_layers(module, adapter), {name for name, _ in stored_layers(module).values()}
    if other := [name for name in layers if name not in known]:
        raise ConfigError(f"adapters by name: {other[0]} is the output embedding, or no plain nn.Linear; leave it out")
    return adapter.model_copy(update={"target_modules": layers})


def read_adapter(module: BaseTrainModule, folder: Path) -> LoraOptions:
    """Return the form of an adapter in PEFT's format."""
    found, layers = AdapterWeights.read(folder), stored_layers(module)
    check_fit(found, f"the adapter {folder}", {stored: layer.weight.shape for stored, (_, layer) in layers.items()})
    own = [name for stored, (name, _) in layers.items() if stored in found.factors]
    return LoraOptions(rank=found.rank, alpha=found.alpha, target_modules=own)
