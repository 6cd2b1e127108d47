"""A user's environment file: its options, its kind, its import, and its calls in sandbox processes. No torch here.

Each kind of environment is a function of a method: `check()`; `reset(...)`, which begins an episode; and `step(memory,
...)`. `reset` and `step` return (memory, Turn). The memory is the pickled state of an episode. Any process can make the
next step, so a step that hangs or crashes costs only its own episode. Only these processes unpickle the memory, because
only they know its classes, and one of them has written it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import math
import pickle
import symtable
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator

from rlite.config import Count, Options, Positive, Seconds
from rlite.errors import ConfigError
from rlite.rollout.registry import WORKFLOWS
from rlite.rollout.rewards.score import as_number


class EnvironmentFile:
    """A user's Python file, imported when this object is unpickled, because imports may take longer than a step."""

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
    """Return the module of a user's file, which is imported once."""
    name = f"rlite_environment_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"rollout.env_path={path!r}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses and what it pickles look it up there
    spec.loader.exec_module(module)
    return module


def is_gym_file(path: str | Path) -> bool:
    """Return whether a file defines `make` and no `step`. The file is parsed, not run."""
    file = EnvironmentFile(path)
    try:
        symbols = symtable.symtable(Path(file.path).read_text(encoding="utf-8"), str(path), "exec").get_symbols()
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"rollout.env_path={str(path)!r} is no Python file: {error}") from error
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    return "make" in names and "step" not in names


CONTRACTS = {
    "verifiers": "verifiers:TASKSET, the id of an installed taskset, or a file with one",
    "trl": "trl:file.py:NAME, a class or another environment_factory",
    "openenv": "openenv:URL, a server whose actions are texts",
    "openenv-tools": "openenv-tools:URL, a server whose actions are calls of tools",
    "ors": "ors:URL, a server of the Open Reward Standard",
}
"""contracts of environments by the first word of `env_path`, with their form"""


def contract_of(path: str | Path) -> tuple[str, str]:
    """Return the contract that a path begins with, and the rest; "" and the path if it is a file."""
    contract, colon, rest = str(path).partition(":")
    if not colon or contract not in CONTRACTS:
        return "", str(path)
    if not rest:
        raise ConfigError(f"rollout.env_path={path}: expected {CONTRACTS[contract]}")
    return contract, rest


def code_file(path: str | Path) -> str:
    """Return the file with the code of an environment; another text if its code is in no file of this machine."""
    contract, name = contract_of(path)
    return name.rpartition(":")[0] if contract == "trl" else name


def brings_items(path: str | Path) -> bool:
    """Return whether the episodes of an environment need only a seed, and no data."""
    return bool(contract_of(path)[0]) or is_gym_file(path)


WorkflowName = Annotated[str, AfterValidator(WORKFLOWS.name_of)]
"""name of a registered workflow"""


class EnvironmentOptions(Options):
    """An environment or a registered workflow, in place of rewards."""

    env_path: str | None = None
    """Python file with `async step(state, action, extra_info)`, which returns the keys in STEP_KEYS of
    rlite.rollout.environments.file; or with `make(**env_options)`, which returns a Gym-like environment: then rows
    have a `seed`, and no prompt; or an environment of another library, CONTRACT:NAME (docs/contracts.md)"""
    env_config: dict[str, Any] = {}
    """further arguments of an environment CONTRACT:NAME, such as {split: test}"""
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

        `rewards`: the rewards by name; there may be none.
        """
        if rewards and self.max_turns > 1:
            remedy = f"for several turns use {group}env_path"
            yield f"{group}max_turns={self.max_turns}: reward.* is of single answers; {remedy}"

    @property
    def process_options(self) -> dict[str, Any]:
        """Keyword arguments of `environment_workflow` about the environment's processes."""
        return {
            "timeout": self.env_timeout,
            "num_processes": self.env_processes,
            "memory_limit_gib": self.env_memory_limit_gib,
            "env_vars": self.env_vars,
        }


STEP_KEYS = ("next_state", "reward", "score", "done", "extra_info")
MAX_MEMORY = 32 << 20
"""bytes that an episode may remember"""
MAX_OBSERVATION = 1 << 20
"""characters of an observation; more would hold up the event loop that tokenises it"""


class Turn(NamedTuple):
    """The answer of an environment to one action of the model."""

    observation: str | None
    """text that the model reads next; None: the row's prompt after a reset, nothing after a step"""
    reward: float = 0.0
    """reward of the model's turn, used for training"""
    score: float = 0.0
    """score of the model's turn, used for logging"""
    is_done: bool = False


def read_turn(answer: Any) -> tuple[bytes, Turn] | None:
    """Return the memory and the turn in the answer of a process; None for any other answer."""
    match answer:
        case [bytes() as memory, [str() | None as text, float() as reward, float() as score, bool() as is_done]]:
            if math.isfinite(reward) and math.isfinite(score) and len(text or "") <= MAX_OBSERVATION:
                return memory, Turn(text, reward, score, is_done)
    return None


class StepFile(EnvironmentFile):
    """An environment file with a function `step`. The memory is its `extra_info`."""

    def load(self) -> Any:
        """Return the module."""
        module = super().load()
        step = getattr(module, "step", None)
        if not all(map(inspect.iscoroutinefunction, (step, getattr(module, "reset", step)))):
            raise ConfigError(
                f"rollout.env_path={self.path!r}: expected `async def step(state, action, extra_info)` in it, "
                "and if it has a reset, `async def reset(extra_info)`; or, for a Gym-like environment, `def make()`"
            )
        return module

    async def __call__(self, method: str, memory: bytes = b"", state: str = "", action: str = "") -> tuple[bytes, Turn]:
        """Run `check`, `reset` or `step`.

        Returns the next memory, and the turn. The observation is None if the file has no function `reset`.
        """
        module = self.load()
        if method == "check" or not (method == "step" or hasattr(module, "reset")):
            return memory, Turn("" if hasattr(module, "reset") else None)
        info = pickle.loads(memory)
        if method == "step":
            return _checked_response(await module.step(state, action, info), self.path)
        first = await module.reset(info)
        if not isinstance(first, str) or not first:
            raise ConfigError(f"reset() in {self.path} returned {first!r:.200}; expected a text, not empty")
        return pickle.dumps(info), Turn(first)


def _checked_response(response: Any, path: str) -> tuple[bytes, Turn]:
    """Return the memory and the turn in the response of `step()`."""
    missing = [key for key in STEP_KEYS if key not in response] if isinstance(response, Mapping) else STEP_KEYS
    if missing:
        raise ConfigError(f"step() in {path} returned no {', '.join(missing)}")
    numbers = {key: finite_number(response[key], f"step() in {path} returned {key}=") for key in ("reward", "score")}
    text = response["next_state"]
    if not isinstance(text, str | None):
        raise ConfigError(f"step() in {path} returned next_state={text!r}; expected a text or None")
    check_length(text, f"step() in {path}")
    return pickle.dumps(response["extra_info"]), Turn(text, **numbers, is_done=bool(response["done"]))


def finite_number(value: Any, returned: str) -> float:
    """Return a finite number that an environment has returned."""
    if (number := as_number(value)) is None:
        raise ConfigError(f"{returned}{value!r:.200}; expected a finite number")
    return number


def check_length(text: str | None, what: str) -> None:
    """Check the length of an observation."""
    if text is not None and len(text) > MAX_OBSERVATION:
        raise ConfigError(f"{what} returned {len(text)} characters; at most {MAX_OBSERVATION} are taken")


class MakeFile(EnvironmentFile):
    """An environment file with a function `make(**env_options)`."""

    def load(self) -> Any:
        """Return the function `make`."""
        make = getattr(super().load(), "make", None)
        if not callable(make):
            raise ConfigError(f"rollout.env_path={self.path!r}: expected `def make(**env_options)` in it")
        return make

    def __call__(self, **options: Any) -> Any:
        """Return a new environment."""
        return self.load()(**options)
