"""Models whose checkpoints are stored in another form are trained, synced, served and exported in that form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import rlite
from rlite import RliteInferenceEngine
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.config import load
from rlite.data.sft import preference_rows, sft_rows
from rlite.errors import CheckpointError
from rlite.trainer.rm import RmTrainer
from rlite.trainer.sft import SftTrainer
from rlite.trainer.supervised_options import RmConfig, SftConfig
from tests.unit.backends.models.small import container, tensors_in, text_model, written

ROWS = [{"prompt": f"{n}>", "response": "yes" * n} for n in range(1, 5)]
PAIRS = [{"prompt": f"{n}>", "chosen": "yes" * n, "rejected": "no"} for n in range(1, 5)]


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


def stored(kind: str, folder: Path) -> Path:
    """A checkpoint with a tokenizer."""
    written(container(kind) if kind in ("gemma3", "mistral3") else text_model(kind), folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def sft(model: Path, out: Path, *settings: str) -> Path:
    """Train a model for one step, and return its export."""
    given = [f"actor.model_name={model}", "data.path=-", "data.batch_size=4", f"trainer.save_dir={out}"]
    config = load(SftConfig, [*given, "actor.lr=1e-2", "trainer.n_epochs=1", *settings])
    SftTrainer(config, sft_rows(ROWS, byte_tokenizer(), 64)).fit()
    return out / "latest"


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_the_text_model_is_trained_and_the_rest_of_the_container_is_exported_unchanged(kind: str, tmp_path: Path) -> None:
    model = stored(kind, tmp_path / "model")
    out = sft(model, tmp_path / "run")
    changed = difference(tensors_in(model), tensors_in(out))
    assert changed
    assert all("language_model" in name or "lm_head" in name for name in changed)
    assert AutoConfig.from_pretrained(out).architectures == AutoConfig.from_pretrained(model).architectures
    found = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)[1]
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]


def test_gpt_neox_is_trained_and_exported_under_its_stored_names(tmp_path: Path) -> None:
    model = stored("gpt_neox", tmp_path / "model")
    out = sft(model, tmp_path / "run")
    assert difference(tensors_in(model), tensors_in(out))
    assert "embed_out.weight" in tensors_in(out)
