"""Fixtures of the tests of first use."""

from __future__ import annotations

import pytest

from tests.tiny import build_model_dir


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model with random weights."""
    return str(build_model_dir(tmp_path_factory.mktemp("models") / "qwen2", hidden=64))
