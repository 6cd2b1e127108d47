"""A user's environment file: which one it is, of which kind, and its import. It imports no torch."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from rlite.errors import ConfigError


def identify(path: str | Path) -> tuple[str, str]:
    """The absolute path of an environment file, and a digest: a file that was edited is another one.

    Raises: ConfigError if it is not there.
    """
    absolute = Path(path).absolute()
    if not absolute.is_file():
        raise ConfigError(f"rollout.env_path={str(path)!r}: no such file")
    return str(absolute), hashlib.blake2b(absolute.read_bytes(), digest_size=8).hexdigest()


def is_gym_file(path: str | Path) -> bool:
    """Whether it names a `make` and no `step`: it is read, not run. Raises: ConfigError if it is no Python."""
    source = Path(identify(path)[0]).read_bytes()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"rollout.env_path={str(path)!r} is no Python file: {error}") from error
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return "make" in names and "step" not in names


@cache
def import_file(path: str, digest: str) -> ModuleType:
    """Import a user's file, once. Raises: ConfigError if it is no Python file."""
    name = f"rlite_environment_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"rollout.env_path={path!r}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses and what it pickles look it up there
    spec.loader.exec_module(module)
    return module
