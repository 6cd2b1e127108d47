"""`docs/interfaces.md` is what its generator writes from the code."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GENERATOR = Path(__file__).parents[2] / "docs" / "generate_interfaces.py"
ABSENT = ("vllm", "sglang", "ray")


class Absent(MetaPathFinder):
    """Lets no optional package be imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ABSENT:
            raise AssertionError(f"the page needs {name}")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_interfaces", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date_and_needs_no_optional_package(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    assert generator.PAGE.read_text() == generator.page(), "run: make interfaces"


@pytest.mark.parametrize("name", ["call_timeout=3600.0", "start_timeout=300.0", "materialization_source()"])
def test_names_that_users_look_for_are_there(generator: ModuleType, name: str) -> None:
    assert name in generator.PAGE.read_text()


def test_arguments_are_written_as_in_a_call(generator: ModuleType) -> None:
    def function(a, /, b=1, *, c="x", d=GENERATOR, **rest):
        """Do it.

        In many words.
        """

    assert generator.entry("do", function) == "- `do(a, b=1, *, c='x', d=..., **rest)`: Do it."
