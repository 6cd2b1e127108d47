"""A user's environment file: its kind and its import. This module imports no torch.

Options of an environment that is a user's file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import symtable
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import AfterValidator

from rlite.config import Count, Options, Positive, Seconds
from rlite.errors import ConfigError
from rlite.rollout.registry import WORKFLOWS


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


def _check_workflow(name: str) -> str:
    if name not in WORKFLOWS:
        raise ConfigError(WORKFLOWS.unknown(name))
    return name


WorkflowName = Annotated[str, AfterValidator(_check_workflow)]
"""name of a registered workflow"""


class EnvironmentOptions(Options):
    """An environment or a registered workflow, in place of rewards."""

    env_path: str | None = None
    """Python file with `async step(state, action, extra_info)`, which returns the keys in STEP_KEYS of
    rlite.rollout.environments.child; or with `make(**env_options)`, which returns a Gym-like environment: then rows
    have a `seed`, and no prompt"""
    workflow: WorkflowName | None = None
    """name of a registered workflow, in place of env_path and of rewards"""
    env_timeout: Seconds = 60.0
    """seconds for one step of the environment"""
    env_processes: Count | None = None
    """steps of environments that run at the same time; default: the cores, at most 8"""
    env_memory_limit_gib: Positive | None = None
    """resident memory that an environment's process may have; a step that takes more fails, alone; null: no limit"""
    env_vars: list[str] = []
    """names of environment variables that the environment's processes get as well, such as the key of an API: they see
    none of the run's secrets"""
    max_turns: Count = 1
    """turns of the model in one episode"""

    def problems_with(self, rewards: Mapping[str, Any], group: str = "") -> Iterator[str]:
        """Yield a message for rewards of single answers beside several turns.

        Args:
            rewards: the rewards by name; there may be none.
            group: key of these options, with a dot at its end.
        """
        if rewards and self.max_turns > 1:
            yield (
                f"{group}max_turns={self.max_turns}: reward.* is of single answers; for several turns use "
                f"{group}env_path"
            )

    @property
    def process_options(self) -> dict[str, Any]:
        """Keyword arguments of `environment_workflow` about the environment's processes."""
        return {
            "timeout": self.env_timeout,
            "num_processes": self.env_processes,
            "memory_limit_gib": self.env_memory_limit_gib,
            "env_vars": self.env_vars,
        }
