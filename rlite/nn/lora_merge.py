"""Merge of an exported adapter (PEFT) into its base."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlite.checkpoint.huggingface import copy_companions
from rlite.errors import CheckpointError, ConfigError
from rlite.files import reading
from rlite.nn.architecture import summary
from rlite.nn.pretrained import load_adapter, load_config, load_model, local_checkpoint, opening
from rlite.nn.score import pad_apart

_SCORER = "SEQ_CLS"
PATTERN_S = 5
"""seconds for the patterns of an adapter's config"""


def adapter_config(folder: Path) -> Mapping[str, Any]:
    """Return the config of a PEFT adapter.

    Raises:
        ConfigError: the file is not readable.
    """
    file = folder / "adapter_config.json"
    try:
        with reading(file) as stream:
            found = json.load(stream)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not a config of PEFT: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{file}: not a config of PEFT: expected a mapping")
    return found


def merge_adapter(folder: Path, base: str, out: Path) -> None:
    """Write a base model with an adapter merged into its weights, as an ordinary Hugging Face folder.

    The sum is computed in float32 and stored in the base's dtype. A head or embedding with an adapter is not tied in
    the result. Both models must compute the same logits.

    Args:
        folder: folder of the adapter, in PEFT's format.
        base: folder or hub name of the model that the adapter belongs to.
        out: an empty folder.

    Raises:
        ConfigError: PEFT is missing, there is no such base, or the adapter does not fit it.
        CheckpointError: the base or the adapter is unusable.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("adapters need the package peft: pip install 'rlite[lora]'")
    import peft  # optional, and slow to import

    origin, config = local_checkpoint(base), adapter_config(folder)
    with opening(folder, "adapter"):
        weights = peft.load_peft_weights(str(folder), device="cpu")
    model = _base(origin, config, weights)
    _check_patterns(folder, config, [name for name, _ in model.named_modules()])
    _untie(model, weights)
    try:
        adapted = load_adapter(peft.PeftModel, model, folder).eval()
        strange = sorted(weights.keys() ^ peft.get_peft_model_state_dict(adapted).keys())
        before = _logits(adapted)
        merged = adapted.merge_and_unload(safe_merge=True)
        merged.tie_weights()
    except (AttributeError, CheckpointError, KeyError, RuntimeError, ValueError) as error:  # PEFT has none of its own
        raise ConfigError(f"adapter={folder} does not fit {base}: {summary(error)}") from error
    if strange:
        raise ConfigError(
            f"adapter={folder} does not fit {base}: {len(strange)} tensors belong to one of them only, such as "
            f"{strange[0]}"
        )
    if not torch.allclose(before, after := _logits(merged), atol=1e-3 * float(before.abs().max()), rtol=1e-3):
        raise ConfigError(
            f"adapter={folder}: merged into {base}, it computes other logits than beside it, by up to "
            f"{(before - after).abs().max():.3g}; serve it as an adapter"
        )
    merged.to(load_config(origin).dtype or torch.float32).save_pretrained(out)
    own = next((place for place in (folder, folder.parent) if (place / "tokenizer_config.json").exists()), origin)
    copy_companions(origin, out, tokenizer=own)
    if config.get("task_type") == _SCORER:
        pad_apart(out)


def _base(origin: Path, adapter: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Any:
    """Return the base model in float32, with the head that the adapter was trained with."""
    if adapter.get("task_type") != _SCORER:
        return load_model(AutoModelForCausalLM, origin)
    head = next((tensor for name, tensor in weights.items() if name.endswith("score.weight")), None)
    labels = {} if head is None else {"num_labels": len(head)}
    return load_model(AutoModelForSequenceClassification, origin, **labels)


def _untie(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Give a tied head a weight of its own if the adapter changes the head or the embedding alone."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = [name for name, module in model.named_modules() if module in (head, embedding)]
    is_tied = head is not None and head.weight is embedding.weight
    if is_tied and any(f".{name}." in tensor for name in names for tensor in weights):
        head.weight = torch.nn.Parameter(embedding.weight.detach().clone())
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    ids = torch.arange(16)[None] * 7 % model.config.get_text_config().vocab_size
    return model(input_ids=ids, use_cache=False).logits.float()


def _check_patterns(folder: Path, adapter: Mapping[str, Any], names: list[str]) -> None:
    """Refuse regular expressions of a stranger that take too long on the names of modules, as PEFT matches them.

    Only a signal interrupts a match, so this is for the main thread.

    Raises:
        ConfigError: the expressions take more than PATTERN_S.
    """

    def stop(*_: object) -> None:
        raise ConfigError(
            f"{folder}: the patterns of its adapter_config.json take more than {PATTERN_S} s to match the names of "
            "modules; name the modules of target_modules instead"
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PATTERN_S)
    try:
        for pattern in (text for text in _texts(adapter) if set(text) & set("*+{")):
            with suppress(re.error, OverflowError, RecursionError):
                for tried in (re.compile(pattern), re.compile(rf"(.*\.)?({pattern})$")):
                    _ = [tried.fullmatch(name) or tried.match(name) for name in names]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _texts(part)
