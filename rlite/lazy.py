"""Packages whose public names are loaded at first use (PEP 562). This module imports nothing else of rlite."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def exports(
    package: str, names: Mapping[str, str], submodules: Sequence[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return what a package's `__init__` assigns to `__all__`, `__getattr__` and `__dir__`.

    The `__init__` also imports the names under `if TYPE_CHECKING:`, which type checkers read.

    Args:
        package: the package's name.
        names: module -> its public names, separated by spaces; `name=original` gives an object a second name.
        submodules: modules of the package that are its attributes without having been imported.

    Returns:
        The list of public names, the loader of a name, and the function that lists names.
    """
    homes = {name.partition("=")[0]: (home, name.partition("=")[2]) for home in names for name in names[home].split()}

    def load(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, original = homes[name]
        # as `from home import name` does it: that finds a module of a package, too
        value = getattr(__import__(home, fromlist=[original or name]), original or name)
        setattr(sys.modules[package], name, value)  # the next time it is found there
        return value

    return sorted(homes), load, lambda: sorted([*homes, *submodules])
