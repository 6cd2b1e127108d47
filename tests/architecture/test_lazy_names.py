"""Names that are loaded when they are first used are there whatever was used before."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("statement", ["from rlite import stats_tracker", "import rlite; rlite.stats_tracker.export()"])
def test_a_module_among_the_public_names_is_there_before_anything_else(statement: str) -> None:
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
