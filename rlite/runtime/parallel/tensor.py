"""Tensor parallelism of an unmodified Hugging Face model, by its own plan (`base_model_tp_plan` in transformers).

Inference: shards are plain tensors, in contiguous blocks that are uneven if a size does not divide. Embedding and head
are also split over the vocabulary.

Training, with sequence parallelism (Megatron-LM, Shoeybi et al. 2019; Korthikanti et al. 2022):

    embedding   split over the vocabulary, its output summed: the same on every rank
    layers      the residual stream is split over tokens; norms work on a part of the tokens
                attention and MLP gather the tokens, compute a part of the heads or columns, and scatter their sum
    the end     tokens are gathered after the last layer; norm and any head compute the same on every rank
    LM head     split over the vocabulary

Parameters are DTensors over the tensor-parallel ranks, so that FSDP, optimizers and checkpoints see them whole. Inside
a forward they are this rank's plain tensors. A module that applies a whole parameter to a part of the tokens or heads
produces a part of its gradient; DTensor calls it `Partial`, and FSDP adds the parts up. Adapters (LoRA) are split with
their layer, B with its outputs or A with its inputs: the result is a part of the same sum.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers import PreTrainedConfig, PreTrainedModel

from rlite.errors import ConfigError
from rlite.runtime.parallel.context_parallel import gather, reduce_scatter, split, sum_backward, sum_forward
from rlite.runtime.parallel.fsdp import replace_parameters
from rlite.runtime.parallel.shards import Box

COLUMN, ROW = "colwise", "rowwise"


def attention_shape(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    """Return the numbers of layers, query heads and key heads of a causal language model, and the size of a head.

    Raises:
        ConfigError: the config does not state them, so the model has no attention.
    """
    text = config.get_text_config()
    key_heads, head_dim = (
        vars(text).get(text.attribute_map.get(key, key)) for key in ("num_key_value_heads", "head_dim")
    )
    try:
        heads = text.num_attention_heads
    except AttributeError as error:
        raise ConfigError(f"the config of {config.model_type!r} states no num_attention_heads") from error
    return text.num_hidden_layers, heads, key_heads or heads, head_dim or text.hidden_size // heads


def check_heads(config: PreTrainedConfig, world_size: int) -> None:
    """Check that the attention heads divide among the ranks.

    Raises:
        ConfigError: the heads do not divide.
    """
    _, heads, key_heads, _ = attention_shape(config)
    for name, num in (("num_key_value_heads", key_heads), ("num_attention_heads", heads)):
        if num % world_size:
            raise ConfigError(
                f"tensor parallel over {world_size} does not divide {name}={num} of {config.model_type!r}; "
                f"choose a divisor of {num}"
            )


def _refusal(model: PreTrainedModel, problem: str) -> str:
    return f"{model.config.model_type!r} {problem}; use one device for each copy"


def split_linears(model: PreTrainedModel, experts: Collection[nn.Module] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Find the linear layers that the model's own plan splits.

    A layer with an adapter is PEFT's layer, which holds the linear layer as `base_layer`.

    Args:
        model: the model.
        experts: modules that are divided otherwise.

    Returns:
        Layers split by columns (their outputs) and layers split by rows (their inputs), by name.

    Raises:
        ConfigError: the model has no plan; or the plan has an unknown style, or leaves out a block that mixes tokens.
    """
    prefix = model.base_model_prefix + "."
    styles = {prefix + name: style for name, style in (model.config.base_model_tp_plan or {}).items()}
    if not styles:
        raise ConfigError(_refusal(model, "has no tensor parallel plan"))
    split: dict[str, dict[str, Any]] = {COLUMN: {}, ROW: {}}
    apart = {id(part) for each in experts for part in (each, *each.parameters())}
    for name, module in (*model.named_modules(), *model.named_parameters()):
        if id(module) in apart:
            continue
        style = next((s for pattern, s in styles.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if style is None or style.startswith("replicated"):
            continue
        if style not in split or not isinstance(getattr(module, "base_layer", module), nn.Linear):
            raise ConfigError(_refusal(model, f"asks for {style!r} at {name!r}, which is not supported"))
        split[style][name] = module
    _check_blocks(model, split[COLUMN], split[ROW])
    return split[COLUMN], split[ROW]


def _check_blocks(model: PreTrainedModel, columns: Mapping[str, Any], rows: Mapping[str, Any]) -> None:
    """Check that every attention, and every other block in the plan, starts with columns and ends with one row.

    Raises:
        ConfigError: a block does not.
    """
    entries = ", ".join(sorted(model.config.base_model_tp_plan or {}))
    begins, ends = ([name.rpartition(".")[0] for name in names] for names in (columns, rows))
    split = set(begins) & {block for block, count in Counter(ends).items() if count == 1}
    # what mixes tokens knows its layer's number, for the cache
    mixers = {name for name, module in model.named_modules() if hasattr(module, "layer_idx")}
    layers = {name for name in mixers if any(block.startswith(f"{name}.") for block in split)}
    if others := sorted((mixers - layers | {*begins, *ends}) - split):
        raise ConfigError(
            f"the tensor parallel plan of {model.config.model_type!r} ({entries}) does not split {others[0]!r} between "
            "its columns and one row; use one device for each copy"
        )
    _check_per_head(model, {**columns, **rows})


def _check_per_head(model: PreTrainedModel, split: Mapping[str, Any]) -> None:
    """Check that no tensor between the columns and the row of a block has a part for each head or each column.

    Raises:
        ConfigError: there is such a tensor, which would be whole beside split columns.
    """
    _, heads, key_heads, head_dim = attention_shape(model.config)
    widths: dict[str, set[int]] = defaultdict(lambda: {heads, key_heads})
    for name, module in split.items():
        linear = getattr(module, "base_layer", module)
        widths[name.rpartition(".")[0]] |= {linear.out_features, linear.in_features}
    for name, parameter in model.named_parameters():
        block = next((block for block in widths if name.startswith(f"{block}.")), None)
        is_split = any(name.startswith(f"{part}.") for part in split)
        if block is not None and not is_split and parameter.numel() in widths[block] - {head_dim}:
            raise ConfigError(
                f"the tensor parallel plan of {model.config.model_type!r} leaves {name} {list(parameter.shape)} whole, "
                "which has a part for each head or column; use one device for each copy"
            )


@contextmanager
def bias_apart(row: nn.Module) -> Iterator[Any]:
    """Take away the bias of a layer that is split by rows: it is whole on every rank and must count once.

    Yields:
        The bias, or None.
    """
    bias, row._parameters["bias"] = row._parameters.get("bias"), None
    try:
        yield bias
    finally:
        row._parameters["bias"] = bias


def vocabulary_rows(weight: Tensor, ids: Tensor, start: int) -> Tensor:
    """Return this rank's summand of an embedding that is split over the vocabulary; zero for other ranks' tokens.

    Args:
        weight: this rank's rows.
        ids: token ids.
        start: token id of the first row.
    """
    local = ids - start
    is_here = (local >= 0) & (local < weight.shape[0])
    return F.embedding(local.where(is_here, 0), weight) * is_here[..., None]


def span(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return start and stop of this rank's part of `size` elements.

    Args:
        size: number of elements.
        rank: this rank.
        world_size: number of ranks. If it does not divide `size`, the first parts are longer by one.
    """
    base, extra = divmod(size, world_size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def check_tensor_parallel(model: PreTrainedModel, world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the linear layers that serving splits over the ranks, by columns and by rows.

    Raises:
        ConfigError: heads do not divide; or the model's plan or embedding is missing or unknown.
    """
    check_heads(model.config, world_size)
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding:
        raise ConfigError(
            f"{model.config.model_type!r} has an embedding of its own kind, {type(embedding).__name__}, "
            "which is not split; use tensor_parallel_size=1"
        )
    return split_linears(model)


class TensorParallelPlan:
    """Layout of one causal language model's parameters over the ranks of a group. The model may be on meta.

    Args:
        model: the model.
        group: the ranks; None is a single rank.

    Raises:
        ConfigError: heads do not divide; or the model's plan is missing or unknown.
    """

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup | None) -> None:
        self.model, self.group = model, group
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self._axis: dict[nn.Parameter, int] = {}
        self._rows: list[nn.Linear] = []
        if self.world_size > 1:
            columns, rows = check_tensor_parallel(model, self.world_size)
            self._rows = list(rows.values())
            for column in (*columns.values(), self._embedding, self._head):
                self._axis.update(dict.fromkeys(column.parameters(), 0))
            self._axis.update((row.get_parameter("weight"), 1) for row in self._rows)

    def box(self, parameter: nn.Parameter) -> Box:
        """Return the block of a whole parameter that belongs to this rank.

        Call it before the shard replaces the parameter.
        """
        box = [slice(0, n) for n in parameter.shape]
        axis = self._axis.get(parameter)
        if axis is not None:
            box[axis] = slice(*span(parameter.shape[axis], self.rank, self.world_size))
        return tuple(box)

    def install(self) -> None:
        """Replace the forwards of modules that need other ranks. Nothing changes for a single rank."""
        if self.group is None or self.world_size == 1:
            return
        embedding, head = self._embedding, self._head
        start, _ = span(embedding.num_embeddings, self.rank, self.world_size)
        embedding.forward = partial(_embedding_inference, embedding, start, self.group)
        head.forward = partial(_head_inference, head.forward, head.out_features, self.group)
        for module in self._rows:
            module.forward = partial(_row_inference, module, module.forward, self.group)  # type: ignore[method-assign]


def _embedding_inference(module: nn.Embedding, start: int, group: dist.ProcessGroup, ids: torch.Tensor) -> torch.Tensor:
    out = vocabulary_rows(module.weight, ids, start)
    dist.all_reduce(out, group=group)
    return out


def _row_inference(module: nn.Linear, forward: Any, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    with bias_apart(module) as bias:
        out = forward(x)
    dist.all_reduce(out, group=group)
    return out if bias is None else out + bias


def _head_inference(forward: Any, vocab_size: int, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    local, world_size = forward(x), group.size()
    sizes = [stop - start for start, stop in (span(vocab_size, r, world_size) for r in range(world_size))]
    local = F.pad(local, (0, max(sizes) - local.shape[-1])).contiguous()
    parts = [torch.empty_like(local) for _ in sizes]
    dist.all_gather(parts, local, group=group)
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)


LAYER_INPUTS = {
    *("self", "hidden_states", "attention_mask", "position_ids", "cache_position", "use_cache", "output_attentions"),
    *("past_key_value", "past_key_values", "shared_kv_states", "kwargs"),
}
"""inputs that layers may have besides rotary angles: only hidden states are split over tokens"""


def check_split(
    model: PreTrainedModel, size: int, experts: Collection[nn.Module] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Find the linear layers that training splits over `size` ranks.

    Args:
        model: the model.
        size: number of ranks.
        experts: modules that are divided otherwise.

    Returns:
        Layers split by columns and layers split by rows, by name.

    Raises:
        ConfigError: heads or layers do not divide; or the model's plan is missing or unknown.
    """
    check_heads(model.config, size)
    inputs = inspect.signature(type(_layers(model)[0]).forward).parameters
    if others := [name for name in inputs if name not in LAYER_INPUTS and not name.startswith("position_embeddings")]:
        raise ConfigError(_refusal(model, f"gives its layers {', '.join(others)}, which is not split over tokens"))
    columns, rows = split_linears(model, experts)
    for axis, linears in ((0, columns), (1, rows)):
        for name, linear in linears.items():
            if linear.weight.shape[axis] % size:
                raise ConfigError(f"tensor parallel over {size} does not divide {name} {tuple(linear.weight.shape)}")
    return columns, rows


def parallelize(model: PreTrainedModel, mesh: DeviceMesh, experts: Collection[nn.Module] = ()) -> None:
    """Split the model, which is on meta, over the ranks of a one-dimensional mesh, by the model's own plan.

    Embedding and head are split if their number of rows divides and the embedding is torch's own; otherwise they are
    whole on every rank.

    Args:
        model: the model.
        mesh: the ranks.
        experts: modules that stay as they are. Between blocks, each rank has tokens of its own for them.

    Raises:
        ConfigError: as `check_split`.
    """
    columns, rows = check_split(model, mesh.size(), experts)
    group = mesh.get_group()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    vocabulary = [module for module in (embedding, head) if module is not None]
    is_plain = type(embedding) is nn.Embedding  # one that scales its output, say, keeps its own forward
    if not is_plain or any(module.weight.shape[0] % mesh.size() for module in vocabulary):
        vocabulary = []

    axis = {parameter: 0 for module in (*columns.values(), *vocabulary) for parameter in _of_outputs(module)}
    axis.update({parameter: 1 for row in rows.values() for parameter in _of_inputs(row)})
    apart = {parameter for each in experts for parameter in each._parameters.values()}
    _distribute(model, mesh, axis, apart)

    layers, tokens = _layers(model), _TokenHooks(group)
    inside = {id(module) for part in (*layers, *vocabulary) for module in part.modules()}
    for module in model.modules():
        if module._parameters and module not in experts:
            whole: Placement = Partial() if id(module) in inside else Replicate()
            module.forward = partial(_on_local_parameters, module, module.forward, whole)
    for name, row in rows.items():
        row.forward = partial(_row_forward, getattr(row, "base_layer", row), row.forward, group)
        model.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(tokens.gather, with_kwargs=True)
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
        raise ConfigError(_refusal(model, "has no list of layers to split"))
    return layers


def _distribute(
    model: nn.Module, mesh: DeviceMesh, axis: Mapping[nn.Parameter, int], apart: Collection[Any] = ()
) -> None:
    """Replace every parameter but those `apart` by a DTensor on meta; shared ones stay shared."""
    kept = {id(parameter) for parameter in apart}

    def make(parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) in kept:
            return parameter
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
            module._parameters[name] = parameter.to_local(grad_placements=[whole] if is_whole else None)
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters.update(held)


def _row_forward(row: nn.Linear, forward: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Return this rank's part of the tokens from its part of the columns. The whole bias of `row` must count once."""
    with bias_apart(row) as bias:
        out = reduce_scatter(forward(x), group, dim=-2)
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
        return _with_hidden(args, kwargs, lambda x: _cut(gather(x, self._group, dim=-2, grad="sum"), kwargs))

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
