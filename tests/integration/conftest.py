"""Checkpoints that the integration tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import build_model_dir


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random checkpoints: "qwen2" and "qwen3" are tied, "llama" is not."""
    root = tmp_path_factory.mktemp("models")
    return {
        kind: build_model_dir(root / kind, kind, tie=kind != "llama", hidden=64) for kind in ("qwen2", "qwen3", "llama")
    }
