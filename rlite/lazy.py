"""Packages whose public names are loaded at first use (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def exports(
    package: str,
    homes: Mapping[str, str],
    *,
    aliases: Mapping[str, str] | None = None,
    submodules: Sequence[str] = (),
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return what a package's `__init__` assigns to `__all__`, `__getattr__` and `__dir__`.

    Type checkers do not read the table, so the `__init__` imports the same names again under `TYPE_CHECKING`.

    Args:
        package: the package's `__name__`.
        homes: module -> its public names, separated by spaces: "a b" for `from module import a, b`.
        aliases: other spellings of names.
        submodules: modules of the package that are its attributes without having been imported.

    Returns:
        The list of public names, the loader of a name, and the function that lists names.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}
    aliases = aliases or {}
    public = sorted([*home_of, *aliases])

    def load(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        target = aliases.get(name, name)
        if target not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # as `from home import target` does it: that finds a module of a package, too
        value = getattr(__import__(home_of[target], fromlist=[target]), target)
        setattr(sys.modules[package], name, value)  # the next time it is found there
        return value

    return public, load, lambda: sorted([*public, *submodules])
