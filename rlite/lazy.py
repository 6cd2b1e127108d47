"""Packages whose public names are loaded at first use (PEP 562)."""

from __future__ import annotations

import dis
import importlib
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any


def exports(submodules: Sequence[str] = ()) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return what the calling package's `__init__` assigns to `__all__`, `__getattr__` and `__dir__`.

    The public names are the names that the `__init__` imports under `if TYPE_CHECKING:`.

    Args:
        submodules: modules of the package that are its attributes without having been imported.

    Returns:
        The list of public names, the loader of a name, and the function that lists names.
    """
    init = sys._getframe(1)
    package, homes = init.f_globals["__name__"], _imports_for_type_checkers(init.f_code)

    def load(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, original = homes[name]
        # as `from home import original` does it: that finds a module of a package, too
        value = getattr(__import__(home, fromlist=[original]), original)
        setattr(sys.modules[package], name, value)  # the next time it is found there
        return value

    return sorted(homes), load, lambda: sorted([*homes, *submodules])


def _imports_for_type_checkers(code: CodeType) -> dict[str, tuple[str, str]]:
    """Return name -> module and name there, for each import below the first `if TYPE_CHECKING:` of a module.

    The compiled code holds these imports, although they never run. It is also there if the source is not installed.
    """
    homes: dict[str, tuple[str, str]] = {}
    is_below, module, original = False, "", ""
    for instruction in dis.get_instructions(code):
        match instruction.opname:
            case "LOAD_NAME" if instruction.argval == "TYPE_CHECKING":
                is_below = True
            case "IMPORT_NAME":
                module, original = instruction.argval, ""
            case "IMPORT_FROM":
                original = instruction.argval
            case "STORE_NAME" if is_below and original:
                homes[instruction.argval], original = (module, original), ""
    return homes
