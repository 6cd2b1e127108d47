"""Every benchmark can at least be started: what it imports is where it looks for it."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import benchmarks


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(benchmarks.__path__)])
def test_it_imports(name: str) -> None:
    if name == "environments_gem":
        pytest.importorskip("gem", reason="its environment is GEM's, which is installed for that benchmark alone")
    assert importlib.import_module(f"benchmarks.{name}")
