"""One check for training and serving: does rlite compute a model as transformers does?

Training and serving replace the model's attention by their own, through transformers' attention interface, and give
several sequences to one forward. A model that mixes tokens by other means, or computes positions or masks itself, would
be computed wrongly without any error. So a small model of its class and options runs both ways, and must agree.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from rlite.errors import ConfigError, RliteError, StorageError
from rlite.nn.attention import PACKED, PackedLayout, attention, no_mask
from rlite.nn.meta import real_tensors
from rlite.nn.miniature import LENGTH_DEPENDENT_ROPE, SPECIAL_IDS, WINDOW, miniature, saved
from rlite.parallel.shards import CheckpointReader
from rlite.parallel.tensor_plan import attention_shape

LENGTHS = (WINDOW + 2, 2 * WINDOW + 3, 1)
"""tokens of the sequences that are compared: two are longer than a window, and a single token has no past"""
TOLERANCE = 1e-4
"""largest difference of two logits in float32, in standard deviations of all logits; rounding gives 1e-6"""
EXACT_TOLERANCE = 1e-9
"""the same in float64, where rounding gives 1e-15"""
MAX_FLASH_WIDTH = 256
"""widest head of torch's flash attention"""
EXPERTS = re.compile(r"expert|moe|(^|\.)router(_gate)?\.", re.IGNORECASE)
"""parts of parameter names that only mixtures of experts have"""
OWN_TOKEN = "rlite_own_token"
"""attention in which a token sees itself alone"""
KNOWN_LAYERS = {"full_attention", "sliding_attention"}
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


def check_architecture(cls: type[PreTrainedModel], config: PreTrainedConfig, names: Iterable[str] = ()) -> None:
    """Refuse a model that a pack would compute differently from transformers.

    Args:
        cls: the transformers class.
        config: the model's config.
        names: names of the checkpoint's or module's parameters, by which mixtures of experts are recognised.

    Raises:
        ConfigError: the model is refused; the message gives the reason.
    """
    reason = _experts(names) or refusal(cls, config)
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
    found: dict[tuple[int, int], None] = {}
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
        if (reason := _experts(name for name, _ in model.named_parameters())) is not None:
            return reason
        expected, tolerance = _expected(model)
    except Exception as error:  # of any kind: the class's own code
        return _state(cls) or f"cannot be checked: a small copy of it fails with {summary(error)}"
    fault = "mixes tokens by other means than attention"
    try:
        if not mixes_tokens(model):
            if unknown := _unknown_layers(model.config):
                return f"has layers of kind {unknown}, which rlite does not know"
            if difference(expected, packed(model)) <= tolerance:
                return _renamed(model)
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


def _experts(names: Iterable[str]) -> str | None:
    found = next(filter(EXPERTS.search, names), None)
    return found and f"is a mixture of experts ({found}), which rlite does not support yet"


def _renamed(model: PreTrainedModel) -> str | None:
    """Return a text about the first tensor that transformers renames or converts on reading a checkpoint, if any.

    rlite reads tensors as they are.
    """
    with saved(model) as folder:
        stored = set(CheckpointReader(folder).names())
    missing = next((name for name, _ in model.named_parameters() if name not in stored), None)
    return missing and f"has checkpoints that name tensors otherwise ({missing}), and rlite does not convert them"


def _state(cls: type[PreTrainedModel]) -> str | None:
    if not cls._is_stateful:
        return None
    return "keeps a recurrent state, which would run on from one sequence of a pack into the next"


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


def summary(error: BaseException) -> str:
    """Return an error's message in one line, with its kind if it is not rlite's own."""
    text = textwrap.shorten(str(error), 200, placeholder=" ...")
    return text if isinstance(error, RliteError) else f"{type(error).__name__}: {text}"


def rope_parts(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the rotary parameters of a config: of all layers, and by kind of layer."""
    rope = vars(config).get("rope_parameters") or {}
    return [part for part in (rope, *rope.values()) if isinstance(part, dict)]


def rope_limit(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence whose rotary angles do not depend on other sequences, None for any length.

    With `longrope` and `dynamic` a longer sequence changes the angles of every other one in the same forward.
    """
    limits = [
        part.get("original_max_position_embeddings") or config.max_position_embeddings
        for part in rope_parts(config)
        if part.get("rope_type") in LENGTH_DEPENDENT_ROPE
    ]
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
    hooks = [table.register_forward_hook(poison, prepend=True) for table in tables]
    try:
        with attention(model.config, OWN_TOKEN):
            reached = outputs_of(model, {"input_ids": ids[None]}).isnan().any(-1)
    finally:
        for hook in hooks:
            hook.remove()
    return reached.nonzero().flatten().tolist() != [poisoned]


def _attend_to_own_token(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    widths: dict[tuple[int, int], None] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return each token's value as its attention [1, T, H, D], and note the widths of queries and values."""
    if widths is not None:
        widths[query.shape[-1], value.shape[-1]] = None
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2), None


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
