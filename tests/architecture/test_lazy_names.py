"""Lazy names load at first use, in any order of use."""

from __future__ import annotations

import compileall
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("statement", ["from rlite import stats_tracker", "import rlite; rlite.stats_tracker.export()"])
def test_a_module_among_the_public_names_is_there_before_anything_else(statement: str) -> None:
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


INIT = """
from typing import TYPE_CHECKING
from rlite import lazy

if TYPE_CHECKING:
    import nothing
    from xml import sax
    from lazily.home import pear, plum as prune

__all__, __getattr__, __dir__ = lazy.exports()
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
