"""An unmodified Hugging Face causal model whose parameters are this rank's shards, and their locations.

`LeanDecoder` is a forward pass of Llama, Qwen2 and Qwen3 on CPU with little Python overhead. With parameters in
bfloat16, matrix products are computed in bfloat16, and everything else in float32: attention, norms, the residual
stream, keys and values.

The Python code of transformers' forward costs about 1 ms per step for four layers. With few sequences, the kernels take
no longer. `LeanDecoder` computes the same function with the same modules. It looks up parameters at each call and calls
the forwards of the linear layers. Weight syncs, moves and tensor parallelism therefore need no extra code. Activations
are `[tokens, ...]`, rotary angles come from a table, and activations that are not read again are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlite.backends.embedded.adapters import AdapterLayers
from rlite.backends.embedded.attention import ATTENTION, AttentionPlan, PrefillPlan, ScoringPlan
from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.routing import RoutingRecorder
from rlite.backends.embedded.scheduler import Chunk, ServedAdapter
from rlite.backends.models.architecture import check_fit
from rlite.backends.models.attention import Weighting
from rlite.backends.models.batch_invariant import FAMILY, is_plain, make_invariant, obstacle
from rlite.backends.models.experts import corrects, implementation_for, use_implementation
from rlite.backends.models.layout import AttentionLayers, attention_layers, equal_layers
from rlite.backends.models.linear import MIN_ROWS, linear, speed_up_linear_layers
from rlite.backends.models.mixers import State, install_mixers, mixing
from rlite.backends.models.replay import routing_shape
from rlite.backends.models.stored import StoredCheckpoint, buffer_shards, own_shapes, stored_buffers
from rlite.backends.serving.native import call, compiled
from rlite.errors import CheckpointError, ConfigError
from rlite.nn.pretrained import load_config, meta_model, real_tensors, stored_dtype
from rlite.runtime.parallel.shards import Box, CheckpointReader, ParameterShard, nonfinite_names
from rlite.runtime.parallel.tensor import TensorParallelPlan
from rlite.runtime.replicas.adapters import AdapterWeights


class Pointwise:
    """Norms, rotary embeddings and gates, by `decode.c` or by PyTorch. They overwrite activations.

    In C, each is one pass over the memory. PyTorch needs five operations for a root mean square alone, and with several
    threads, the gaps between so many short operations are so long that threads fall asleep.

    `angles`: `[max_len, 2, head_dim]`, cosines and sines, of which those of the first half are negated. `is_native`:
    compute by `decode.c`. Otherwise each operation rounds as in transformers.
    """

    def __init__(self, angles: Tensor, is_native: bool) -> None:
        self._angles = angles.contiguous()
        self._is_native = is_native

    def add_norm(self, norm: Any, x: Tensor, added: Tensor | None) -> Tensor:
        """Add to x in place, and normalise the sum.

        `x`: the residual stream, `[tokens, width]`. `added`: `[tokens, width]`; None adds nothing. Returns the RMS norm
        of x, `[tokens, width]`.
        """
        if self._is_native:
            output = torch.empty_like(x)
            added = None if added is None else added.contiguous()
            sizes = (*x.shape, norm.variance_epsilon, torch.get_num_threads())
            call("add_rms_norm", *sizes, x, added, norm.weight.float(), output)
            return output
        if added is not None:
            x += added
        return torch.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)

    def norm_rotate(self, norm: Any | None, x: Tensor, positions: Tensor) -> Tensor:
        """Normalise and rotate queries or keys.

        `norm`: the module with `weight` and `variance_epsilon`, of each head; None does not normalise. `x`: `[tokens,
        heads, head_dim]`. `positions`: positions of the tokens, `[tokens]`. Returns the rotated heads, `[tokens, heads,
        head_dim]`.
        """
        if self._is_native:
            weight, eps = (None, 0.0) if norm is None else (norm.weight.float(), norm.variance_epsilon)
            sizes = (*x.shape, eps, torch.get_num_threads())
            call("rms_norm_rotate", *sizes, x, weight, positions.contiguous(), self._angles)
            return x
        if norm is not None:
            x = torch.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
        cos, sin = self._angles[positions][:, :, None].unbind(1)
        return (x * cos).add_(x.roll(x.shape[-1] // 2, -1) * sin)

    def split_rotate(self, attention: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise and rotate the queries and keys of a merged product, by `decode.c`.

        `x`: queries, keys and values `[tokens, width]`. `positions`: positions of the tokens, `[tokens]`. Returns
        queries, keys and values, `[tokens, (kv_)heads, head_dim]`.
        """
        rows, dim = len(x), attention.head_dim
        num, num_kv = (len(p.weight) // dim for p in (attention.q_proj, attention.k_proj))
        query, key, value = (x.new_empty(rows, heads, dim) for heads in (num, num_kv, num_kv))
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        eps = 0.0 if norms[0] is None else norms[0].variance_epsilon
        weights = [None if norm is None else norm.weight.float() for norm in norms]
        sizes = (rows, num, num_kv, dim, eps, torch.get_num_threads())
        call("split_rotate", *sizes, x, *weights, positions.contiguous(), self._angles, query, key, value)
        return query, key, value

    def split_gate(self, x: Tensor) -> Tensor:
        """Return `silu(gate) * up` `[tokens, width]` for a merged product `[tokens, 2 width]`, by `decode.c`."""
        rows, width = x.shape
        output = x.new_empty(rows, width // 2)
        call("split_silu_multiply", rows, width // 2, torch.get_num_threads(), x, output)
        return output

    def gate(self, activation: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Return `silu(gate) * up`.

        `gate`: `[tokens, width]`. `up`: `[tokens, width]`.
        """
        if self._is_native:
            call("silu_multiply", gate.numel(), torch.get_num_threads(), gate, up.contiguous())
            return gate
        return activation.forward(gate).mul_(up)


ROWS = 8
"""Decode batches are filled up to a multiple of this. oneDNN compiles its kernels for each number of rows, and would
compile them again in every batch of ragged answers, because its cache does not hold so many."""


class Merged(NamedTuple):
    """Parameters of linear layers of one input, whose blocks of rows are the parameters of the layers."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layers: Sequence[Any]) -> Merged:
        """Return the joint parameters of layers, all or none of which have a bias.

        The parameters of the layers become views of them: what is written to one is written to the other.
        """
        bias = None if layers[0].bias is None else _joined([layer.bias for layer in layers])
        return cls(_joined([layer.weight for layer in layers]), bias)


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    whole = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


See = Callable[..., None]
"""see(name, *values): takes the activations `[tokens, ...]` of a module; they may be overwritten after the call"""
ROTATED, ATTENDED = "self_attn.rotated", "self_attn.attended"
"""activations inside of an attention layer: rotated queries and keys, and values; the output of the attention"""


class LeanDecoder:
    """The computation of one model. The model owns the parameters.

    `max_len`: longest sequence, in tokens.
    """

    def __init__(self, model: Any, device: torch.device, max_len: int, is_invariant: bool) -> None:
        base = model.model
        self._embedding: nn.Module = base.embed_tokens
        self._layers = list(base.layers)
        self._norm: nn.Module = base.norm
        self._head: nn.Module = model.lm_head
        with real_tensors(device), torch.inference_mode():
            cos, sin = base.rotary_emb(torch.empty(0), torch.arange(max_len)[None])
            half = sin.shape[-1] // 2
            # rotate_half negates the second half, here the sines of the first are negated
            angles = torch.stack([cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)], dim=1)
        self._is_invariant = is_invariant
        self._is_native = not is_invariant and compiled() is not None
        self._dtype: torch.dtype = self._head.weight.dtype
        self._pointwise = Pointwise(angles, self._is_native)
        self._merged: list[tuple[Merged, Merged] | None] = [None] * len(self._layers)
        """products of queries, keys and values, and of gate and up; None computes one product for each parameter"""
        self.see: See | None = None
        """called with the activations of each forward pass"""
        self.adapters: AdapterLayers | None = None
        """adapters of the forward pass, if a token has one"""

    def _seen(self, layer: int, part: str, *values: Tensor) -> Tensor:
        """Return the first of some activations, after showing them to `see`."""
        if self.see is not None:
            self.see(f"model.layers.{layer}.{part}", *values)
        return values[0]

    def merge(self) -> None:
        """Merge the products of one input, as long as their parameters are at their addresses."""
        if self._is_native:
            for index, layer in enumerate(self._layers):
                if self._merged[index] is not None:
                    continue
                attention, mlp = layer.self_attn, layer.mlp
                heads = Merged.of([attention.q_proj, attention.k_proj, attention.v_proj])
                self._merged[index] = heads, Merged.of([mlp.gate_proj, mlp.up_proj])

    def split(self) -> None:
        """Compute one product for each parameter, because parameters move."""
        self._merged = [None] * len(self._layers)

    def fill(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> None:
        """Write keys and values of tokens to the cache. The last layer computes nothing else.

        `tokens`: `[tokens]`. `positions`: `[tokens]`.
        """
        x, h = self._embedding.forward(tokens).float(), None
        *layers, last = self._layers
        for layer in layers:
            h = self._layer(layer, x, h, positions, plan)
        attention, h = last.self_attn, self._pointwise.add_norm(last.input_layernorm, x, h)
        key, value = self._rotated(attention, "k", h, positions), self._projected(attention, "v", h)
        plan.write(attention.layer_idx, key, value)

    def logits(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Return the logits `[tokens, vocabulary]` of tokens.

        `tokens`: `[tokens]`. `positions`: `[tokens]`.
        """
        rows = len(tokens)
        missing = 0 if self._is_invariant or rows < MIN_ROWS else -rows % ROWS
        tokens, positions = F.pad(tokens, (0, missing)), F.pad(positions, (0, missing))
        x, h = self._embedding.forward(tokens).float(), None
        for layer in self._layers:
            h = self._layer(layer, x, h, positions, plan, missing)
        logits = self._product(self._head.forward, self._pointwise.add_norm(self._norm, x, h))[:rows]
        if self.see is not None:
            self.see("lm_head", logits)
        return logits

    def _layer(
        self, module: Any, x: Tensor, added: Tensor | None, positions: Tensor, plan: AttentionPlan, missing: int = 0
    ) -> Tensor:
        """Return the output of the layer's MLP; x, the residual stream, takes in `added` and the attention's output.

        The last `missing` rows belong to no sequence.
        """
        attention, mlp, merged = module.self_attn, module.mlp, self._merged[module.self_attn.layer_idx]
        h = self._seen(
            attention.layer_idx, "input_layernorm", self._pointwise.add_norm(module.input_layernorm, x, added)
        )
        if merged is not None:
            heads = self._product(linear, h, *merged[0])
            if self.adapters is not None:
                self.adapters.add(h, heads, attention.q_proj, attention.k_proj, attention.v_proj)
            query, key, value = self._pointwise.split_rotate(attention, heads, positions)
        else:
            query, key = (self._rotated(attention, which, h, positions) for which in ("q", "k"))
            value = self._projected(attention, "v", h)
        if missing:
            query, key, value = (heads[:-missing] for heads in (query, key, value))
        self._seen(attention.layer_idx, ROTATED, query, key, value)
        h = plan.attend(attention.layer_idx, query, key, value, Weighting(attention.scaling)).flatten(1)
        self._seen(attention.layer_idx, ATTENDED, h)
        h = F.pad(h, (0, 0, 0, missing)) if missing else h
        h = self._seen(attention.layer_idx, "self_attn.o_proj", self._called(attention.o_proj, h))
        h = self._pointwise.add_norm(module.post_attention_layernorm, x, h)
        self._seen(attention.layer_idx, "post_attention_layernorm", h)
        if merged is not None:
            both = self._product(linear, h, *merged[1])
            if self.adapters is not None:
                self.adapters.add(h, both, mlp.gate_proj, mlp.up_proj)
            h = self._pointwise.split_gate(both)
        else:
            gate, up = (self._called(layer, h) for layer in (mlp.gate_proj, mlp.up_proj))
            h = self._pointwise.gate(mlp.act_fn, gate, up)
        return self._seen(attention.layer_idx, "mlp", self._called(mlp.down_proj, h))

    def _rotated(self, attention: Any, which: str, h: Tensor, positions: Tensor) -> Tensor:
        heads = self._projected(attention, which, h)
        return self._pointwise.norm_rotate(getattr(attention, f"{which}_norm", None), heads, positions)

    def _projected(self, attention: Any, which: str, h: Tensor) -> Tensor:
        return self._called(getattr(attention, f"{which}_proj"), h).view(h.shape[0], -1, attention.head_dim)

    def _called(self, layer: Any, h: Tensor) -> Tensor:
        """Return the output of a linear layer, with the adapters of the forward pass."""
        output = self._product(layer.forward, h)
        return output if self.adapters is None else self.adapters.add(h, output, layer)

    def _product(self, forward: Callable[..., Tensor], h: Tensor, *parameters: Tensor | None) -> Tensor:
        """Return the float32 product of activations and parameters of the model's dtype."""
        if self._dtype == torch.float32:
            return forward(h, *parameters)
        return forward(h.to(self._dtype), *parameters).float()


class _Place(NamedTuple):
    """One parameter: its block, its global shape, and every module attribute that refers to it."""

    box: Box
    global_shape: tuple[int, ...]
    owners: tuple[tuple[nn.Module, str], ...]

    def get(self) -> nn.Parameter:
        module, name = self.owners[0]
        return module.get_parameter(name)

    def set(self, tensor: Tensor) -> None:
        parameter = nn.Parameter(tensor, requires_grad=False)
        for module, name in self.owners:
            module._parameters[name] = parameter

    def allocate(self, dtype: torch.dtype, device: torch.device | str) -> None:
        """Give the parameter memory without values."""
        shape = [s.stop - s.start for s in self.box]
        self.set(torch.empty(shape, dtype=dtype, device=device))


def show(see: See, name: str, module: nn.Module, args: Any, output: Any) -> None:
    """Call `see` with the tensors among a module's outputs; a forward hook."""
    values = output if isinstance(output, tuple) else (output,)
    see(name, *(value for value in values if isinstance(value, Tensor)))


def served_layers(model: PreTrainedModel, plan: TensorParallelPlan) -> AttentionLayers:
    """Return the attention layers of a model, with the heads that each rank of the plan has."""
    layers = equal_layers(model.config) if is_plain(model) else attention_layers(type(model), model.config)
    return {index: layer.split(plan.num_head_parts(index)) for index, layer in layers.items()}


class ShardedModel:
    """The model of one worker. It begins on the meta device; `load` or `allocate` gives it memory on `device`.

    `tp_group`: the ranks that share the heads; None is one rank.
    """

    def __init__(
        self, path: str, options: EmbeddedOptions, device: torch.device, tp_group: dist.ProcessGroup | None
    ) -> None:
        self.path, self.device = path, device
        CheckpointReader(path)  # refuses a folder without weights
        config = load_config(path)
        self.dtype = getattr(torch, options.dtype) if options.dtype else stored_dtype(path, config)
        # buffers are computed here for good: to_empty and friends would leave a rotary embedding of zeros
        model: PreTrainedModel = meta_model(config, self.dtype, device)
        self.config: PreTrainedConfig = model.config
        model.set_attn_implementation(ATTENTION)
        self.model = model.eval().requires_grad_(False)
        self.has_state = bool(install_mixers(model))
        """true if sequences have a recurrent state beside keys and values"""
        use_implementation(model, implementation_for("auto", device.type, self.dtype))
        for name, buffer in stored_buffers(model).items():
            if corrects(name):
                buffer.data = buffer.float()  # the choice of experts turns on small differences
        plan = TensorParallelPlan(model, tp_group)
        self.tp_size = plan.world_size
        self.num_vocabulary_shards = 1 if self.config.get_text_config().vocab_size % self.tp_size else self.tp_size
        """parts into which training divides the vocabulary"""
        self._shapes = own_shapes(model)
        """shapes of the whole parameters and stored buffers"""
        self._places = self._find_places(plan)
        for place in self._places.values():
            place.allocate(self.dtype, "meta")
        self._is_deterministic = options.deterministic
        self.is_invariant = options.deterministic and obstacle(self.model, device.type, self.dtype) is None
        """true if the bits of a token depend on its sequence alone, not on the forward pass that computes them"""
        if self.is_invariant:
            make_invariant(self.model)
        elif device.type == "cpu":
            speed_up_linear_layers(self.model)
        plan.install()
        self.layers = served_layers(model, plan)
        """attention layers, with the heads of this rank"""
        self._lean: LeanDecoder | None = None
        self._group = tp_group
        self._adapters: AdapterLayers | None = None
        shape = routing_shape(model)
        self.routing = None if shape is None else RoutingRecorder(model, shape)
        """records chosen experts; None for a model without experts"""

    def _find_places(self, plan: TensorParallelPlan) -> dict[str, _Place]:
        owners: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            owners.setdefault(parameter, []).append(name)
        places = {}
        for p, names in owners.items():
            paths = [name.rpartition(".") for name in names]
            modules = tuple((self.model.get_submodule(module), name) for module, _, name in paths)
            places[names[0]] = _Place(plan.box(p), tuple(p.shape), modules)
        return places

    def specialise(self, max_len: int) -> None:
        """Use the faster forward for sequences of at most `max_len` tokens, if this model has one."""
        if type(self.model) not in FAMILY or not is_plain(self.model) or self.device.type != "cpu":
            return
        is_half = self.dtype == torch.bfloat16 and not self._is_deterministic and compiled() is not None
        if self.dtype == torch.float32 or is_half:
            self._lean = LeanDecoder(self.model, self.device, max_len, self.is_invariant)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of keys and values: float32 if the model computes its products alone in bfloat16."""
        return self.dtype if self._lean is None else torch.float32

    def prefill(self, plan: PrefillPlan) -> None:
        """Fill the cache with the keys and values of the plan's tokens."""
        if self._lean is not None:
            self._lean.fill(plan.tokens, plan.positions, plan)
        else:
            self._run(self.model.base_model, plan.tokens[None], plan.positions[None], plan)

    def logits(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Return the logits `[rows, vocabulary]` of one decode step.

        `tokens`: one token of each sequence, `[rows]`. `positions`: positions of the tokens, `[rows]`.
        """
        if self._lean is not None:
            return self._lean.logits(tokens, positions, plan)
        return self._run(self.model, tokens[:, None], positions[:, None], plan).logits[:, -1]

    def prompt_logits(self, plan: ScoringPlan) -> Tensor:
        """Return the logits `[tokens, vocabulary]` of the plan's tokens."""
        if self._lean is not None:
            return self._lean.logits(plan.tokens, plan.positions, plan)
        return self._run(self.model, plan.tokens[None], plan.positions[None], plan).logits[0]

    def _run(self, model: Any, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Any:
        if self.routing is not None:
            self.routing.begin(plan)
        with mixing(plan):
            return model(input_ids=tokens, position_ids=positions, use_cache=False)

    # -- adapters ------------------------------------------------------------------------------------------------

    def make_adapter(self, name: str | None, given: AdapterWeights, version: int) -> ServedAdapter:
        """Return a version of an adapter on the device."""
        if self._is_deterministic and not self.is_invariant:
            raise ConfigError("deterministic=true computes this model in fixed shapes, which have no adapters")
        if self._adapters is None:
            boxes = {name: place.box for name, place in self._places.items()}
            self._adapters = AdapterLayers(self.model, boxes, self._shapes, self._group, self.is_invariant)
        made = self._adapters.make(name, given, version, self.device, self.cache_dtype)
        if self._lean is None:
            self._adapters.hook(made)
        return made

    def use_adapters(self, adapters: Sequence[ServedAdapter | None]) -> bool:
        """Compute the next forward passes with these adapters of their tokens, in the order of the tokens.

        `adapters`: of each token; or one adapter of all tokens. Returns whether a token has an adapter.
        """
        if self._adapters is None:
            return False
        has_some = self._adapters.begin(adapters, self.device)
        if self._lean is not None:
            self._lean.adapters = self._adapters if has_some else None
        return has_some

    # -- weights -------------------------------------------------------------------------------------------------

    def state_of_one(self) -> dict[int, State]:
        """Return the recurrent state of one sequence, by the number of the mixer, as the mixers make it."""
        plan = ScoringPlan([Chunk(row=0, start=0, stop=1, tokens=[0])], None, self.device)
        if self.has_state:
            with torch.inference_mode():
                self.prompt_logits(plan)
        return plan.states

    def watch(self, see: See) -> None:
        """Call `see(name, *values)` with the activations of modules in each forward pass, by the modules' names."""
        if self._lean is not None:
            self._lean.see = see
            return
        for name, module in self.model.named_modules():
            module.register_forward_hook(partial(show, see, name))

    def load(self, path: str | None = None) -> None:
        """Fill the parameters from a checkpoint of this model. Each rank reads its own blocks.

        Parameters without memory are allocated.

        `path`: folder of the checkpoint; None is the model's own.
        """
        path = path or self.path
        reader = StoredCheckpoint(self.model, path, self._shapes)
        check_fit(reader, path, self.model, self._shapes)
        self.allocate()
        with torch.no_grad(), real_tensors():
            for name, place in self._places.items():
                place.get().copy_(reader.read(name, place.box))
            for name, buffer in stored_buffers(self.model).items():
                if name in reader.names():
                    buffer.copy_(reader.read(name))
        if bad := nonfinite_names(self.parameter_shards()):
            raise CheckpointError(f"{path}: the weights are not finite in {self.dtype}: {bad[0]} holds NaN or infinity")

    def allocate(self) -> None:
        """Move the parameters to the device. Parameters on the meta device get uninitialised memory."""
        for place in self._places.values():
            tensor = place.get()
            if tensor.is_meta:
                place.allocate(self.dtype, self.device)
            elif tensor.device != self.device:
                place.set(tensor.data.to(self.device))
        if self._lean is not None:
            self._lean.merge()

    def to(self, device: torch.device) -> None:
        """Move the parameters. Moving to the meta device frees their memory. Buffers are small and stay."""
        if self._lean is not None:
            self._lean.split()
        for place in self._places.values():
            place.set(place.get().data.to(device))

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """Return each parameter once, tied parameters under the embedding's name, and stored buffers.

        The shards are valid until the model moves.
        """
        shards = {
            name: ParameterShard(place.get().data, tuple(s.start for s in place.box), place.global_shape)
            for name, place in self._places.items()
        }
        return shards | buffer_shards(self.model)

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of the parameters. They change when parameters move, not when parameters are written."""
        return tuple(place.get().data_ptr() for place in self._places.values())

    def memory_bytes(self) -> int:
        """Return the bytes that the parameters hold, on the device or on the host."""
        return sum(p.nbytes for p in map(_Place.get, self._places.values()) if not p.is_meta)
