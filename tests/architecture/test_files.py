"""The shape of the tree: small files, no drawers for odds and ends, nothing left unshipped."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.sloc import Shape, shape_of

ROOT = Path(__file__).parents[2]
MAX_FILE, MAX_CLASS, MAX_FUNCTION = 450, 250, 70
"""source lines: without blank lines, comments and docstrings"""
MAX_LIBRARY = 56_351
"""source lines of the whole library; raise it only with a budget"""
DRAWERS = {"utils", "util", "helpers", "helper", "misc", "common"}


@pytest.fixture(scope="module")
def shape() -> Shape:
    return shape_of(ROOT)


def test_no_file_class_or_function_is_too_long_to_read(shape: Shape) -> None:
    limits = ((shape.modules, MAX_FILE), (shape.classes, MAX_CLASS), (shape.functions, MAX_FUNCTION))
    assert {name: size for sizes, limit in limits for name, size in sizes.items() if size > limit} == {}


def test_the_library_stays_within_its_budget(shape: Shape) -> None:
    assert shape.lines.total() <= MAX_LIBRARY


def test_no_module_is_a_drawer() -> None:
    drawers = [path.relative_to(ROOT) for path in (ROOT / "rlite").rglob("*") if path.stem in DRAWERS]
    assert drawers == [], "a helper that two packages need gets a noun and a place"


def test_every_package_of_modules_has_an_init_file() -> None:
    folders = {path.parent for path in (ROOT / "rlite").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_no_tracked_file_is_built_or_large() -> None:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    tracked = [ROOT / name for name in listing.stdout.split("\0") if name]
    large = [str(path) for path in tracked if path.exists() and path.stat().st_size > 1 << 20]
    built = [str(path) for path in tracked if path.suffix in {".pyc", ".so", ".whl"}]
    assert large == []
    assert built == []


def test_runs_of_earlier_versions_take_little_room() -> None:
    files = [path for path in (ROOT / "tests" / "data").iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 1 << 20
