"""A user's environment file: its kind and its import. This module imports no torch."""

from __future__ import annotations

import hashlib
import importlib.util
import symtable
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rlite.errors import ConfigError


class EnvironmentFile:
    """A user's Python file, imported when this object is unpickled, because imports may take longer than a step.

    Args:
        path: path of the file.

    Raises:
        ConfigError: there is no such file.
    """

    def __init__(self, path: str | Path) -> None:
        absolute = Path(path).absolute()
        if not absolute.is_file():
            raise ConfigError(f"rollout.env_path={str(path)!r}: no such file")
        self.path = str(absolute)
        self.digest = hashlib.blake2b(absolute.read_bytes(), digest_size=8).hexdigest()  # an edited file is another one

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.load()

    def load(self) -> Any:
        """Return the part of the file's module that the environment needs."""
        return import_file(self.path, self.digest)


@cache
def import_file(path: str, digest: str) -> ModuleType:
    """Return the module of a user's file, which is imported once.

    Args:
        path: path of the file.
        digest: hash of the file's content.

    Raises:
        ConfigError: the file is not a Python file.
    """
    name = f"rlite_environment_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"rollout.env_path={path!r}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses and what it pickles look it up there
    spec.loader.exec_module(module)
    return module


def is_gym_file(path: str | Path) -> bool:
    """Return whether a file defines `make` and no `step`. The file is parsed, not run.

    Args:
        path: path of the file.

    Raises:
        ConfigError: there is no such file, or it is not a Python file.
    """
    file = EnvironmentFile(path)
    try:
        symbols = symtable.symtable(Path(file.path).read_text(), str(path), "exec").get_symbols()
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"rollout.env_path={str(path)!r} is no Python file: {error}") from error
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    return "make" in names and "step" not in names
