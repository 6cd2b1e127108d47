"""Every benchmark can at least be started: what it imports is where it looks for it."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import benchmarks


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(benchmarks.__path__)])
def test_it_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(benchmarks.__path__[0])  # of a program that runs beside another checkout
    if name == "environments_gem":
        pytest.importorskip("gem", reason="its environment is GEM's, which is installed for that benchmark alone")
    assert importlib.import_module(f"benchmarks.{name}")
