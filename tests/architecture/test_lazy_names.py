"""Lazy names load at first use, in any order of use."""

from __future__ import annotations

import ast
import compileall
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def names_for_type_checkers(init: Path) -> list[str]:
    """Names that a package imports under `if TYPE_CHECKING:`."""
    checked = [node for node in ast.parse(init.read_text()).body if isinstance(node, ast.If)]
    imports = [each for node in checked if ast.unparse(node.test) == "TYPE_CHECKING" for each in node.body]
    found = [
        f"{node.module}.{name.name}={name.asname or name.name}"
        for node in imports
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    ]
    return sorted(found)


LAZY = [path for path in (ROOT / "rlite").rglob("__init__.py") if "imports.exports" in path.read_text()]


@pytest.mark.parametrize("init", LAZY, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_lazy_names_are_those_that_type_checkers_see(init: Path) -> None:
    call = next(
        node for node in ast.walk(ast.parse(init.read_text())) if ast.unparse(node).startswith("imports.exports")
    )
    assert isinstance(call, ast.Call)
    spelled = [
        (home, *name.split("=")) for home, names in ast.literal_eval(call.args[1]).items() for name in names.split()
    ]
    loaded = sorted(f"{home}.{original[-1] if original else name}={name}" for home, name, *original in spelled)
    assert loaded == names_for_type_checkers(init)
    package = importlib.import_module(".".join(init.parent.relative_to(ROOT).parts))
    assert all(hasattr(package, name) for name in package.__all__)


@pytest.mark.parametrize("statement", ["from rlite import stats_tracker", "import rlite; rlite.stats_tracker.export()"])
def test_a_module_among_the_public_names_is_there_before_anything_else(statement: str) -> None:
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


INIT = """
from typing import TYPE_CHECKING
from rlite import imports

if TYPE_CHECKING:
    from xml import sax
    from lazily.home import pear, plum as prune

__all__, __getattr__, __dir__ = imports.exports(__name__, {"xml": "sax", "lazily.home": "pear prune=plum"})
"""
PROGRAM = """
import sys
import lazily
assert lazily.__all__ == dir(lazily) == ["pear", "prune", "sax"], lazily.__all__
assert not {"lazily.home", "xml.sax"} & set(sys.modules)
from lazily import pear, prune, sax
assert (pear, prune, sax.__name__) == (1, 2, "xml.sax")
"""


@pytest.mark.parametrize("form", ["source", "compiled", "zip", "compiled zip"])
def test_names_are_found_in_every_form_in_which_a_package_is_installed(form: str, tmp_path: Path) -> None:
    package = tmp_path / "built" / "lazily"
    package.mkdir(parents=True)
    for name, text in {"__init__": INIT, "home": "pear, plum = 1, 2"}.items():
        (package / f"{name}.py").write_text(text)
    if "compiled" in form:
        assert compileall.compile_dir(package, quiet=1, legacy=True, optimize=2)
        for source in package.glob("*.py"):
            source.unlink()
    if "zip" in form:
        shutil.make_archive(str(tmp_path / "built"), "zip", package.parent)
        shutil.rmtree(package)
    places = [str(tmp_path / "built.zip"), str(tmp_path / "built"), *sys.path]
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:] = {places}\n{PROGRAM}"], check=True)
