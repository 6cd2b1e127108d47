"""Packages whose public names are loaded when they are first used (PEP 562)."""

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
    """What a package's `__init__` assigns to `__all__`, `__getattr__` and `__dir__`.

    Type checkers read no table: the `__init__` imports the same names once more under `TYPE_CHECKING`.

    Args:
        package: its `__name__`.
        homes: module -> the names that it has, with spaces between: "a b" for `from module import a, b`.
        aliases: other spellings of names.
        submodules: modules of the package that are its attributes though nobody has imported them.
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
