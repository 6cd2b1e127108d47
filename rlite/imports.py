"""Optional packages, the user's own files and modules, and packages whose names are loaded at first use (PEP 562)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rlite.errors import ConfigError, ImportFailed, did_you_mean, own_traceback, similar_file


def lacking(what: str, extra: str, *packages: str) -> str:
    """Return the message for packages that are not installed; "" if all are."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{what} the package {' and '.join(missing)}: pip install 'rlite[{extra}]'" if missing else ""


def require(what: str, extra: str, *packages: str) -> None:
    """Check that packages are installed. Arguments are those of `lacking`."""
    if message := lacking(what, extra, *packages):
        raise ConfigError(message)


@contextmanager
def optional(what: str, extra: str, remedy: str = "") -> Iterator[None]:
    """Convert the error of an import inside the block to the message of `lacking`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what} the package {error.name}: pip install 'rlite[{extra}]'{remedy}") from error


def import_own_code(name: str) -> None:
    """Import a file or a module of `--import`, once in a process.

    `name`: path of a Python file, or the dotted name of a module. Modules are also looked for in the working folder.
    """
    import_module(name, f"--import {name}")


def import_module(name: str, what: str) -> ModuleType:
    """Return the user's file or module as a module, which is imported once in a process.

    `name`: path of a Python file, or the dotted name of a module. Modules are also looked for in the working folder.
    """
    is_file = name.endswith(".py")
    if is_file:
        check_file(name, what)
    try:
        return _import_file(str(Path(name).resolve())) if is_file else _import_by_name(name)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        if isinstance(error, ModuleNotFoundError) and not is_file and f"{name}.".startswith(f"{error.name}."):
            hint = "expected a file such as my_algorithms.py, or a module that Python finds"
            raise ImportFailed(f"{what}: no module {error.name!r}; {hint}") from error
        raised = f"it raised {type(error).__name__} while it was imported"
        raise ImportFailed(f"{what}: {raised}\n{own_traceback(error)}") from error


def check_file(name: str, what: str) -> None:
    """Check that a Python file exists. Arguments are those of `import_module`."""
    if not Path(name).is_file():
        raise ImportFailed(f"{what}: no such file in {os.getcwd()}{similar_file(Path(name))}")


def find_function(path: str, what: str) -> Callable[..., Any]:
    """Return the function that a path names. Only paths that the user has written may be given: this imports code."""
    home, colon, name = path.rpartition(":")
    if not colon:
        expected = f"the function's name behind it, {path}:FUNCTION" if path.endswith(".py") else "file.py:function"
        raise ConfigError(f"{what}: expected {expected}")
    found: Any = import_module(home, what)
    for part in name.split("."):
        if not hasattr(found, part):
            own = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            raise ConfigError(f"{what}: {home} has no {part!r}; {did_you_mean(part, own)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{what}: expected a function, found {type(found).__name__}")
    return found


@functools.cache
def _import_file(path: str) -> ModuleType:
    """Return the module of a file, which is run now. `sys.modules` does not keep it.

    cloudpickle sends the functions of such a module by value, so no other process needs the file.
    """
    for known in list(sys.modules.values()):
        if getattr(known, "__file__", None) == path:
            return known  # the program has imported it itself
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    shadowed = sys.modules.get(spec.name)
    sys.modules[spec.name] = module  # its dataclasses look it up there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
        if shadowed is not None:
            sys.modules[spec.name] = shadowed
    return module


def _import_by_name(name: str) -> ModuleType:
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)  # as for python -m
    return importlib.import_module(name)


def exports(
    package: str, names: Mapping[str, str], submodules: Sequence[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return what a package's `__init__` assigns to `__all__`, `__getattr__` and `__dir__`.

    The `__init__` also imports the names under `if TYPE_CHECKING:`, which type checkers read.

    `names`: module -> its public names, separated by spaces; `name=original` gives an object a second name. Returns the
    list of public names, the loader of a name, and the function that lists names.
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
