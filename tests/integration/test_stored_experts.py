"""Experts and stored buffers on two ranks: each rank reads its own, and export and sync give back what was stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from rlite import RliteTrainEngine
from rlite.nn import HuggingFaceFsdp2TrainModule
from tests.integration.worlds import world
from tests.unit.backends.models.small import tensors_in, text_model, written


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(2):
        yield


def module(kind: str, path: Path) -> Any:
    """A train module of a class that need not be one that packs compute equally."""
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text_model(kind).config)]

    class Unchecked(HuggingFaceFsdp2TrainModule, cls):
        def check_architecture(self) -> None:
            pass

    with init_empty_weights():
        return Unchecked.from_pretrained(path)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gemma4_text"])
def test_two_ranks_read_sync_and_export_what_was_stored(kind: str, tmp_path: Path) -> None:
    expected = written(text_model(kind), tmp_path / "one")
    written(text_model(kind), tmp_path / "other")
    other = {name: torch.rand_like(tensor) for name, tensor in expected.items()}
    save_file(other, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    source = RliteTrainEngine(module(kind, tmp_path / "one"))
    source.build(tensor_parallel_size=2)
    target = RliteTrainEngine(module(kind, tmp_path / "other"))
    target.build(tensor_parallel_size=2, colocate_with=source)
    source.p2p_weight_sync(target, verify_checksums=True)
    for engine, name in ((source, "source"), (target, "target")):
        engine.save(tmp_path / name)
        found = tensors_in(tmp_path / name)
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        engine.release()
