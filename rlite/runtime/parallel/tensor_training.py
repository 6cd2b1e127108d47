"""Tensor parallelism with sequence parallelism for training, around unmodified Hugging Face models.

    embedding   split over the vocabulary, its output summed: the same on every rank
    layers      the residual stream is split over tokens; norms work on a part of the tokens
                attention and MLP gather the tokens, compute a part of the heads or columns, and scatter their sum
    the end     tokens are gathered after the last layer; norm and any head compute the same on every rank
    LM head     split over the vocabulary (Megatron-LM, Shoeybi et al. 2019; Korthikanti et al. 2022)

Parameters are DTensors over the tensor-parallel ranks, so that FSDP, optimizers and checkpoints see them whole. Inside
a forward they are this rank's plain tensors. A module that applies a whole parameter to a part of the tokens or heads
produces a part of its gradient; DTensor calls it `Partial`, and FSDP adds the parts up. Adapters (LoRA) are split with
their layer, B with its outputs or A with its inputs: the result is a part of the same sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers import PreTrainedModel

from rlite.errors import ConfigError
from rlite.runtime.parallel.collectives import gather, reduce_scatter, split, sum_backward, sum_forward
from rlite.runtime.parallel.fsdp import replace_parameters
from rlite.runtime.parallel.tensor_plan import bias_apart, check_heads, split_linears, vocabulary_rows

LAYER_INPUTS = {
    *("self", "hidden_states", "attention_mask", "position_ids", "cache_position", "use_cache", "output_attentions"),
    *("past_key_value", "past_key_values", "shared_kv_states", "kwargs"),
}
"""inputs that layers may have besides rotary angles: only hidden states are split over tokens"""


def check_split(model: PreTrainedModel, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Find the linear layers that training splits over `size` ranks.

    Returns:
        Layers split by columns and layers split by rows, by name.

    Raises:
        ConfigError: heads or layers do not divide; or the model's plan is missing or unknown.
    """
    check_heads(model.config, size)
    inputs = inspect.signature(type(_layers(model)[0]).forward).parameters
    if others := [name for name in inputs if name not in LAYER_INPUTS and not name.startswith("position_embeddings")]:
        raise ConfigError(
            f"{model.config.model_type!r} gives its layers {', '.join(others)}, which is not split over tokens; "
            "use one device for each copy"
        )
    columns, rows = split_linears(model)
    for axis, linears in ((0, columns), (1, rows)):
        for name, linear in linears.items():
            if linear.weight.shape[axis] % size:
                raise ConfigError(f"tensor parallel over {size} does not divide {name} {tuple(linear.weight.shape)}")
    return columns, rows


def parallelize(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the model, which is on meta, over the ranks of a one-dimensional mesh, by the model's own plan.

    Embedding and head are split if their number of rows divides and the embedding is torch's own; otherwise they are
    whole on every rank.

    Raises:
        ConfigError: as `check_split`.
    """
    columns, rows = check_split(model, mesh.size())
    group = mesh.get_group()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    vocabulary = [module for module in (embedding, head) if module is not None]
    is_plain = type(embedding) is nn.Embedding  # one that scales its output, say, keeps its own forward
    if not is_plain or any(module.weight.shape[0] % mesh.size() for module in vocabulary):
        vocabulary = []

    axis = {parameter: 0 for module in (*columns.values(), *vocabulary) for parameter in _of_outputs(module)}
    axis.update({parameter: 1 for row in rows.values() for parameter in _of_inputs(row)})
    _distribute(model, mesh, axis)

    layers, tokens = _layers(model), _TokenHooks(group)
    inside = {id(module) for part in (*layers, *vocabulary) for module in part.modules()}
    for module in model.modules():
        if module._parameters:
            whole: Placement = Partial() if id(module) in inside else Replicate()
            module.forward = partial(_on_local_parameters, module, module.forward, whole)
    for name, row in rows.items():
        row.forward = partial(_row_forward, getattr(row, "base_layer", row), row.forward, group)
        parent = model.get_submodule(name.rpartition(".")[0])
        parent.register_forward_pre_hook(tokens.gather, with_kwargs=True)
    layers[0].register_forward_pre_hook(tokens.split, with_kwargs=True)
    layers[-1].register_forward_hook(tokens.join, with_kwargs=True)
    model.base_model.register_forward_hook(tokens.join_recorded)
    if embedding in vocabulary:
        embedding.forward = partial(_embedding_forward, embedding, group)
    if head in vocabulary:
        head.forward = partial(_head_forward, head.forward, group)


def _of_outputs(layer: Any) -> list[nn.Parameter]:
    """Return the parameters that are split like the layer's outputs: weight and bias, or B of an adapter."""
    if not hasattr(layer, "base_layer"):
        return list(layer.parameters())
    return [*layer.base_layer.parameters(), *layer.lora_B.parameters()]


def _of_inputs(layer: Any) -> list[nn.Parameter]:
    """Return the parameters that are split like the layer's inputs: the weight, or A of an adapter."""
    if not hasattr(layer, "base_layer"):
        return [layer.weight]
    return [layer.base_layer.weight, *layer.lora_A.parameters()]


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(f"{model.config.model_type!r} has no list of layers to split; use one device for each copy")
    return layers


def _distribute(model: nn.Module, mesh: DeviceMesh, axis: Mapping[nn.Parameter, int]) -> None:
    """Replace every parameter by a DTensor on meta; shared ones stay shared."""

    def make(parameter: nn.Parameter) -> nn.Parameter:
        shape = list(parameter.shape)
        placement: Placement = Replicate()
        if (dim := axis.get(parameter)) is not None:
            shape[dim] //= mesh.size()
            placement = Shard(dim)
        local = torch.empty(shape, dtype=parameter.dtype, device="meta")
        whole = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        return nn.Parameter(whole, requires_grad=parameter.requires_grad)

    replace_parameters(model, make)


def _on_local_parameters(module: nn.Module, forward: Any, whole: Placement, *args: Any, **kwargs: Any) -> Any:
    """Return `forward(...)`, with each parameter replaced by this rank's part during the call.

    Args:
        module: owner of the parameters.
        forward: its original forward.
        whole: how gradients of parameters that are not split combine.
        *args: for `forward`.
        **kwargs: for `forward`.
    """
    held = dict(module._parameters)
    for name, parameter in held.items():
        if isinstance(parameter, DTensor):
            is_whole = parameter.placements[-1].is_replicate()
            local = parameter.to_local(grad_placements=[whole] if is_whole else None)
            module._parameters[name] = local
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters.update(held)


def _row_forward(row: nn.Linear, forward: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Return this rank's part of the tokens from its part of the columns. The whole bias of `row` must count once."""
    with bias_apart(row) as bias:
        out = reduce_scatter(forward(x), group, dim=1)
    if isinstance(bias, DTensor):
        out = out + bias.to_local(grad_placements=[Partial()])
    return out


def _embedding_forward(embedding: nn.Embedding, group: dist.ProcessGroup, ids: Tensor) -> Tensor:
    weight = embedding.get_parameter("weight").to_local()  # type: ignore[attr-defined]
    rows = vocabulary_rows(weight, ids, group.rank() * weight.shape[0])
    if embedding.padding_idx is not None:  # its row gets no gradient
        rows = torch.where((ids == embedding.padding_idx)[..., None], rows.detach(), rows)
    return sum_forward(rows, group)


def _head_forward(forward: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    return gather(forward(sum_backward(x, group)), group, dim=-1, grad="slice")


class _TokenHooks:
    """Hooks of a forward pass between whose layers each rank of a group holds a part of the tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def split(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of the first layer with this rank's tokens.

        Args:
            layer: the module of the hook.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        return _with_hidden(args, kwargs, lambda x: split(x, self._group, dim=1))

    def gather(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments with all tokens. Attention, which gets positions, gets no padding of the last part.

        Args:
            block: the module of the hook.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        return _with_hidden(args, kwargs, lambda x: _cut(gather(x, self._group, dim=1, grad="sum"), kwargs))

    def join(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> Any:
        """Return the output of the last layer with all tokens.

        Args:
            layer: the module of the hook.
            args: its positional arguments.
            kwargs: its keyword arguments.
            out: its output.
        """
        if isinstance(out, tuple):
            return (_cut(self._whole(out[0]), kwargs), *out[1:])
        return _cut(self._whole(out), kwargs)

    def join_recorded(self, model: nn.Module, args: tuple, out: Any) -> None:
        """Join recorded outputs: hidden states of all tokens, attentions of all heads.

        Args:
            model: the module of the hook.
            args: its positional arguments.
            out: its output.
        """
        if states := getattr(out, "hidden_states", None):
            *parts, last = states  # the last is not a layer's own, but what the model ends with
            length = out.last_hidden_state.shape[1]
            out["hidden_states"] = (*(x if x is None else _first(self._whole(x), length) for x in parts), last)
        if attentions := getattr(out, "attentions", None):
            out["attentions"] = tuple(map(self._whole, attentions))

    def _whole(self, x: Tensor) -> Tensor:
        return gather(x, self._group, dim=1, grad="slice")


def _cut(x: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    positions = kwargs.get("position_embeddings")
    return x if positions is None else _first(x, positions[0].shape[1])


def _first(x: Tensor, length: int) -> Tensor:
    return x if x.shape[1] == length else x[:, :length].clone()  # FSDP asks that a module does not return a view


def _with_hidden(args: tuple, kwargs: dict[str, Any], change: Any) -> tuple[tuple, dict[str, Any]]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
