"""Tensor parallelism of an unmodified Hugging Face model, by its own plan (`base_model_tp_plan` in transformers).

Inference: shards are plain tensors, in contiguous blocks that are uneven if a size does not divide. Embedding and head
are also split over the vocabulary.

A plan splits a block between its columns and one row. Some plans gather the outputs of the columns, because a norm or a
slice needs them whole, and the row takes its part of an input that is whole: both sides then hold a part of the weights
and compute the same in between. An attention that the plan does not split is whole on every rank.

Training, with sequence parallelism (Megatron-LM, Shoeybi et al. 2019; Korthikanti et al. 2022):

    embedding   split over the vocabulary, its output summed: the same on every rank
    layers      the residual stream is split over tokens; norms work on a part of the tokens
                attention and MLP gather the tokens, compute a part of the heads or columns, and scatter their sum
                an attention that is not split gathers the tokens, and keeps a part of its output
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
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers import PreTrainedConfig, PreTrainedModel

from rlite.errors import ConfigError
from rlite.runtime.parallel.context_parallel import (
    gather,
    pad_to_multiple,
    reduce_scatter,
    split,
    sum_backward,
    sum_forward,
)
from rlite.runtime.parallel.fsdp import replace_parameters
from rlite.runtime.parallel.shards import Box

COLUMN, ROW = "colwise", "rowwise"
GATHERED, SPLIT_INPUT = ("colwise_gather_output", "colwise_rep"), ("rowwise_split_input", "rowwise_rep")
"""columns whose outputs are gathered, and rows whose inputs are whole"""
ALL_COLUMNS = {COLUMN: GATHERED[0], ROW: SPLIT_INPUT[0]}
"""styles of a block that compares its columns with the mean of all, as the sparse layers of Gemma 3n do"""
EXPERTS = ("moe_tp_experts", "moe_identity_expert", "packed_colwise", "packed_rowwise")
WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", *EXPERTS)
"""parts that are whole on every rank: their gradients are parts of a sum. Experts compute the rank's own tokens"""


class SplitLayers(NamedTuple):
    """Parts of a model that are split over ranks, by name."""

    columns: dict[str, Any]
    """linear layers that are split by outputs"""
    rows: dict[str, Any]
    """linear layers that are split by inputs"""
    gathered: frozenset[str]
    """columns whose outputs are gathered"""
    cut: frozenset[str]
    """rows whose inputs are whole"""
    vectors: dict[str, nn.Parameter]
    """parameters with an element for each head"""
    whole: dict[str, Any]
    """modules that mix tokens and are whole on every rank"""

    def layers_of_whole_heads(self, model: PreTrainedModel) -> set[int]:
        """Return the indices of layers whose attention has all heads on every rank."""
        blocks = {_block(name) for name in self.gathered}
        found = [module for name, module in model.named_modules() if name in blocks]
        return {module.layer_idx for module in (*found, *self.whole.values()) if hasattr(module, "layer_idx")}


def attention_shape(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    """Return the numbers of layers, query heads and key heads of a causal language model, and the size of a head."""
    text = config.get_text_config()
    key_heads, head_dim = (
        vars(text).get(text.attribute_map.get(key, key)) for key in ("num_key_value_heads", "head_dim")
    )
    try:
        heads = text.num_attention_heads
    except AttributeError as error:
        raise ConfigError(f"{config.model_type!r} has no num_attention_heads; use one device for each copy") from error
    return text.num_hidden_layers, heads, key_heads or heads, head_dim or text.hidden_size // heads


def max_positions(config: PreTrainedConfig) -> tuple[str, int]:
    """Return the field of a config that limits the tokens of a sequence, and the limit. A recurrent model has none."""
    text, fields = config.get_text_config(), ("max_position_embeddings", "max_target_positions")
    return next(((name, value) for name in fields if (value := getattr(text, name, None))), ("limit", sys.maxsize))


def check_heads(config: PreTrainedConfig, world_size: int) -> None:
    """Check that the attention heads divide among the ranks."""
    _, heads, key_heads, _ = attention_shape(config)
    counts = [("num_key_value_heads", key_heads), ("num_attention_heads", heads)]
    for fields in config.get_text_config().to_dict().get("per_layer_config", {}).values():
        counts += [(name, fields[name]) for name, _ in counts[:2] if fields.get(name)]
    for name, num in dict.fromkeys(counts):
        if num % world_size:
            told = f"tensor parallel over {world_size} does not divide {name}={num} of {config.model_type!r}"
            raise ConfigError(f"{told}; choose a divisor of {num}")


def _refusal(model: PreTrainedModel, problem: str) -> str:
    return f"{model.config.model_type!r} {problem}; use one device for each copy"


def split_layers(model: PreTrainedModel, experts: Collection[nn.Module] = ()) -> SplitLayers:
    """Return the parts that the model's own plan splits.

    A layer with an adapter is PEFT's layer, which holds the linear layer as `base_layer`.
    """
    columns, rows, vectors = dict[str, Any](), dict[str, Any](), dict[str, nn.Parameter]()
    gathered, cut = set[str](), set[str]()
    for name, part, style in _styled_parts(model, experts):
        is_linear = isinstance(getattr(part, "base_layer", part), nn.Linear)
        if is_linear and style in (COLUMN, *GATHERED):
            columns[name] = part
            gathered |= {name} if style in GATHERED else set()
        elif is_linear and style in (ROW, *SPLIT_INPUT):
            rows[name] = part
            cut |= {name} if style in SPLIT_INPUT else set()
        elif (
            style == COLUMN
            and isinstance(part, nn.Parameter)
            and part.dim() == 1
            and _block(name) in {*map(_block, columns)}
        ):
            vectors[name] = part
        else:
            raise ConfigError(_refusal(model, f"asks for {style!r} at {name!r}, which is not supported"))
    blocks = {*map(_block, rows)}
    # whole are columns whose outputs no row takes in parts, and what belongs to heads that are all on every rank
    columns = {name: part for name, part in columns.items() if name not in gathered or _block(name) in blocks}
    gathered &= columns.keys()
    vectors = {name: part for name, part in vectors.items() if _block(name) not in {*map(_block, gathered)}}
    whole = _whole_mixers(model, blocks)
    found = SplitLayers(columns, rows, frozenset(gathered), frozenset(cut), vectors, whole)
    _check_blocks(model, found)
    return found


def _block(name: str) -> str:
    """Return the name of the module that holds a part."""
    return name.rpartition(".")[0]


def _styled_parts(model: PreTrainedModel, experts: Collection[nn.Module]) -> Iterator[tuple[str, Any, str]]:
    """Yield the modules and parameters that the plan does not leave whole, with their names and styles."""
    prefix = model.base_model_prefix + "."
    styles = {prefix + name: style for name, style in (model.config.base_model_tp_plan or {}).items()}
    if not styles:
        raise ConfigError(_refusal(model, "has no tensor parallel plan"))
    apart = {id(part) for each in experts for part in (each, *each.parameters())}
    vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, part in (*model.named_modules(), *model.named_parameters()):
        if id(part) in apart or any(part is x for x in vocabulary):
            continue
        style = next((s for pattern, s in styles.items() if fnmatch.fnmatchcase(name, pattern)), None)
        is_of_experts = isinstance(part, nn.Parameter) and part.dim() == 3
        if style is not None and style not in WHOLE and not is_of_experts:
            is_sparse = getattr(model.get_submodule(_block(name)), "activation_sparsity", 0) > 0
            yield name, part, ALL_COLUMNS.get(style, style) if is_sparse else style


def _whole_mixers(model: PreTrainedModel, blocks: Collection[str]) -> dict[str, Any]:
    """Return the modules that mix tokens, of which no part is a block that is split."""
    own = set(vars(model.base_model)["_modules"].get("layers") or ())
    layers = {name for name, module in model.named_modules() if module in own}
    # what mixes tokens knows its layer's number, for the cache, and so do some layers as a whole
    mixers = {name: module for name, module in model.named_modules() if hasattr(module, "layer_idx")}
    stacks = (name for name, parameter in model.named_parameters() if parameter.dim() == 3)
    mixtures = tuple(f"{_block(_block(name))}." for name in stacks)  # a router may know its layer's number, too
    found: dict[str, Any] = {}
    for name, module in mixers.items():
        is_inside = name.startswith(mixtures) or any(name.startswith(f"{outer}.") for outer in found)
        is_split = any(f"{block}.".startswith(f"{name}.") for block in blocks)
        if name not in layers and not is_inside and not is_split:
            found[name] = module
    return found


def _check_blocks(model: PreTrainedModel, split: SplitLayers) -> None:
    """Check that every block in the plan starts with columns and ends with one row, both of the same style."""
    entries = ", ".join(sorted(model.config.base_model_tp_plan or {}))
    begins, ends = defaultdict[str, set[bool]](set), defaultdict[str, list[bool]](list)
    for name in split.columns:
        begins[_block(name)].add(name in split.gathered)
    for name in split.rows:
        ends[_block(name)].append(name in split.cut)
    if others := sorted(block for block in {*begins, *ends} if ends[block] != [*begins[block]]):
        raise ConfigError(
            f"the tensor parallel plan of {model.config.model_type!r} ({entries}) does not split {others[0]!r} between "
            "its columns and one row; use one device for each copy"
        )


def _check_per_head(model: PreTrainedModel, split: SplitLayers) -> None:
    """Check that no tensor between the columns and the row of a block has a part for each head or each column."""
    _, heads, key_heads, head_dim = attention_shape(model.config)
    widths: dict[str, set[int]] = defaultdict(lambda: {heads, key_heads})
    for name, module in {**split.columns, **split.rows}.items():
        linear = getattr(module, "base_layer", module)
        if name not in split.gathered | split.cut:
            widths[_block(name)].add(linear.out_features if name in split.columns else linear.in_features)
    parts = [*split.columns, *split.rows]
    for name, parameter in model.named_parameters():
        block = next((block for block in widths if name.startswith(f"{block}.")), None)
        is_split = name in split.vectors or any(name.startswith(f"{part}.") for part in parts)
        if block is not None and not is_split and parameter.numel() in widths[block] - {head_dim}:
            raise ConfigError(
                f"the tensor parallel plan of {model.config.model_type!r} leaves {name} {list(parameter.shape)} whole, "
                "which has a part for each head or column; use one device for each copy"
            )


@contextmanager
def bias_apart(row: nn.Module) -> Iterator[Any]:
    """Take away the bias of a layer that is split by rows: it is whole on every rank and must count once.

    Yields the bias, or None.
    """
    bias, row._parameters["bias"] = row._parameters.get("bias"), None
    try:
        yield bias
    finally:
        row._parameters["bias"] = bias


def vocabulary_rows(embedding: nn.Embedding, forward: Any, ids: Tensor, start: int, num: int) -> Tensor:
    """Return this rank's summand of an embedding that is split over the vocabulary; zero for other ranks' tokens."""
    local = ids - start
    is_here = (local >= 0) & (local < num)
    padding, embedding.padding_idx = embedding.padding_idx, None  # it is no row's number here
    try:
        return forward(local.where(is_here, 0)) * is_here[..., None]
    finally:
        embedding.padding_idx = padding


def splits_by_rows(embedding: nn.Module) -> bool:
    """Return whether what an embedding computes of a token depends on the token's row alone, as Gemma's scaling does.

    An embedding of its own kind is compared on a small table with its rows in order and in reverse.
    """
    if not isinstance(embedding, nn.Embedding) or set(embedding._parameters) != {"weight"}:
        return False
    if type(embedding) is nn.Embedding:
        return True
    if any(buffer.is_meta for buffer in embedding.buffers()):
        return False
    device = next((buffer.device for buffer in embedding.buffers()), torch.device("cpu"))
    table = torch.arange(4.0 * embedding.embedding_dim, device=device).sin().view(4, -1)
    small, ids, outputs = copy(embedding), torch.arange(4, device=device), []
    small.padding_idx = None
    with torch.no_grad():
        for rows, tokens in ((table, ids), (table.flip(0), ids.flip(0))):
            small._parameters = {"weight": nn.Parameter(rows, requires_grad=False)}
            outputs.append(small(tokens))
    return torch.equal(*outputs)


def span(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return start and stop of this rank's part of `size` elements.

    `world_size`: number of ranks. If it does not divide `size`, the first parts are longer by one.
    """
    base, extra = divmod(size, world_size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def check_tensor_parallel(model: PreTrainedModel, world_size: int, experts: Collection[nn.Module] = ()) -> SplitLayers:
    """Return the layers that serving splits over the ranks."""
    split = split_layers(model, experts)
    if set(split.columns) - split.gathered:
        check_heads(model.config, world_size)
    _check_per_head(model, split)
    return split


class TensorParallelPlan:
    """Layout of one causal language model's parameters over the ranks of a group. The model may be on meta.

    `group`: the ranks; None is a single rank.
    """

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup | None) -> None:
        self.model, self.group = model, group
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self._axis: dict[nn.Parameter, int] = {}
        self._split = SplitLayers({}, {}, frozenset(), frozenset(), {}, {})
        self._has_vocabulary = splits_by_rows(self._embedding)
        """true if the vocabulary is split"""
        if self.world_size > 1:
            self._split = check_tensor_parallel(model, self.world_size)
            vocabulary = (self._embedding, self._head) if self._has_vocabulary else ()
            for column in (*self._split.columns.values(), *vocabulary):
                self._axis.update(dict.fromkeys(column.parameters(), 0))
            self._axis.update(dict.fromkeys(self._split.vectors.values(), 0))
            self._axis.update((row.get_parameter("weight"), 1) for row in self._split.rows.values())

        self._whole_heads = self._split.layers_of_whole_heads(model)

    def num_head_parts(self, layer: int) -> int:
        """Return the number of ranks over which the attention heads of a layer are split."""
        return 1 if layer in self._whole_heads else self.world_size

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
        gathered = [self._split.columns[name] for name in self._split.gathered]
        if self._has_vocabulary:
            embedding = self._embedding
            own = span(embedding.num_embeddings, self.rank, self.world_size)
            embedding.forward = partial(_embedding_inference, embedding, embedding.forward, own, self.group)
            gathered.append(self._head)
        for module in gathered:
            module.forward = partial(_gathered_inference, module.forward, module.out_features, self.group)
        for name, module in self._split.rows.items():
            bounds = span(module.in_features, self.rank, self.world_size) if name in self._split.cut else None
            module.forward = partial(_row_inference, module, module.forward, bounds, self.group)


def _embedding_inference(
    module: nn.Embedding, forward: Any, bounds: tuple[int, int], group: dist.ProcessGroup, ids: torch.Tensor
) -> torch.Tensor:
    start, stop = bounds
    out = vocabulary_rows(module, forward, ids, start, stop - start)
    dist.all_reduce(out, group=group)
    return out


def _row_inference(
    module: nn.Linear, forward: Any, bounds: tuple[int, int] | None, group: dist.ProcessGroup, x: torch.Tensor
) -> torch.Tensor:
    """Return the sum over the ranks' inputs; `bounds` are this rank's part of an input that is whole."""
    if bounds is not None:
        x = x[..., slice(*bounds)]
    with bias_apart(module) as bias:
        out = forward(x)
    dist.all_reduce(out, group=group)
    return out if bias is None else out + bias


def _gathered_inference(forward: Any, size: int, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """Return all `size` outputs of columns."""
    local, world_size = forward(x), group.size()
    sizes = [stop - start for start, stop in (span(size, r, world_size) for r in range(world_size))]
    local = F.pad(local, (0, max(sizes) - local.shape[-1])).contiguous()
    parts = [torch.empty_like(local) for _ in sizes]
    dist.all_gather(parts, local, group=group)
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)


LAYER_INPUTS = {
    *("self", "hidden_states", "attention_mask", "position_ids", "cache_position", "use_cache", "output_attentions"),
    *("past_key_value", "past_key_values", "layer_past", "cache", "cache_params"),
    *("shared_kv_states", "kwargs", "per_layer_input"),
}
"""inputs that layers may have besides rotary angles; hidden states and `per_layer_input` are split over tokens"""


def check_split(model: PreTrainedModel, size: int, experts: Collection[nn.Module] = ()) -> SplitLayers:
    """Return the layers that training splits over `size` ranks."""
    inputs = inspect.signature(type(_layers(model)[0]).forward).parameters
    if others := [name for name in inputs if name not in LAYER_INPUTS and not name.startswith("position_embeddings")]:
        raise ConfigError(_refusal(model, f"gives its layers {', '.join(others)}, which is not split over tokens"))
    split = check_tensor_parallel(model, size, experts)
    for axis, linears in ((0, split.columns), (1, split.rows)):
        for name, linear in linears.items():
            if linear.weight.shape[axis] % size:
                raise ConfigError(f"tensor parallel over {size} does not divide {name} {tuple(linear.weight.shape)}")
    return split


def parallelize(model: PreTrainedModel, mesh: DeviceMesh, experts: Collection[nn.Module] = ()) -> None:
    """Split the model, which is on meta, over the ranks of a one-dimensional mesh, by the model's own plan.

    Embedding and head are split if their number of rows divides and the embedding computes each row for itself;
    otherwise they are whole on every rank.

    `experts`: modules that stay as they are. Between blocks, each rank has tokens of its own for them.
    """
    found = check_split(model, mesh.size(), experts)
    group = mesh.get_group()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    vocabulary = [module for module in (embedding, head) if module is not None]
    if not splits_by_rows(embedding) or any(module.weight.shape[0] % mesh.size() for module in vocabulary):
        vocabulary = []

    axis = {parameter: 0 for module in (*found.columns.values(), *vocabulary) for parameter in _of_outputs(module)}
    axis.update(dict.fromkeys(found.vectors.values(), 0))
    axis.update({parameter: 1 for row in found.rows.values() for parameter in _of_inputs(row)})
    apart = {parameter for each in experts for parameter in each._parameters.values()}
    _distribute(model, mesh, axis, apart)

    layers, tokens = _layers(model), _TokenHooks(group)
    inside = {id(module) for part in (*layers, *vocabulary) for module in part.modules()}
    for module in model.modules():
        if module._parameters and module not in experts:
            whole: Placement = Partial() if id(module) in inside else Replicate()
            module.forward = partial(_on_local_parameters, [module], module.forward, whole)
    for name in found.gathered:
        column = found.columns[name]
        column.forward = partial(_gathered_forward, column.forward, group)
    for name, row in found.rows.items():
        row.forward = partial(_row_forward, getattr(row, "base_layer", row), row.forward, group, name in found.cut)
        model.get_submodule(_block(name)).register_forward_pre_hook(tokens.gather, with_kwargs=True)
    for mixer in found.whole.values():
        # its code may read the parameters of its parts
        mixer.forward = partial(_on_local_parameters, list(mixer.modules()), mixer.forward, Partial())
        mixer.register_forward_pre_hook(tokens.gather, with_kwargs=True)
        mixer.register_forward_hook(tokens.keep_own)
    for layer in layers:
        layer.register_forward_pre_hook(tokens.split_inputs, with_kwargs=True)
    layers[0].register_forward_pre_hook(tokens.split, with_kwargs=True)
    layers[-1].register_forward_hook(tokens.join, with_kwargs=True)
    model.base_model.register_forward_hook(tokens.join_recorded)
    if embedding in vocabulary:
        embedding.forward = partial(_embedding_forward, embedding, embedding.forward, group)
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


def _on_local_parameters(modules: list[nn.Module], forward: Any, whole: Placement, *args: Any, **kwargs: Any) -> Any:
    """Return `forward(...)`, with each parameter replaced by this rank's part during the call."""
    held = [dict(module._parameters) for module in modules]
    for module, parameters in zip(modules, held, strict=True):
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                is_whole = parameter.placements[-1].is_replicate()
                module._parameters[name] = parameter.to_local(grad_placements=[whole] if is_whole else None)
    try:
        return forward(*args, **kwargs)
    finally:
        for module, parameters in zip(modules, held, strict=True):
            module._parameters.update(parameters)


def _gathered_forward(forward: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Return the outputs of all ranks' columns, whose gradients are parts of a sum."""
    return gather(forward(x), group, dim=-1, grad="sum")


def _row_forward(row: nn.Linear, forward: Any, group: dist.ProcessGroup, is_cut: bool, x: Tensor) -> Tensor:
    """Return this rank's part of the tokens from its part of the columns. The whole bias of `row` must count once."""
    if is_cut:  # the input is whole
        x = x.chunk(group.size(), dim=-1)[group.rank()]
    with bias_apart(row) as bias:
        out = reduce_scatter(forward(x), group, dim=-2)
    if isinstance(bias, DTensor):
        out = out + bias.to_local(grad_placements=[Partial()])
    return out


def _embedding_forward(embedding: nn.Embedding, forward: Any, group: dist.ProcessGroup, ids: Tensor) -> Tensor:
    num = embedding.num_embeddings // group.size()
    rows = vocabulary_rows(embedding, forward, ids, group.rank() * num, num)
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
        """Return the arguments of the first layer with this rank's tokens."""
        return _with_hidden(args, kwargs, lambda x: split(x, self._group, dim=-2))

    def split_inputs(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a layer with this rank's tokens of `per_layer_input`, if the layer takes it."""
        names = list(inspect.signature(type(layer).forward).parameters)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        if (own := given.get("per_layer_input")) is None:
            return args, kwargs
        own = split(own, self._group, dim=-2)
        if "per_layer_input" in kwargs:
            return args, {**kwargs, "per_layer_input": own}
        place = names.index("per_layer_input")
        return (*args[:place], own, *args[place + 1 :]), kwargs

    def keep_own(self, block: nn.Module, args: tuple, out: Any) -> Any:
        """Return the output of a block that is whole on every rank with this rank's tokens."""
        if isinstance(out, tuple):
            return (self.keep_own(block, args, out[0]), *out[1:])
        size, rank = self._group.size(), self._group.rank()
        # the gradient is zero for other ranks' tokens, so that the ranks' gradients are parts of a sum
        return pad_to_multiple(out, size, dim=out.dim() - 2).chunk(size, dim=-2)[rank].clone()

    def gather(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments with all tokens. Attention, which gets positions, gets no padding of the last part."""
        return _with_hidden(args, kwargs, lambda x: _cut(gather(x, self._group, dim=-2, grad="sum"), kwargs))

    def join(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> Any:
        """Return the output of the last layer with all tokens."""
        if isinstance(out, tuple):
            return (_cut(self._whole(out[0]), kwargs), *out[1:])
        return _cut(self._whole(out), kwargs)

    def join_recorded(self, model: Any, args: tuple, out: Any) -> None:
        """Join recorded outputs: hidden states of all tokens, attentions of all heads."""
        if states := getattr(out, "hidden_states", None):
            *parts, last = states  # the last is not a layer's own, but what the model ends with
            length = out.last_hidden_state.shape[1]
            out["hidden_states"] = (*(x if x is None else _first(self._whole(x), length) for x in parts), last)
        if attentions := getattr(out, "attentions", None):
            num_heads = model.config.num_attention_heads
            out["attentions"] = tuple(
                x if x.shape[1] == num_heads else gather(x, self._group, dim=1, grad="slice") for x in attentions
            )

    def _whole(self, x: Tensor) -> Tensor:
        return gather(x, self._group, dim=-2, grad="slice")


def _cut(x: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    angles, positions = kwargs.get("position_embeddings"), kwargs.get("position_ids")
    if angles is not None:  # cosines and sines, or complex numbers
        return _first(x, (angles if isinstance(angles, Tensor) else angles[0]).shape[1])
    return x if positions is None else _first(x, positions.shape[-1])


def _first(x: Tensor, length: int) -> Tensor:
    return x if x.shape[-2] == length else x[..., :length, :].clone()  # FSDP asks that a module does not return a view


def _with_hidden(args: tuple, kwargs: dict[str, Any], change: Any) -> tuple[tuple, dict[str, Any]]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
