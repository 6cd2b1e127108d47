from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorded_run import Shape, write_run


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with 8 recorded steps, which no test changes."""
    return write_run(tmp_path_factory.mktemp("runs") / "first", Shape(steps=8, groups=8, samples=4, thoughts=4))
