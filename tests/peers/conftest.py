"""Modules of other libraries, for tests that compare our mathematics with theirs.

`make test` installs the libraries of requirements.txt into `<environment>/peers`, without their dependencies. Only
the fixture `peer` imports from there: the folder is not on sys.path (verl ships a top-level package named `tests`).

    def test_our_kl_is_theirs(peer):
        verl = peer("verl.trainer.ppo.core_algos")

What a module imports at its top and its mathematics never calls is stood in for: packages that import the whole
library are entered without running their __init__, and third parties that are not installed are empty shells. They
leave sys.modules once the module is loaded, so that no other test finds a deepspeed that is none.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(sys.prefix) / "peers"
PEERS = {"verl", "trl", "openrlhf", "areal"}
NOT_RUN = {
    "verl",
    *("openrlhf", "openrlhf.models", "openrlhf.trainer", "openrlhf.trainer.ppo_utils", "openrlhf.trainer.ray"),
    *("openrlhf.trainer.ray.launcher", "openrlhf.utils"),
    *("areal", "areal.api", "areal.engine", "areal.infra", "areal.infra.rpc", "areal.trainer", "areal.trainer.ppo"),
    "areal.experimental.training_service.controller.controller",
}
"""modules of the peers whose own code is left out: each would import engines, servers and schedulers"""
ABSENT = {
    *("aiohttp", "codetiming", "colorlog", "deepspeed", "einops", "hydra", "numba", "orjson", "pybase64", "swanlab"),
    *("tensorboardX", "torchdata", "trackio", "uvloop", "wandb"),
}
"""third parties that may be missing"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("peers")
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # theirs are not ours to mend
    # last: what the peers do to logging on import stays
    items.sort(key=lambda item: item.get_closest_marker("peers") is not None)


@pytest.fixture(scope="session")
def peer() -> Callable[[str], ModuleType]:
    """Imports a peer's module by its dotted name, or skips the test where the peer is not installed."""

    def load(name: str) -> ModuleType:
        library = name.split(".")[0]
        if not (FOLDER / library).is_dir():
            pytest.skip(f"{library} is not in {FOLDER}: `make test` installs it, for the platforms that have it")
        with stand_ins():
            return importlib.import_module(name)

    return load


@contextmanager
def stand_ins() -> Iterator[None]:
    environment = dict(os.environ)
    sys.meta_path.insert(0, PeerFinder)
    sys.meta_path.append(ShellFinder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.meta_path.remove(PeerFinder)
        sys.meta_path.remove(ShellFinder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, Shell)]:
            if name.split(".")[0] not in PEERS:
                del sys.modules[name]
        os.environ.clear()
        os.environ.update(environment)


class ShellType(type):
    """Metaclass of classes that can be subclassed, subscripted, called and used as decorators, to no effect."""

    def __getattr__(cls, name: str) -> type:
        return shell_class(name)


class _Shell(metaclass=ShellType):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and cls.__base__ is _Shell else super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __class_getitem__(cls, item: Any) -> type:
        return cls


def shell_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return ShellType(name, (_Shell,), {})


class Shell(ModuleType):
    """A module in which every public name is a class without effect, unless it is a submodule on disk."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and PathFinder.find_spec(f"{self.__name__}.{name}", self.__path__):
            return importlib.import_module(f"{self.__name__}.{name}")
        return shell_class(name)


class ShellFinder:
    """Makes shells of the absent third parties; last in line, so that those that are installed come first."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, ShellFinder, is_package=True) if name.split(".")[0] in ABSENT else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return Shell(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


class PeerFinder:
    """Finds the peers and their modules in their folder."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] not in PEERS:
            return None
        spec = PathFinder.find_spec(name, path or [str(FOLDER)])
        if spec is None or name not in NOT_RUN:
            return spec
        shell = ModuleSpec(name, ShellFinder, is_package=True)
        shell.submodule_search_locations = list(spec.submodule_search_locations or [])
        return shell
