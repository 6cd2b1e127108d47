"""The package declares what it imports, and ships its types."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.architecture.test_imports import HOMES, imported_modules

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OTHER_NAMES = {"google": "protobuf", "yaml": "pyyaml"}
"""packages whose module has another name"""
DEVELOPMENT = ("dev", "bench")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: Iterable[str]) -> set[str]:
    return {normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]) for requirement in requirements}


def imported(part: str = "") -> set[str]:
    """Packages of others that the library imports, by the names under which they are installed."""
    modules = {name.split(".")[0] for path in (ROOT / "rlite" / part).rglob("*.py") for name in imported_modules(path)}
    own = {*sys.stdlib_module_names, "rlite"}
    return {normal(OTHER_NAMES.get(name, name)) for name in modules - own}


ALWAYS = declared(PROJECT["dependencies"])
EXTRAS = {
    name: declared(requirements)
    for name, requirements in PROJECT["optional-dependencies"].items()
    if name not in DEVELOPMENT
}


def test_every_imported_package_is_declared() -> None:
    assert imported() - ALWAYS - set().union(*EXTRAS.values()) == set()


def test_every_declared_package_is_imported() -> None:
    assert ALWAYS - imported() == set()


@pytest.mark.parametrize("package", sorted(HOMES))
def test_a_package_with_a_home_is_declared_by_an_extra_and_not_always(package: str) -> None:
    assert any(normal(package) in names for names in EXTRAS.values())
    assert normal(package) not in ALWAYS


def test_the_types_are_shipped_as_the_classifier_says() -> None:
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (ROOT / "rlite" / "py.typed").read_bytes() == b""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["rlite"]}, "all files of the package, which no pattern leaves out"
    ignored = [line.strip() for line in (ROOT / ".gitignore").read_text().splitlines()]
    assert not [pattern for pattern in ignored if Path("rlite/py.typed").match(pattern or "-")]
