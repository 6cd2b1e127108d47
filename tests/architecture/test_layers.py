"""The import layers: an import-linter contract in pyproject.toml, and a list in CONTRIBUTING.md."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).parents[2]


def test_imports_go_downwards_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    status = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_contributing_lists_the_layers_of_the_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [contract] = (each for each in project["tool"]["importlinter"]["contracts"] if each["type"] == "layers")
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Layers")[2]
    listed = re.search(r"```\n(.*?)```", section, re.DOTALL)
    assert listed is not None
    assert listed[1].splitlines() == [re.sub(r"[()]", "", layer) for layer in contract["layers"]]
