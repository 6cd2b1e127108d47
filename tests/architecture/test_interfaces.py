"""`docs/interfaces.md` is what its generator writes from the code."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests import forked_python

GENERATOR = Path(__file__).parents[2] / "docs" / "generate_interfaces.py"
ABSENT = ("vllm", "sglang", "ray")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_interfaces", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date_and_needs_no_optional_package(generator: ModuleType) -> None:
    # in a process of its own: Ray adds parameters to the methods of classes that other tests have made actors of
    program = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({ABSENT!r}))  # None: an import of it fails\n"
        f"print(runpy.run_path({str(GENERATOR)!r})['page'](), end='')\n"
    )
    done = subprocess.run(
        [forked_python.python(), "-c", program], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert generator.PAGE.read_text() == done.stdout, "run: make interfaces"


@pytest.mark.parametrize("name", ["call_timeout=3600.0", "start_timeout=300.0", "materialization_source()"])
def test_names_that_users_look_for_are_there(generator: ModuleType, name: str) -> None:
    assert name in generator.PAGE.read_text()


def test_arguments_are_written_as_in_a_call(generator: ModuleType) -> None:
    def function(a, /, b=1, *, c="x", d=GENERATOR, **rest):
        """Do it.

        In many words.
        """

    assert generator.entry("do", function) == "- `do(a, b=1, *, c='x', d=..., **rest)`: Do it."
