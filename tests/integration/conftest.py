"""Checkpoints and engines that the integration tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from rlite import RliteTrainEngine
from tests.tiny import build_model_dir


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random checkpoints: "qwen2" and "qwen3" are tied, "llama" is not."""
    root = tmp_path_factory.mktemp("models")
    return {
        kind: build_model_dir(root / kind, kind, tie=kind != "llama", hidden=64) for kind in ("qwen2", "qwen3", "llama")
    }


@pytest.fixture
def engines() -> Iterator[list[Any]]:
    """A list of engines that are released after the test."""
    built: list[Any] = []
    yield built
    for engine in built:
        engine.release()


@pytest.fixture
def build(engines: list[Any]) -> Callable[..., RliteTrainEngine]:
    """build(meta module, size, **options): an engine that is released after the test."""

    def build_engine(module: nn.Module, size: int, **options: Any) -> RliteTrainEngine:
        engine = RliteTrainEngine(module)
        engine.build(tensor_parallel_size=size, data_parallel_size=1, **options)
        engines.append(engine)
        return engine

    return build_engine
