"""Merge of an exported adapter (PEFT) into its base."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlite.errors import ConfigError
from rlite.nn.pretrained import local_checkpoint

_SCORER = "SEQ_CLS"


def adapter_config(folder: Path) -> Mapping[str, Any]:
    """Return the config of a PEFT adapter.

    Raises:
        ConfigError: the file is not readable.
    """
    file = folder / "adapter_config.json"
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not a config of PEFT: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{file}: not a config of PEFT: expected a mapping")
    return found


def merge_adapter(folder: Path, base: str, out: Path) -> None:
    """Write a base model with an adapter merged into its weights, as an ordinary Hugging Face folder.

    The sum is computed in float32 and stored in the base's dtype.

    Args:
        folder: folder of the adapter, in PEFT's format.
        base: folder or hub name of the model that the adapter belongs to.
        out: an empty folder.

    Raises:
        ConfigError: PEFT is missing, there is no such base, or the adapter does not fit it.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("adapters need the package peft: pip install 'rlite[lora]'")
    import peft  # optional, and slow to import

    weights = peft.load_peft_weights(str(folder), device="cpu")
    origin = local_checkpoint(base)
    model = _base(origin, adapter_config(folder), weights)
    try:
        adapted = peft.PeftModel.from_pretrained(model, str(folder))
        strange = sorted(weights.keys() ^ peft.get_peft_model_state_dict(adapted).keys())
        merged = adapted.merge_and_unload(safe_merge=True)
    except (AttributeError, KeyError, RuntimeError, ValueError) as error:  # PEFT has no errors of its own
        raise ConfigError(f"adapter={folder} does not fit {base}: {error}") from error
    if strange:
        raise ConfigError(
            f"adapter={folder} does not fit {base}: {len(strange)} tensors belong to one of them only, such as "
            f"{strange[0]}"
        )
    merged.to(AutoConfig.from_pretrained(origin).dtype or torch.float32).save_pretrained(out)
    tokenizer = next((place for place in (folder, folder.parent) if (place / "tokenizer_config.json").exists()), origin)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(out)


def _base(origin: Path, adapter: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Any:
    """Return the base model in float32, with the head that the adapter was trained with."""
    if adapter.get("task_type") != _SCORER:
        return AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float32)
    head = next((tensor for name, tensor in weights.items() if name.endswith("score.weight")), None)
    labels = {} if head is None else {"num_labels": len(head)}
    return AutoModelForSequenceClassification.from_pretrained(origin, dtype=torch.float32, **labels)
