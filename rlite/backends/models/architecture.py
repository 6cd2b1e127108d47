"""Checks of architectures: small models of a config, with a layer of each kind, and what mixes their tokens.

Compare the tensors of a checkpoint with those of the model, so that none is left out unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlite.backends.models.attention import MAX_FLASH_WIDTH, PACKED, PackedLayout, attention, no_mask
from rlite.backends.models.experts import experts_of, other_form, use_implementation
from rlite.backends.models.expressions import Shape
from rlite.backends.models.layout import attention_layers
from rlite.backends.models.mixers import Documents, Mixer, find_mixers, install_mixers, mixing
from rlite.backends.models.stored import REBUILT, StoredCheckpoint, container_class, own_shapes, places, stored_buffers
from rlite.errors import CheckpointError, ConfigError, StorageError, why_not_written
from rlite.nn.base import BaseTrainModule
from rlite.nn.pretrained import causal_config, quantised, quiet_transformers, real_tensors, rope_parts, summary
from rlite.runtime.parallel.context_parallel import ContextShare
from rlite.runtime.parallel.prefix_tree import PrefixTree, Sharing
from rlite.wording import counted

NUM_HEADS, HEAD_DIM, ROPE_HEAD_DIM = 4, 16, 8
WINDOW = 5
"""length of sliding windows and chunks: shorter than the sequences of a check"""
MAX_DEPTH = 512
"""most layers of a model; a deeper one is not checked"""
VOCABULARY = 128
SPECIAL_IDS = 16
"""token ids below this may be special ones (padding, end of text)"""
CONTEXT = 64
"""length from which rotary embeddings depend on the length"""

LINEAR_HEADS = 2
"""key heads of gated delta nets"""
EXPANSION = 2
"""width of a Mamba layer, in widths of the model; its heads are as wide as those of attention"""

SIZES = {
    r"d_model|hidden_size|n_embd|word_embed_proj_dim|(input_|output_)?embedding_size": NUM_HEADS * HEAD_DIM,
    r"n_head|(decoder|encoder|num)_attention_heads": NUM_HEADS,
    r"qk_head_dim": HEAD_DIM + ROPE_HEAD_DIM,
    r"rotary_dim|(?!.*nope).*rope_head_dim.*": ROPE_HEAD_DIM,
    r".*(lora_rank|hidden_size_per_layer_input)": HEAD_DIM,
    r"linear_num(_key)?_heads": LINEAR_HEADS,
    r"(mamba_)?expand": EXPANSION,
    r"mamba_d_ssm|attention_hidden_size": EXPANSION * NUM_HEADS * HEAD_DIM,
    r"attention_head_dim": EXPANSION * HEAD_DIM,  # of Zamba, whose attention is wider than the model
    r"mamba_n_heads|n_mamba_heads|mamba_num_heads": EXPANSION * NUM_HEADS,
    r"mamba_d_head|mamba_headdim": HEAD_DIM,
    r"vocab_size.*": VOCABULARY,  # of a smaller model, too: the sequences of a check have ids up to 100
}
"""sizes by the pattern of their names"""
MOST = {
    r"max_position_embeddings|n_ctx|n_positions": 16 * CONTEXT,
    r"d_ff|n_inner|.*(intermediate|ffn).*": 6 * HEAD_DIM,
    r"(?!.*(layers|pattern)).*window.*|.*chunk_size.*": WINDOW,
    r"(mamba_)?n_?groups": 2,
    r"(mamba_)?d_state|(ssm_)?state_size": HEAD_DIM,
}
"""largest values by the pattern of their names"""
NUM_EXPERTS = r"(moe_)?n(um)?_((local|routed)_)?experts"
CHOSEN = r"num_experts_per_tok(en)?|moe_k|(moe_)?(router_)?top_?k(_experts)?"
GROUPS, CHOSEN_GROUPS = r"n_group|num_expert_group", r"topk_group"
"""patterns of the names of experts in a layer, of those that a token chooses, and the same of groups of experts"""
KEY_HEADS = {
    "kv_n_heads",
    "num_global_key_value_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "swa_num_key_value_heads",
}
IDS = ("token_id", "token_ids", "token_index")
NOT_COPIED = {"architectures", "dtype", "model_type", "quantization_config", "transformers_version"}


def miniature(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a small `cls` in float32 on the CPU with random weights, in evaluation mode.

    Weights are wider than a fresh model's, so that a wrong mask or position changes the outputs visibly. The process's
    random state stays as it was.

    The small model has all layers of the large one, because code may tell layers apart by their numbers alone.

    For a config that it cannot use, the class raises its own error.
    """
    with real_tensors(), torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(0)
        small = miniature_config(config)
        if small.to_dict().get("attn_logit_softcapping"):
            small._attn_implementation = "eager"  # before 5.21, transformers' sdpa leaves the cap out
        model = cls._from_config(small, dtype=torch.float32)
        # embeddings outweigh what layers add, where a state amplifies the rounding of one layer in the next
        scale = 8.0 if find_mixers(model) else 0.5
        with torch.no_grad():
            for module in model.modules():
                for parameter in module.parameters(recurse=False):
                    _randomise(module, parameter, scale)
    return model.eval()


@contextmanager
def saved(model: PreTrainedModel) -> Iterator[str]:
    """Write a checkpoint into a temporary folder, without transformers' progress bar.

    Yields the path of the folder.
    """
    with TemporaryDirectory() as folder:
        try:
            with quiet_transformers():
                model.save_pretrained(folder)
        except (OSError, SafetensorError) as error:
            told = f"{folder}: a small model for the check of this model could not be written"
            raise StorageError(f"{told}: {why_not_written(error)}") from error
        yield folder


def miniature_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return `config` with small sizes, and all its layers."""
    names = {real: standard for standard, real in config.attribute_map.items()}
    values = {key: value for key, value in config.to_dict().items() if key not in NOT_COPIED and key[0] != "_"}
    standard = {names.get(key, key): value for key, value in values.items()}
    if (depth := standard.get("num_hidden_layers") or 0) > MAX_DEPTH:
        raise ConfigError(f"the check of a model builds at most {MAX_DEPTH} layers, and this one has {depth}")
    small, ids = {}, count()
    for key, value in values.items():
        if isinstance(part := vars(config).get(key), PreTrainedConfig):
            small[key] = miniature_config(part)
        elif key == "rope_parameters":
            small[key] = _small_rope(value)
        elif key == "per_layer_config" and value:
            small[key] = {int(row): {k: _small(k, v, standard) for k, v in part.items()} for row, part in value.items()}
        elif key.endswith(IDS) and value is not None:  # every special token has an id of its own
            number = next(ids) % SPECIAL_IDS
            small[key] = [number] if isinstance(value, list) else number
        else:
            small[key] = _small(names.get(key, key), value, standard)
    return type(config)(**small)


def _small(name: str, value: Any, config: Mapping[str, Any]) -> Any:
    """Return the small value of the field that transformers calls `name`; what is no size stays."""
    if name == "head_dim" and value in (None, config.get("qk_rope_head_dim")):
        return HEAD_DIM if value is None else ROPE_HEAD_DIM
    if name == "num_key_value_heads" and value is None:
        return NUM_HEADS
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name in KEY_HEADS:
        if value < (config.get("num_key_value_heads") or 0):  # of some layers alone
            return 1
        return NUM_HEADS if value >= (config.get("num_attention_heads") or 0) else min(value, 2)
    if re.fullmatch(NUM_EXPERTS, name):
        return min(value, _num_experts(config))
    for pattern, size in SIZES.items():
        if re.fullmatch(pattern, name):
            return size
    if name == "num_heads" and "expand" in config:  # of Mamba-2 alone
        return EXPANSION * NUM_HEADS
    if name == "linear_num_value_heads":  # as many for each key head as in the large model
        return LINEAR_HEADS * max(1, value // (config.get("linear_num_key_heads") or value))
    if name == "linear_value_head_dim":
        return HEAD_DIM * (1 + (value > config.get("linear_key_head_dim", value)))
    if "head_dim" in name:
        return HEAD_DIM * (1 + (value > (config.get("head_dim") or value)))  # those of some layers may be larger
    return min([value, *(most for pattern, most in MOST.items() if re.fullmatch(pattern, name))])


def _num_experts(config: Mapping[str, Any]) -> int:
    """Return a number of experts in which routers choose as in the large model: twice as many as a token chooses."""

    def largest(pattern: str) -> int:
        values = [value for name, value in config.items() if re.fullmatch(pattern, name)]
        return max([1, *(n for v in values for n in (v if isinstance(v, list) else [v]) if isinstance(n, int))])

    chosen, groups = largest(CHOSEN), largest(GROUPS)
    return groups * max(2, -(-2 * chosen // groups), -(-chosen // largest(CHOSEN_GROUPS)))


def _small_rope(rope: Any) -> Any:
    """Return rotary parameters, of all layers or by kind of layer, for heads of `HEAD_DIM`."""
    if not isinstance(rope, Mapping):
        return rope
    small = {key: _small_rope(value) for key, value in rope.items()}
    half = int(HEAD_DIM * (rope.get("partial_rotary_factor") or 1.0)) // 2
    for key in ("long_factor", "short_factor"):
        if key in rope:
            small[key] = rope[key][:half]
    if "mrope_section" in rope:
        small["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
    if "original_max_position_embeddings" in rope:
        # longer than every sequence of a check where angles depend on the longest one, else shorter than the longest
        is_fixed = rope.get("rope_type") not in LENGTH_DEPENDENT_ROPE
        small["original_max_position_embeddings"] = WINDOW if is_fixed else CONTEXT
    return small


LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""rotary embeddings whose angles change when the longest sequence of a forward passes a length"""


def _randomise(module: nn.Module, parameter: nn.Parameter, embedding_scale: float) -> None:
    noise = torch.randn(parameter.shape)
    if isinstance(module, nn.Embedding):
        parameter.copy_(noise * embedding_scale)
    elif parameter.dim() > 1:
        parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    else:
        parameter.add_(noise / 5)


LENGTHS = (WINDOW + 2, 2 * WINDOW + 3, 1)
"""tokens of the sequences that are compared: two are longer than a window, and a single token has no past"""
TOLERANCE = 1e-4
"""largest difference of two logits in float32, in standard deviations of all logits; rounding gives 1e-6"""
EXACT_TOLERANCE = 1e-9
"""the same in float64, where rounding gives 1e-15"""
STATE_TOLERANCE = 1e-6
"""the same in float64 for models with mixers, of which some compute their state in float32"""
ROUNDED_TOLERANCE = 1e-5
"""the same in float64 for mixtures of experts, many of whose routers compute in float32, and if the class has attention
of its own alone, which mostly rounds probabilities to float32"""
GRADIENT_TOLERANCE = 1e-4
"""largest difference of two gradients of a parameter, in the largest of its elements; the latter counts as at least
this share of the largest gradient of the model"""
OWN_TOKEN = "rlite_own_token"
"""attention in which a token sees itself alone"""
KNOWN_LAYERS = {"full_attention", "sliding_attention", "mlp", "moe"}
"""kinds of layers, besides those of layers with a mixer"""
REMEDY = "Use another model; docs/architectures.md lists the classes that work"


Check = Callable[[type[PreTrainedModel], PreTrainedConfig], str | None]


def once_per_config(check: Check) -> Check:
    """Return a check that remembers its result by the model's class and the content of its config."""
    reasons: dict[tuple[type, str], str | None] = {}

    @wraps(check)
    def remembered(cls: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
        key = (cls, config.to_json_string(use_diff=False))
        if key not in reasons:
            reasons[key] = check(cls, config)
        return reasons[key]

    return remembered


def check_architecture(cls: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Refuse a model that a pack would compute differently from transformers."""
    reason = refusal(cls, config)
    if reason is not None:
        raise ConfigError(f"{cls.__name__} ({config.model_type!r}) {reason}. {REMEDY}")


def check_gpu_kernels(cls: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Refuse a model that the attention kernels of GPUs do not take, in float16 and bfloat16."""
    layers = attention_layers(cls, config).values()
    if wide := [layer for layer in layers if max(layer.key_width, layer.value_width) > MAX_FLASH_WIDTH]:
        found = f"has heads of width {wide[0].key_width} and values of width {wide[0].value_width}"
        limit = f"takes widths up to {MAX_FLASH_WIDTH}"
    elif any(layer.is_capped for layer in layers):
        found, limit = "caps its attention scores (softcap)", "does not"
    else:
        return
    told = f"{cls.__name__} ({config.model_type!r}) {found}"
    raise ConfigError(f"{told}. On GPUs in 16 bits, rlite's attention {limit}. {REMEDY}")


@once_per_config
@real_tensors()
@torch.inference_mode(False)
@torch.no_grad()
def refusal(cls: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """Return why a pack would be computed differently from transformers, None if it would not."""
    try:
        model = miniature(cls, config)
        has_experts = bool(experts_of(model))
        use_implementation(model, "eager")  # the others do not compute in float64
        if (reason := other_form(model, {"input_ids": sequences()[0][None]})) is not None:
            return reason
        mixers = install_mixers(model)
        expected, tolerance = _expected(model, bool(mixers), has_experts)
    except Exception as error:  # of any kind: the class's own code
        return f"cannot be checked: a small copy of it fails with {summary(error)}"
    is_own = not model._supports_attention_backend
    fault = "computes attention in code of its own" if is_own else "mixes tokens by other means than attention"
    try:
        if not mixes_tokens(model):
            if unknown := _unknown_layers(model):
                return f"has layers of kind {unknown}, which rlite does not know"
            if difference(expected, packed(model)) <= tolerance:
                wrong = _wrong_gradients(model, alone, packed, is_training=bool(mixers) or has_experts)
                return _leak(model, mixers) or wrong or _renamed(model)
            fault = "computes masks or positions itself"
    except StorageError:  # says nothing of the class
        raise
    except Exception as error:
        fault = fault if is_own else f"does not run with sequences in packs: {summary(error)}"
    return _why(model, expected) or fault


def _expected(
    model: PreTrainedModel, has_mixers: bool, has_experts: bool, rows: Sequence[Tensor] | None = None
) -> tuple[Tensor, float]:
    """Return transformers' outputs and the tolerance: in float64, or in float32 if the class cannot compute in it."""
    tolerance = STATE_TOLERANCE if has_mixers else EXACT_TOLERANCE
    if has_experts or model.config._attn_implementation == "eager":
        tolerance = ROUNDED_TOLERANCE
    try:
        return alone(model.double(), rows), tolerance
    except Exception:  # of any kind: the class's own code
        return alone(model.float(), rows), TOLERANCE


Outputs = Callable[[PreTrainedModel], Tensor]


def _wrong_gradients(model: PreTrainedModel, whole: Outputs, in_pack: Outputs, is_training: bool) -> str | None:
    """Return a text about a parameter whose gradient differs in a pack; in training mode, modules drop nothing out."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    generator = torch.get_rng_state()
    expected = _gradients(model, whole, is_training)
    if not torch.equal(generator, torch.get_rng_state()):
        return "draws random numbers in training, such as a router that samples experts or the jitter of its config"
    found = _gradients(model, in_pack, is_training)
    largest = {name: float(gradient.abs().max()) for name, gradient in expected.items()}
    smallest = GRADIENT_TOLERANCE * max(largest.values())  # some gradients are zero but for rounding

    def differs(name: str) -> bool:
        error = (found.get(name, 0.0) - expected[name]).abs().max() / max(largest[name], smallest)
        return not error <= GRADIENT_TOLERANCE  # NaN differs, too

    wrong = next(filter(differs, expected), None)
    return wrong and f"computes another gradient of {wrong} in a pack"


@torch.enable_grad()
def _gradients(model: PreTrainedModel, outputs: Outputs, is_training: bool) -> dict[str, Tensor]:
    """Return the gradients of a sum of the outputs, each output with a weight of its own."""
    model.train(is_training)
    found = outputs(model)
    weights = torch.arange(found.numel(), dtype=found.dtype, device="cpu").sin().view_as(found)
    (found * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.eval()
    return gradients


def _renamed(model: PreTrainedModel) -> str | None:
    """Return a text about the first tensor that does not survive the way into a checkpoint and back, if any."""
    with saved(model) as folder:
        try:
            reader = StoredCheckpoint(model, folder)
        except (CheckpointError, ConfigError) as error:
            return f"has checkpoints that rlite cannot convert: {summary(error)}"
        held = {**dict(model.named_parameters()), **stored_buffers(model)}
        names = set(reader.names())
        wrong = [n for n in held if n not in names or not torch.equal(reader.read(n), held[n])]
        back = dict(reader.conversion.stored((name, tensor.detach()) for name, tensor in held.items()))
        wrong += [n for n in reader.raw.names() if n not in back or not torch.equal(reader.raw.read(n), back[n])]
    return f"has checkpoints that rlite converts wrongly ({wrong[0]})" if wrong else None


def check_container(config: PreTrainedConfig) -> None:
    """Refuse a multimodal model whose text model computes other logits of a text by itself."""
    if (reason := _container_refusal(container_class(config), config)) is not None:
        told = f"{container_class(config).__name__} ({config.model_type!r}) {reason}, so its text model is not trained"
        raise ConfigError(f"{told} or served alone. {REMEDY}")


@once_per_config
@real_tensors()
@torch.no_grad()
def _container_refusal(cls: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    try:
        outer = miniature(cls, config)
        text = causal_config(outer.config)
        inner = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]._from_config(text, dtype=torch.float32).eval()
        theirs, own = (
            {**dict(each.named_parameters(remove_duplicate=False)), **stored_buffers(each)} for each in (outer, inner)
        )
        for there, here in places(outer, inner, own_shapes(inner)).items():
            if here in own:
                own[here].copy_(theirs[there])
        is_equal = difference(alone(outer), alone(inner)) <= TOLERANCE
    except Exception as error:  # of any kind: the class's own code
        return f"cannot be checked: a small copy of it fails with {summary(error)}"
    return None if is_equal else "changes the logits of its text model"


def _state(model: PreTrainedModel) -> str | None:
    """Return a text about a recurrent state in modules of an unknown kind, if the class keeps any."""
    reason = "keeps a recurrent state, which would run on from one sequence of a pack into the next"
    return reason if model._is_stateful and not find_mixers(model) else None


def _why(model: PreTrainedModel, expected: Tensor) -> str | None:
    """Return the property of the class that explains a difference, if it is a known one."""
    if unknown := _unknown_layers(model):
        return f"has layers of kind {unknown}, which mix tokens by other means than attention"
    if (reason := _state(model)) is not None:
        return reason
    shorter = outputs_of(model, {"input_ids": sequences()[1][None, :-1]})
    if difference(expected[LENGTHS[0] :][: len(shorter)], shorter) > TOLERANCE:
        return "is not causal: tokens see later ones (an encoder needs is_decoder=true in its config)"
    return None


def _unknown_layers(model: PreTrainedModel) -> str:
    """Return the kinds of layers that rlite does not know, as the config names them.

    The kind of a layer with a mixer is known, because the module is what computes, whatever the config calls it.
    """
    kinds: Any = getattr(model.config.get_text_config(), "layer_types", None) or ()  # of some configs a property
    mixed = {mixer.layer_idx for mixer in find_mixers(model)}
    return ", ".join(sorted({kind for layer, kind in enumerate(kinds) if layer not in mixed} - KNOWN_LAYERS))


def _leak(model: PreTrainedModel, mixers: list[Mixer]) -> str | None:
    """Return how the documents of a pack reach each other through mixers, None if they do not.

    The embeddings of one document are NaN, so that no tolerance is involved.
    """
    if not mixers:
        return None
    start, stop = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    poisoned = torch.arange(sum(LENGTHS))
    poisoned = (poisoned >= start) & (poisoned < stop)
    if not torch.equal(_reached(model, poisoned, lambda: packed(model)), poisoned):
        return f"mixes the documents of a pack in {mixers[0].name}"
    return None


def rope_limit(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence whose rotary angles do not depend on other sequences, None for any length.

    With `longrope` and `dynamic` a longer sequence changes the angles of every other one in the same forward.
    """
    parts = [part for part in rope_parts(config) if part.get("rope_type") in LENGTH_DEPENDENT_ROPE]
    limits = (part.get("original_max_position_embeddings") or config.max_position_embeddings for part in parts)
    return min(limits, default=None)


def sequences() -> list[Tensor]:
    """Return the sequences of token ids that a small model is given."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(SPECIAL_IDS, 100, (length,), generator=generator, device="cpu") for length in LENGTHS]


def difference(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference of logits [T, V], in standard deviations of `expected`; NaN counts as infinite."""
    return float(((expected - found).abs().max() / expected.std()).nan_to_num(nan=float("inf")))


def outputs_of(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """Return logits [T, V] of one row, or hidden states [T, H] of a model whose logits belong to whole sequences."""
    if model.get_output_embeddings() is None:
        return model.base_model(**inputs, use_cache=False).last_hidden_state[0]
    return model(**inputs, use_cache=False).logits[0]


def mixes_tokens(model: PreTrainedModel) -> bool:
    """Return true if a token reaches others by other means than attention and known mixers.

    Attention returns the value of each token for itself, a known mixer computes each token as a document, and the
    embeddings of one token are NaN. Whatever is computed from a NaN is NaN, so that no tolerance is involved.
    """
    ids = sequences()[1]
    poisoned = torch.arange(len(ids)) == len(ids) // 2
    with attention(model.config, OWN_TOKEN), mixing(Documents([1] * len(ids))):
        reached = _reached(model, poisoned, lambda: outputs_of(model, {"input_ids": ids[None]}))
    return not torch.equal(reached, poisoned)


def _reached(model: PreTrainedModel, poisoned: Tensor, outputs: Callable[[], Tensor]) -> Tensor:
    """Return the tokens with an output that is NaN, bool [T], if the embeddings of some tokens are NaN."""

    def poison(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        is_sequence = output.shape[-2] == len(poisoned)
        return output.masked_fill(poisoned[:, None], torch.nan) if is_sequence else output

    tables = {model.get_input_embeddings(), *(part for part in model.modules() if isinstance(part, nn.Embedding))}
    with ExitStack() as stack:
        for table in tables:
            stack.enter_context(table.register_forward_hook(poison, prepend=True))
        return outputs().isnan().any(-1)


def _attend_to_own_token(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return each token's value as its attention [1, T, H, D]."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


def alone(model: PreTrainedModel, rows: Sequence[Tensor] | None = None) -> Tensor:
    """Return the outputs of transformers' own forward, one call for each sequence, one after the other."""
    return torch.cat([outputs_of(model, {"input_ids": ids[None]}) for ids in rows or sequences()])


def packed(model: PreTrainedModel, rows: Sequence[Tensor] | None = None, sharing: Sharing | None = None) -> Tensor:
    """Return the outputs of one forward over a pack of sequences, as the train engine computes it.

    `rows`: the sequences; by default those of `sequences`.
    """
    rows = rows or sequences()
    lengths = [len(row) for row in rows]
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    tree = None if sharing is None else PrefixTree(lengths, sharing, cu_seqlens.device)
    share = ContextShare(cu_seqlens, None, tree)
    positions = torch.cat([torch.arange(length) for length in lengths])
    inputs = {"input_ids": share.take(torch.cat(list(rows)))[None], "position_ids": share.take(positions)[None]}
    layout = PackedLayout(cu_seqlens, max(lengths), share)
    with attention(model.config, PACKED, layout), mixing(Documents(lengths)):
        return share.expand(outputs_of(model, inputs))


def _branches() -> tuple[list[Tensor], Sharing]:
    """Return sequences that begin alike, and the tokens that they share."""
    first, second, third = sequences()
    fork = second[: 2 * WINDOW]
    rows = [torch.cat([fork, first]), second, torch.cat([fork, first[:WINDOW], second]), third]
    return rows, Sharing([1, 0, 2, 3], [0, len(fork) - 1, len(fork) + WINDOW - 1, 0])


@once_per_config
@real_tensors()
@torch.no_grad()
def prefix_refusal(cls: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """Return why tokens with which sequences of a pack begin alike cannot be computed once; None if they can.

    Outputs and gradients of a small model must be those of whole sequences.
    """
    rows, sharing = _branches()
    try:
        model = miniature(cls, config)
        has_experts = bool(experts_of(model))
        use_implementation(model, "eager")
        expected, tolerance = _expected(model, False, has_experts, rows)
        if not difference(expected, packed(model, rows, sharing)) <= tolerance:
            return f"{cls.__name__} computes other outputs then"
        wrong = _wrong_gradients(model, partial(alone, rows=rows), partial(packed, rows=rows, sharing=sharing), True)
        return wrong and f"{cls.__name__} {wrong}"
    except Exception as error:  # of any kind: the class's own code
        return f"a small copy of {cls.__name__} fails then with {summary(error)}"


AttentionInterface.register(OWN_TOKEN, _attend_to_own_token)
AttentionMaskInterface.register(OWN_TOKEN, no_mask)


PLAIN = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_QUANTISED = re.compile(r"scale|zero|absmax|quant|packed|g_idx|_blocks$|SCB$")


def check_fit(reader: Any, path: str | Path, model: nn.Module, shapes: Mapping[str, Shape] | None = None) -> None:
    """Refuse a checkpoint that lacks tensors of the model, or whose tensors it would leave out or read as others.

    `model`: the model; of a transformers class, tied names and names to ignore are known. `shapes`: shapes of its
    parameters and stored buffers, if the model holds parts of them.
    """
    expected, names = shapes or own_shapes(model), set(reader.names())
    problem = _other_type(reader, sorted(names.intersection(expected))) or _untied(reader, names, model)
    problem = problem or _left_over(reader, sorted(names.difference(expected)), model)
    problem = problem or _other_shape(reader, {name: expected[name] for name in expected if name in names})
    if problem:
        raise CheckpointError(f"{path}: {problem}")
    module = model if isinstance(model, BaseTrainModule) else BaseTrainModule()
    for name, parameter in model.named_parameters():
        stored = module.checkpoint_name(name)
        if stored not in names and module.missing_parameter(name, tuple(parameter.shape)) is None:
            reader.shape(stored)  # refuses it


def _other_shape(reader: Any, expected: Mapping[str, Shape]) -> str | None:
    for name, shape in expected.items():
        if (found := tuple(reader.shape(name))) != shape:
            rule = reader.rule(name)
            return f"{name}: the model needs shape {shape}, the checkpoint has {found}{rule and f', made by {rule}'}"
    return None


def _other_type(reader: Any, names: Iterable[str]) -> str | None:
    wrong = next((name for name in names if reader.dtype(name) not in PLAIN), None)
    return wrong and quantised(f"{wrong} is of type {reader.dtype(wrong)}")


def _untied(reader: Any, names: set[str], model: nn.Module) -> str | None:
    for name, source in _tied(model).items():
        if {name, source} <= names and not torch.equal(reader.read(name), reader.read(source)):
            return (
                f"the config ties {name} to {source}, and the file holds two different tensors. Set "
                '"tie_word_embeddings": false in config.json, or write the folder again with save_pretrained()'
            )
    return None


def _left_over(reader: Any, names: Iterable[str], model: nn.Module) -> str | None:
    """Return a text about the tensors that the model neither has nor makes itself, None if there are none."""
    tied, buffers = _tied(model), dict(model.named_buffers())
    ignored = [REBUILT, *(vars(model).get("_keys_to_ignore_on_load_unexpected") or ())]

    def is_known(name: str) -> bool:
        if name in tied or any(re.search(pattern, name) for pattern in ignored):
            return True
        if isinstance(model, BaseTrainModule) and model.leaves_out(name):
            return True
        return name in buffers and torch.equal(reader.read(name).to(buffers[name]), buffers[name])

    left = [name for name in names if not is_known(name)]
    if scale := next(filter(_QUANTISED.search, left), None):
        return quantised(f"it holds {scale}")
    if not left:
        return None
    own = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))  # the class that FSDP extends
    remedy = "they would be left out. Use a model whose class has them, or a checkpoint without them"
    return f"it holds {counted(len(left), 'tensor')} that {own.__name__} does not have, such as {left[0]}; {remedy}"


def _tied(model: nn.Module) -> Mapping[str, str]:
    """Return tied parameters of a transformers model, each with the name of the parameter that it is tied to."""
    return model.get_expanded_tied_weights_keys(all_submodels=True) if isinstance(model, PreTrainedModel) else {}
