"""Checks of architectures: small models of a config, with a layer of each kind, and what mixes their tokens.

Compare the tensors of a checkpoint with those of the model, so that none is left out unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from rlite.backends.models.attention import PACKED, PackedLayout, attention, no_mask
from rlite.backends.models.experts import experts_of, other_form, stored_buffers, use_implementation
from rlite.errors import CheckpointError, ConfigError, StorageError, why_not_written
from rlite.nn.base import BaseTrainModule
from rlite.nn.pretrained import quantised, quiet_transformers, real_tensors, rope_parts, summary
from rlite.runtime.parallel.shards import CheckpointReader
from rlite.runtime.parallel.tensor import attention_shape
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

SIZES = {
    r"d_model|hidden_size|n_embd|word_embed_proj_dim|(input_|output_)?embedding_size": NUM_HEADS * HEAD_DIM,
    r"n_head|(decoder|encoder|num)_attention_heads": NUM_HEADS,
    r"qk_head_dim": HEAD_DIM + ROPE_HEAD_DIM,
    r"rotary_dim|(?!.*nope).*rope_head_dim.*": ROPE_HEAD_DIM,
    r".*(lora_rank|hidden_size_per_layer_input)": HEAD_DIM,
    r"vocab_size.*": VOCABULARY,  # of a smaller model, too: the sequences of a check have ids up to 100
}
"""sizes by the pattern of their names"""
MOST = {
    r"max_position_embeddings|n_ctx|n_positions": 16 * CONTEXT,
    r"d_ff|n_inner|.*(intermediate|ffn).*": 6 * HEAD_DIM,
    r"(?!.*(layers|pattern)).*window.*|.*chunk_size.*": WINDOW,
}
"""largest values by the pattern of their names"""
KEY_HEADS = {"num_global_key_value_heads", "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"}
IDS = ("token_id", "token_ids", "token_index")
NOT_COPIED = {"architectures", "dtype", "model_type", "quantization_config", "transformers_version"}


def miniature(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a small `cls` in float32 on the CPU with random weights, in evaluation mode.

    Weights are wider than a fresh model's, so that a wrong mask or position changes the outputs visibly. The process's
    random state stays as it was.

    The small model has all layers of the large one, because code may tell layers apart by their numbers alone.

    For a config that it cannot use, the class raises its own error.

    Raises:
        ConfigError: the config has too many layers of different kinds.
    """
    with real_tensors(), torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(0)
        model = cls._from_config(miniature_config(config), dtype=torch.float32)
        with torch.no_grad():
            for module in model.modules():
                for parameter in module.parameters(recurse=False):
                    _randomise(module, parameter)
    return model.eval()


@contextmanager
def saved(model: PreTrainedModel) -> Iterator[str]:
    """Write a checkpoint into a temporary folder, without transformers' progress bar.

    Yields:
        Path of the folder.

    Raises:
        StorageError: it could not be written.
    """
    with TemporaryDirectory() as folder:
        try:
            with quiet_transformers():
                (model.config if experts_of(model) else model).save_pretrained(folder)
                if experts_of(model):
                    tensors = {**dict(model.named_parameters()), **stored_buffers(model)}
                    save_file(tensors, Path(folder) / "model.safetensors")
        except (OSError, SafetensorError) as error:
            told = f"{folder}: a small model for the check of this model could not be written"
            raise StorageError(f"{told}: {why_not_written(error)}") from error
        yield folder


def miniature_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return `config` with small sizes, and all its layers.

    Raises:
        ConfigError: there are too many layers to build them all.
    """
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
    for pattern, size in SIZES.items():
        if re.fullmatch(pattern, name):
            return size
    if "head_dim" in name:
        return HEAD_DIM * (1 + (value > (config.get("head_dim") or value)))  # those of some layers may be larger
    return min([value, *(most for pattern, most in MOST.items() if re.fullmatch(pattern, name))])


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


def _randomise(module: nn.Module, parameter: nn.Parameter) -> None:
    noise = torch.randn(parameter.shape)
    if isinstance(module, nn.Embedding):
        parameter.copy_(noise / 2)
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
ROUTER_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
"""the same for mixtures of experts, many of whose routers compute in float32 always, and for their gradients"""
MAX_FLASH_WIDTH = 256
"""widest head of torch's flash attention"""
OWN_TOKEN = "rlite_own_token"
"""attention in which a token sees itself alone"""
KNOWN_LAYERS = {"full_attention", "sliding_attention"}
REMEDY = "Use another model; docs/architectures.md lists the classes that work"


Check = Callable[[type[PreTrainedModel], PreTrainedConfig], str | None]
Widths = dict[tuple[int, int], None]
"""widths of queries and values, each pair once"""


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
    """Refuse a model that a pack would compute differently from transformers.

    Args:
        cls: the transformers class.
        config: the model's config.

    Raises:
        ConfigError: the model is refused; the message gives the reason.
    """
    reason = refusal(cls, config)
    if reason is not None:
        raise ConfigError(f"{cls.__name__} ({config.model_type!r}) {reason}. {REMEDY}")


def check_gpu_kernels(cls: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Refuse a model whose heads are too wide for the attention kernels of GPUs, in float16 and bfloat16.

    Raises:
        ConfigError: the model is refused; the message gives the widths.
    """
    for query, value in attention_widths(cls, config):
        if query != value or query > MAX_FLASH_WIDTH or query % 8:
            raise ConfigError(
                f"{cls.__name__} ({config.model_type!r}) has heads of width {query} and values of width {value}. On "
                f"GPUs, rlite's attention takes equal widths up to {MAX_FLASH_WIDTH}, in multiples of 8. {REMEDY}"
            )


def attention_widths(cls: type[PreTrainedModel], config: PreTrainedConfig) -> list[tuple[int, int]]:
    """Return the widths of queries and values that the attention of a model is given, each pair once.

    The model runs on tensors without storage. If it reads their values, the widths are those that the config states.
    """
    found: Widths = {}
    try:
        with FakeTensorMode(), torch.no_grad():
            model = cls._from_config(config).eval()
            with attention(config, OWN_TOKEN):
                model.base_model(input_ids=torch.ones(1, 1, dtype=torch.long), use_cache=False, widths=found)
    except Exception:  # of any kind: the class's own code
        head_dim = attention_shape(config)[3]
        found[head_dim, head_dim] = None
    return list(found)


@once_per_config
@real_tensors()
@torch.no_grad()
def refusal(cls: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """Return why a pack would be computed differently from transformers, None if it would not.

    Raises:
        StorageError: the small model could not be written.
    """
    try:
        model = miniature(cls, config)
        has_experts = bool(experts_of(model))
        use_implementation(model, "eager")
        if (reason := other_form(model, {"input_ids": sequences()[0][None]})) is not None:
            return reason
        expected, tolerance = _expected(model)
    except Exception as error:  # of any kind: the class's own code
        return _state(cls) or f"cannot be checked: a small copy of it fails with {summary(error)}"
    fault = "mixes tokens by other means than attention"
    try:
        if not mixes_tokens(model):
            if unknown := _unknown_layers(model.config):
                return f"has layers of kind {unknown}, which rlite does not know"
            if difference(expected, packed(model)) <= (ROUTER_TOLERANCE if has_experts else tolerance):
                return _wrong_gradients(model) if has_experts else _renamed(model)
            fault = "computes masks or positions itself"
    except StorageError:  # says nothing of the class
        raise
    except Exception as error:
        fault = f"does not run with sequences in packs: {summary(error)}"
    return _why(model, expected) or fault


def _expected(model: PreTrainedModel) -> tuple[Tensor, float]:
    """Return transformers' outputs and the tolerance: in float64, or in float32 if the class cannot compute in it."""
    try:
        return alone(model.double()), EXACT_TOLERANCE
    except Exception:  # of any kind: the class's own code
        return alone(model.float()), TOLERANCE


def _wrong_gradients(model: PreTrainedModel) -> str | None:
    """Return a text about a parameter of a mixture of experts whose gradient differs in a pack, in training mode."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    found = [_gradients(model, compute) for compute in (alone, packed)]
    for name, expected in found[0].items():
        if difference(expected, found[1][name]) > GRADIENT_TOLERANCE:
            return f"has other gradients in packs ({name}), or draws random numbers in training"
    return None


@torch.enable_grad()
def _gradients(model: PreTrainedModel, compute: Callable[[PreTrainedModel], Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the sum of squared outputs, of each parameter that has one, scaled to deviation 1."""
    model.zero_grad()
    compute(model).double().square().mean().backward()
    return {name: p.grad / p.grad.std() for name, p in model.named_parameters() if p.grad is not None and p.numel() > 1}


def _renamed(model: PreTrainedModel) -> str | None:
    """Return a text about the first tensor that transformers renames or converts on reading a checkpoint, if any.

    rlite reads tensors as they are.
    """
    with saved(model) as folder:
        stored = set(CheckpointReader(folder).names())
    missing = next((name for name, _ in model.named_parameters() if name not in stored), None)
    return missing and f"has checkpoints that name tensors otherwise ({missing}), and rlite does not convert them"


def _state(cls: type[PreTrainedModel]) -> str | None:
    reason = "keeps a recurrent state, which would run on from one sequence of a pack into the next"
    return reason if cls._is_stateful else None


def _why(model: PreTrainedModel, expected: Tensor) -> str | None:
    """Return the property of the class that explains a difference, if it is a known one."""
    if unknown := _unknown_layers(model.config):
        return f"has layers of kind {unknown}, which mix tokens by other means than attention"
    if (reason := _state(type(model))) is not None:
        return reason
    shorter = outputs_of(model, {"input_ids": sequences()[1][None, :-1]})
    if difference(expected[LENGTHS[0] :][: len(shorter)], shorter) > TOLERANCE:
        return "is not causal: tokens see later ones (an encoder needs is_decoder=true in its config)"
    if not model._supports_attention_backend:
        return "computes attention in code of its own, or does not hand arguments through to transformers' interface"
    return None


def _unknown_layers(config: PreTrainedConfig) -> str:
    """Return the kinds of layers that rlite does not know, as the config names them."""
    kinds = set(vars(config.get_text_config()).get("layer_types") or ())
    return ", ".join(sorted(kinds - KNOWN_LAYERS))


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
    """Return true if a token reaches others by other means than attention: a convolution, a recurrent state.

    Attention returns the value of each token for itself, and the embeddings of one token are NaN. Whatever is computed
    from a NaN is NaN, so that no tolerance is involved.
    """
    ids = sequences()[1]
    poisoned = len(ids) // 2

    def poison(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        places = torch.arange(len(ids)) == poisoned
        return output.masked_fill(places[:, None], torch.nan) if output.shape[-2] == len(ids) else output

    tables = {model.get_input_embeddings(), *(part for part in model.modules() if isinstance(part, nn.Embedding))}
    with ExitStack() as stack, attention(model.config, OWN_TOKEN):
        for table in tables:
            stack.enter_context(table.register_forward_hook(poison, prepend=True))
        reached = outputs_of(model, {"input_ids": ids[None]}).isnan().any(-1)
    return reached.nonzero().flatten().tolist() != [poisoned]


def _attend_to_own_token(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, widths: Widths | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return each token's value as its attention [1, T, H, D], and note the widths of queries and values."""
    if widths is not None:
        widths[query.shape[-1], value.shape[-1]] = None
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


def alone(model: PreTrainedModel) -> Tensor:
    """Return the outputs of transformers' own forward, one call for each sequence, one after the other."""
    return torch.cat([outputs_of(model, {"input_ids": ids[None]}) for ids in sequences()])


def packed(model: PreTrainedModel) -> Tensor:
    """Return the outputs of one forward over a pack of all sequences, as the train engine computes it."""
    cu_seqlens = F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    inputs = {"input_ids": torch.cat(sequences())[None], "position_ids": positions[None]}
    with attention(model.config, PACKED):
        return outputs_of(model, {**inputs, "packed_layout": PackedLayout(cu_seqlens, max(LENGTHS))})


AttentionInterface.register(OWN_TOKEN, _attend_to_own_token)
AttentionMaskInterface.register(OWN_TOKEN, no_mask)


PLAIN = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_QUANTISED = re.compile(r"scale|zero|absmax|quant|packed|g_idx|_blocks$|SCB$")
_REBUILT = re.compile(r"rotary_emb\.inv_freq|(^|\.)position_ids$")
"""buffers of old checkpoints that every class computes itself"""


def check_fit(reader: Any, expected: Collection[str], path: str | Path, model: nn.Module) -> None:
    """Refuse a checkpoint with tensors that the model would leave out or read as other numbers.

    The code that reads the tensors refuses missing ones and other shapes.

    Args:
        reader: a `CheckpointReader`, or another reader of its interface.
        expected: the checkpoint's names of the model's parameters.
        path: the checkpoint, for messages.
        model: the model; of a transformers class, tied names and names to ignore are known.

    Raises:
        CheckpointError: the message names a tensor and the remedy.
    """
    names = set(reader.names())
    problem = _other_type(reader, sorted(names.intersection(expected))) or _untied(reader, names, model)
    problem = problem or _left_over(reader, sorted(names.difference(expected)), model)
    if problem:
        raise CheckpointError(f"{path}: {problem}")


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
    ignored = [_REBUILT, *(vars(model).get("_keys_to_ignore_on_load_unexpected") or ())]

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
    return (
        f"it holds {counted(len(left), 'tensor')} that {own.__name__} does not have, such as {left[0]}; they "
        "would be left out. Use a model whose class has them, or a checkpoint without them"
    )


def _tied(model: nn.Module) -> Mapping[str, str]:
    """Return tied parameters of a transformers model, each with the name of the parameter that it is tied to."""
    return model.get_expanded_tied_weights_keys(all_submodels=True) if isinstance(model, PreTrainedModel) else {}
