"""Mixtures of experts of unmodified Hugging Face models: their form, their computation, and their division over ranks.

Experts are one module for each layer, `experts(hidden [t, H], chosen [t, K], weights [t, K])`, whose parameters hold a
matrix for each expert: `gate_up_proj` [E, 2 I, H], `down_proj` [E, H, I]. A model with experts of another form is
refused.

Division in training. The other parameters of a copy are divided over fsdp x seq x tensor, experts a second time over
efsdp x expert:

    expert   each rank holds some experts whole. Every rank of a copy has tokens of its own (tensor parallel ranks hold
             parts of the tokens between blocks), and sends each token to the ranks of its experts and back, by
             transformers' `AllToAllEP`
    efsdp    FSDP shards those experts

Adapters of experts (LoRA) have PEFT's layout, in which the rows of one expert do not lie together. They are divided
like the other parameters, and each rank merges those of its experts into their weights for the time of a forward pass.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel

from rlite.errors import ConfigError
from rlite.runtime.parallel.fsdp import TrainMesh
from rlite.runtime.parallel.processes import subgroup

try:
    from transformers.distributed.expert_parallel import apply_expert_parallelism
except ImportError:  # before 5.22
    apply_expert_parallelism = None

NAMES = re.compile(r"expert|moe|(^|\.)router(_gate)?\.", re.IGNORECASE)
"""parts of parameter names that only mixtures of experts have"""
CORRECTION = re.compile(r"(correction|expert)_bias$")
"""names of the biases that routers add to the scores for the choice of experts alone"""
DISPATCHED, SHARDED = "ep_dispatch_experts", "grouped_gemm"
"""styles of transformers' expert parallel plans"""
DISPATCHES = "is_transposed"
"""attribute of experts whose computation can be chosen"""
_WRAPPED = re.compile(r"\.base_layer(?=\.|$)")


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Return the modules that hold a layer's experts, by name. The name of a module in adapters includes theirs."""
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def _holds_experts(module: Any) -> bool:
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return any(p.dim() == 3 for p in own) and isinstance(vars(module).get("num_experts"), int)


def divided_apart(model: nn.Module) -> list[nn.Module]:
    """Return the modules with experts and PEFT's wrappers around them: tensor parallel does not divide them."""
    return [part for name, experts in experts_of(model).items() for part in (*_adapters(model, name), experts)]


def plain_name(name: str) -> str:
    """Return a name without adapters: `mlp.experts.down_proj` for `mlp.experts.base_layer.base_layer.down_proj`."""
    return _WRAPPED.sub("", name)


def block_of(model: nn.Module, name: str) -> nn.Module:
    """Return the module that holds the experts called `name`, and their router."""
    return model.get_submodule(plain_name(name).rpartition(".")[0])


def corrections(model: nn.Module) -> dict[str, Tensor]:
    """Return the biases for the choice of experts, by name: buffers or parameters, one number for each expert."""
    return {name: tensor for name, tensor in (*model.named_buffers(), *model.named_parameters()) if corrects(name)}


def corrects(name: str) -> bool:
    """Return whether `name` is that of a router's correction bias."""
    return CORRECTION.search(name) is not None


def other_form(model: PreTrainedModel, inputs: Mapping[str, Any]) -> str | None:
    """Return why the experts of a small model have another form than rlite knows; None if they do not."""
    found, names = experts_of(model), [name for name, _ in model.named_parameters() if NAMES.search(name)]
    if not names:
        return None
    wrong = "is a mixture of experts in a form that rlite does not know"
    fused = [f"{name}." for name in found]
    loose = [name for name in names if ".experts." in name and not name.startswith(tuple(fused))]
    if loose or not found:
        return f"{wrong}: {(loose or names)[0]} is no matrix of fused experts"
    strange: list[str] = []

    def look(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        is_known = len(args) == 3 and all(isinstance(x, Tensor) and x.dim() == 2 for x in args)
        if not is_known or args[1].is_floating_point() or args[1].shape != args[2].shape:
            strange.append(name)

    hooks = [module.register_forward_pre_hook(partial(look, name)) for name, module in found.items()]
    try:
        model.base_model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if strange:
        return f"{wrong}: {strange[0]} is not called with tokens, chosen experts and their weights"
    numbers = {module.num_experts for module in found.values()}
    return f"{wrong}: its layers have different numbers of experts, {sorted(numbers)}" if len(numbers) > 1 else None


# -- computation -----------------------------------------------------------------------------------------------------


def implementation_for(name: str, device_type: str, dtype: torch.dtype) -> str:
    """Return transformers' implementation of experts for the option `experts_implementation`."""
    if name == "auto":
        return "grouped_mm" if device_type == "cuda" and dtype != torch.float64 else "eager"
    if name == "grouped_mm" and dtype == torch.float64:
        raise ConfigError("experts_implementation=grouped_mm does not compute in float64; use eager or batched_mm")
    return name


def use_implementation(model: PreTrainedModel, name: str) -> None:
    """Make a model's experts compute with one of transformers' implementations. Nothing changes without experts."""
    for module in experts_of(model).values():
        if DISPATCHES in vars(module):  # transformers' own setter looks for the source of the class, here a subclass
            module.config._experts_implementation = name


def check_implementation(model: PreTrainedModel, name: str, device_type: str, dtype: torch.dtype) -> None:
    """Check that the model's experts can compute with the implementation of the option `experts_implementation`."""
    if name == "auto":
        return
    if not experts_of(model):
        raise ConfigError(f"experts_implementation={name}: {model.config.model_type!r} has no experts; leave it out")
    if name != "eager" and not all(DISPATCHES in vars(module) for module in experts_of(model).values()):
        kind = model.config.model_type
        raise ConfigError(f"experts_implementation={name}: {kind!r} computes its experts in code of its own; use eager")
    implementation_for(name, device_type, dtype)


class _ScaledGradient(torch.autograd.Function):
    """A tensor itself, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


# -- division over ranks ---------------------------------------------------------------------------------------------


def check_expert_parallel(model: PreTrainedModel, size: int) -> None:
    """Check that the experts divide among `size` ranks."""
    for name, experts in _experts_to_divide(model).items():
        if experts.num_experts % size:
            problem = f"ep_size={size} does not divide the {experts.num_experts} experts of {plain_name(name)}"
            raise ConfigError(f"{problem}; choose a divisor of {experts.num_experts}")
    if apply_expert_parallelism is None:
        told = f"ep_size={size}: transformers {transformers.__version__} has no expert parallelism"
        raise ConfigError(f"{told}; pip install 'transformers>=5.22', or use ep_size=1")
    expert_plan(model)


def _experts_to_divide(model: PreTrainedModel) -> dict[str, Any]:
    """Return the modules that hold a layer's experts, by name, of a model that has any."""
    if not (experts := experts_of(model)):
        raise ConfigError(f"expert parallel: {model.config.model_type!r} has no experts to divide; use ep_size=1")
    return experts


def expert_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return transformers' expert parallel plan of a model by the full names of its modules and parameters."""
    kind, experts = model.config.model_type, _experts_to_divide(model)
    styles = {f"{model.base_model_prefix}.{key}": style for key, style in _plan_of(model).items()}
    plan = {}
    for name, module in experts.items():
        own = {f"{name}.{key}": SHARDED for key in module._parameters}
        for part, expected in {**own, name: DISPATCHED}.items():
            plain = plain_name(part)
            style = next((s for pattern, s in styles.items() if fnmatch.fnmatchcase(plain, pattern)), None)
            if style != expected:
                told = f"its plan says {style!r}" if style else "no plan of transformers names it"
                raise ConfigError(f"expert parallel: {kind!r} does not divide {plain}: {told}; use ep_size=1")
            plan[part] = expected
    return plan


def _plan_of(model: PreTrainedModel) -> Mapping[str, str]:
    return getattr(model.config, "base_model_ep_plan", None) or {}  # of transformers, which older releases lack


def divide(model: PreTrainedModel, mesh: TrainMesh) -> list[nn.Module]:
    """Divide the experts of a model, which is on meta, over the ranks of the mesh, and bind their adapters.

    Returns the experts: the modules that FSDP shards over the experts' own mesh.
    """
    experts, dims = experts_of(model), mesh.dims
    # a rank's experts see the tokens of `expert` ranks, of which FSDP averages over efsdp
    factor = dims.tensor / dims.expert
    for name, module in experts.items():
        adapters = _adapters(model, name)
        if adapters or factor != 1:
            rank = mesh.expert.get_local_rank() if dims.expert > 1 else 0
            module.forward = partial(_compute, module, module.forward, factor, adapters, rank)
        if adapters:  # PEFT's own forward would register and remove parameters around each call
            model.get_submodule(plain_name(name)).forward = partial(_call, module)
    if dims.expert > 1:
        alone = DeviceMesh.from_group(subgroup([dist.get_rank()]), mesh.expert.device_type)
        apply_expert_parallelism(model, mesh.expert, alone, expert_plan(model), "all_to_all")
    return list(experts.values())


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def wraps_parameter(module: nn.Module) -> bool:
    """Return whether a module is PEFT's wrapper around a parameter of experts."""
    return "parameter_name" in vars(module)


def adapter_of(model: nn.Module, name: str, parameter: str) -> Any:
    """Return PEFT's wrapper around a parameter of experts; None if it has no adapter."""
    wrapper: Any = model.get_submodule(name)
    while wraps_parameter(wrapper) and wrapper.parameter_name != parameter:
        wrapper = wrapper.base_layer
    return wrapper if wraps_parameter(wrapper) else None


def _adapters(model: nn.Module, name: str) -> list[Any]:
    """Return PEFT's wrappers around the experts called `name`, one for each parameter with an adapter."""
    depth = name.count(".base_layer")
    return [model.get_submodule(plain_name(name) + ".base_layer" * i) for i in range(depth)]


def _compute(module: Any, forward: Any, factor: float, adapters: list[Any], rank: int, *args: Any) -> Tensor:
    """Return `forward(...)` of this rank's experts, with adapters merged into their weights during the call."""
    held = dict(module._parameters)
    active = {each.parameter_name: each for each in adapters if not each.disable_adapters}
    try:
        for name, weight in held.items():
            used = weight if factor == 1 else _ScaledGradient.apply(weight, factor)
            if (adapter := active.get(name)) is not None:
                used = torch.baddbmm(used, *adapter_factors(adapter, rank, len(weight)), alpha=adapter.scaling[DEFAULT])
            module._parameters[name] = used
        return forward(*args)
    finally:
        module._parameters.update(held)


DEFAULT = "default"
"""PEFT's name of the one adapter"""


def adapter_factors(adapter: Any, rank: int = 0, num_experts: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the two factors of an adapter's product for the experts of a rank: [e, rows, r] and [e, r, columns].

    PEFT holds A as [E r, in], expert after expert, and B as [out, r E], in which the experts of one column of the rank
    lie together.

    `num_experts`: experts of a rank; None is all.
    """
    down, up = (_local(part[DEFAULT].weight) for part in (adapter.lora_A, adapter.lora_B))
    return stacked_factors(down, up, adapter.num_experts, is_transposed(adapter), rank, num_experts)


def is_transposed(adapter: Any) -> bool:
    """Return whether the experts below an adapter hold their matrices as [in, out]."""
    return bool(vars(adapter.get_base_layer()).get(DISPATCHES, False))


def stacked_factors(
    down: Tensor, up: Tensor, total: int, has_inputs_first: bool, rank: int = 0, num_experts: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the factors of `adapter_factors` from PEFT's tensors.

    `down`: A, [E r, in]. `up`: B, [out, r E]. `has_inputs_first`: the matrices are [in, out], and not [out, in].
    `num_experts`: experts of a rank; None is all.
    """
    count = total if num_experts is None else num_experts
    own = slice(rank * count, (rank + 1) * count)
    a, b = down.view(total, -1, down.shape[-1])[own], up.view(len(up), -1, total).permute(2, 0, 1)[own]
    return (a.transpose(1, 2), b.transpose(1, 2)) if has_inputs_first else (b, a)


def _local(parameter: Tensor) -> Tensor:
    """Return a whole parameter of an adapter, of which this rank computes a part of the gradient."""
    return parameter.to_local(grad_placements=[Partial()]) if isinstance(parameter, DTensor) else parameter
