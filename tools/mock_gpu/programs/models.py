"""Models, losses and batches that the programs share."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu_training import SHAPES
from rlite.trainer.losses import SftLoss
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.trainer.rl.objective import PolicyLoss
from tests.tiny import build_model_dir
from tools.mock_gpu import mock

LAYERS = SHAPES["qwen3-0.6b"]["layers"]


def _weighs_one(weight: torch.Tensor) -> torch.Tensor:
    """Give a weight that was computed on the device a value; reading it waits as it does on a GPU."""
    return mock.write(weight, 1)


class Sft(SftLoss):
    """`SftLoss`, whose packs weigh something."""

    def weight(self, data: Mapping[str, Any]) -> torch.Tensor:
        return _weighs_one(super().weight(data))


class Policy(PolicyLoss):
    """`PolicyLoss`, whose packs weigh something."""

    def weight(self, data: Mapping[str, Any]) -> torch.Tensor:
        return _weighs_one(super().weight(data))


class WholeSft(Sft):
    """The loss with the head at all positions: on the mock, no position of the device's mask is true."""

    def positions(self, data: Mapping[str, Any]) -> None:
        return None


class WholePolicy(Policy):
    """See `WholeSft`."""

    def positions(self, data: Mapping[str, Any]) -> None:
        return None


def small_model(hidden: int = 64, layers: int = LAYERS) -> Path:
    """Return a narrow checkpoint with the layers of Qwen3-0.6B, or fewer."""
    return build_model_dir(Path(tempfile.mkdtemp()) / "model", "qwen3", hidden=hidden, layers=layers, head_dim=64)


def true_model() -> Path:
    """Return a checkpoint of Qwen3-0.6B's shape, with zeros in a file that takes no room on the disk."""
    path, shape = Path(tempfile.mkdtemp()), dict(SHAPES["qwen3-0.6b"])
    build_model_dir(path, "qwen3", layers=1)  # its tokenizer
    sizes = {"hidden_size": shape.pop("hidden"), "num_hidden_layers": shape.pop("layers"), "tie_word_embeddings": True}
    config = AutoConfig.for_model("qwen3", **sizes, **shape, dtype="bfloat16")
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    stop, header = 0, {}
    for name, parameter in model.named_parameters():
        start, stop = stop, stop + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + stop)
    return path


def trainable(path: Path) -> Any:
    """Return a module that trains the model with AdamW."""
    options = OptimizerOptions(lr=1e-4, weight_decay=0.01, scheduler="constant", warmup_steps=0, total_steps=100)
    return policy_module(path, options)
