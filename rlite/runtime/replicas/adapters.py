"""A low-rank adapter (LoRA, Hu et al. 2021) on its way between engines, and in PEFT's files.

An adapter adds `alpha / rank up @ down` to the weight of each of its layers. The layers keep their own weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlite.errors import CheckpointError, ConfigError
from rlite.files import reading
from rlite.runtime.storage.atomic import FACTS

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's files"""
MAX_JSON = 1 << 24
"""bytes of a JSON file that are read: what follows in a larger one makes it unusable"""
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_PLAIN = {"use_dora": False, "use_rslora": False, "bias": "none", "lora_bias": False, "fan_in_fan_out": False}
"""values of PEFT's options that mean nothing but two factors beside a layer"""
_EMPTY = ("rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices")
"""further options of PEFT that would change what the factors mean"""


class Factors(NamedTuple):
    """The adapter of one layer."""

    down: Tensor
    """[rank, in]"""
    up: Tensor
    """[out, rank]"""


@dataclass(frozen=True)
class AdapterWeights:
    """The values of one adapter, whole and on CPU."""

    rank: int
    alpha: float
    factors: Mapping[str, Factors]
    """by the name of the layer, as PEFT and the checkpoint call it"""
    base: str = ""
    """`Engine.base_id` of the weights that it belongs to; "" if that is not known"""

    @property
    def scale(self) -> float:
        """Factor of the product of the factors."""
        return self.alpha / self.rank

    @property
    def is_zero(self) -> bool:
        """True if all products of factors are 0."""
        return not any(down.any() and up.any() for down, up in self.factors.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the factors."""
        return sum(tensor.nbytes for pair in self.factors.values() for tensor in pair)

    def write(self, folder: Path, base: str | None = None, targets: Sequence[str] = ()) -> None:
        """Write PEFT's files into a folder. `peft.PeftModel.from_pretrained(base, folder)` and vLLM open them.

        Args:
            folder: the folder, which exists.
            base: name or path of the base model, for PEFT.
            targets: names of the layers, or how they end; () names every layer whole.
        """
        kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
        form = {"r": self.rank, "lora_alpha": self.alpha, "lora_dropout": 0.0, "bias": "none"}
        config = {**kind, **form, "target_modules": [*(targets or self.factors)]}
        (folder / CONFIG).write_text(json.dumps(config, indent=2))
        tensors: dict[str, Tensor] = {}
        for layer, (down, up) in self.factors.items():
            tensors |= {f"{_PREFIX}{layer}{_DOWN}": down.contiguous(), f"{_PREFIX}{layer}{_UP}": up.contiguous()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    @classmethod
    def read(cls, folder: Path) -> AdapterWeights:
        """Return the adapter in a folder with PEFT's files.

        Args:
            folder: the folder.

        Raises:
            CheckpointError: a file is missing or cannot be read, or a tensor is not finite.
            ConfigError: the adapter is more than two factors beside linear layers, such as DoRA.
        """
        try:
            config, facts = _mapping(folder / CONFIG), _mapping(folder / FACTS) if (folder / FACTS).exists() else {}
            with reading(folder / WEIGHTS):  # else a pipe would be waited for
                tensors = load_file(folder / WEIGHTS)
            rank, alpha, base = int(config["r"]), float(config["lora_alpha"]), facts.get("base", "")
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{folder}: no usable adapter in PEFT's format: {error}") from error
        odd = [name for name, plain in _PLAIN.items() if config.get(name, plain) not in (plain, None)]
        odd += [name for name in _EMPTY if config.get(name)]
        layers = {name.removeprefix(_PREFIX).removesuffix(end) for name in tensors for end in (_DOWN, _UP)}
        layers = {layer for layer in layers if not layer.endswith((_DOWN, _UP))}
        names = {f"{_PREFIX}{layer}{end}" for layer in layers for end in (_DOWN, _UP)}
        if odd or not tensors or names != tensors.keys():
            found = f"{odd[0]}={config[odd[0]]!r}" if odd else f"the tensor {min(names ^ tensors.keys(), default=None)}"
            told = "expected two factors of one rank beside each linear layer, found"
            raise ConfigError(f"adapter {folder}: {told} {found}; merge it into its base with `rlite merge`")
        pairs = {n: Factors(tensors[f"{_PREFIX}{n}{_DOWN}"], tensors[f"{_PREFIX}{n}{_UP}"]) for n in sorted(layers)}
        if wrong := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
            raise CheckpointError(f"{folder}: the adapter is not finite: {wrong[0]} holds NaN or infinity")
        return cls(rank, alpha, pairs, str(base))


def _mapping(file: Path) -> dict[str, Any]:
    with reading(file) as stream:
        return dict(json.loads(stream.read(MAX_JSON)))


def probe_ids(vocab_size: int, max_model_len: int) -> list[int]:
    """Return the tokens of a prompt that shows whether an adapter changes a logit.

    Args:
        vocab_size: size of the vocabulary.
        max_model_len: longest sequence of the engine; one token is left for an answer.
    """
    return [7 * index % vocab_size for index in range(min(16, max_model_len - 1))]


def check_fit(adapter: AdapterWeights, what: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that an adapter fits the layers of a base model.

    Args:
        adapter: the adapter.
        what: name of the adapter, for errors.
        shapes: [out, in] of every linear layer of the base model, by name.

    Raises:
        ConfigError: a layer is missing or has another size.
    """
    for layer, (down, up) in adapter.factors.items():
        found = shapes.get(layer)
        made = (up.shape[0], down.shape[1])
        if found != made or down.shape[0] != adapter.rank or up.shape[1] != adapter.rank:
            has = "has no such linear layer" if found is None else f"has {list(found)} there"
            told = f"it has factors {list(down.shape)} and {list(up.shape)} of rank {adapter.rank} beside {layer}"
            raise ConfigError(f"{what} belongs to another base model: {told}, and this model {has}")
