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
import random
import symtable
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import cloudpickle
from pydantic import AfterValidator

from rlite.config import Count, Options, Positive, Seconds
from rlite.errors import ConfigError
from rlite.rollout.registry import WORKFLOWS
from rlite.rollout.rewards.score import as_number


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


WorkflowName = Annotated[str, AfterValidator(WORKFLOWS.name_of)]
"""name of a registered workflow"""


class EnvironmentOptions(Options):
    """An environment or a registered workflow, in place of rewards."""

    env_path: str | None = None
    """Python file with `async step(state, action, extra_info)`, which returns the keys in STEP_KEYS of
    rlite.rollout.environments.file; or with `make(**env_options)`, which returns a Gym-like environment: then rows
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


# -- files with `async step(state, action, extra_info)` ----------------------------------------------------------------


class StepFile(EnvironmentFile):
    """An environment file with a function `step`. The memory is its `extra_info`."""

    def load(self) -> Any:
        """Return the module.

        Raises:
            ConfigError: the module has no async function `step`, or its `reset` is not async.
        """
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

        Args:
            method: "check", "reset" or "step".
            memory: pickled `extra_info`.
            state: text that the model has read, for `step`.
            action: text that the model has written, for `step`.

        Returns:
            The next memory, and the turn. The observation is None if the file has no function `reset`.

        Raises:
            ConfigError: a function of the file returned a value of the wrong form.
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
    """Return the memory and the turn in the response of `step()`.

    Raises:
        ConfigError: a key is missing, or its value has the wrong type. The message names the key.
    """
    missing = [key for key in STEP_KEYS if key not in response] if isinstance(response, Mapping) else STEP_KEYS
    if missing:
        raise ConfigError(f"step() in {path} returned no {', '.join(missing)}")
    numbers = {key: _finite(response[key], f"step() in {path} returned {key}=") for key in ("reward", "score")}
    text = response["next_state"]
    if not isinstance(text, str | None):
        raise ConfigError(f"step() in {path} returned next_state={text!r}; expected a text or None")
    _check_length(text, f"step() in {path}")
    return pickle.dumps(response["extra_info"]), Turn(text, **numbers, is_done=bool(response["done"]))


def _finite(value: Any, returned: str) -> float:
    if (number := as_number(value)) is None:
        raise ConfigError(f"{returned}{value!r:.200}; expected a finite number")
    return number


def _check_length(text: str | None, what: str) -> None:
    if text is not None and len(text) > MAX_OBSERVATION:
        raise ConfigError(f"{what} returned {len(text)} characters; at most {MAX_OBSERVATION} are taken")


# -- Gym-like environments ---------------------------------------------------------------------------------------------


class MakeFile(EnvironmentFile):
    """An environment file with a function `make(**env_options)`."""

    def load(self) -> Any:
        """Return the function `make`.

        Raises:
            ConfigError: the file has no function `make`.
        """
        make = getattr(super().load(), "make", None)
        if not callable(make):
            raise ConfigError(f"rollout.env_path={self.path!r}: expected `def make(**env_options)` in it")
        return make

    def __call__(self, **options: Any) -> Any:
        """Return a new environment."""
        return self.load()(**options)


class GymFunction:
    """A factory of Gym-like environments. The memory is the environment.

    Many environments use the random number generators of the whole process. The state of the generators is stored with
    the environment. An episode therefore depends only on its seed.

    Args:
        make: returns a new environment. Its keyword arguments are the row's `env_options`.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, method: str, memory: bytes = b"", **arguments: Any) -> tuple[bytes, Turn]:
        """Return the next memory and the turn of `check`, `reset` or `step`.

        Args:
            method: "check", "reset" or "step".
            memory: pickled environment, for `step`.
            **arguments: `seed` and `options` for `reset`, `action` for `step`.
        """
        if method == "check":
            return b"", Turn("")
        if method == "reset":
            random.seed(arguments["seed"])
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(arguments["seed"] % 2**32)
            environment, turn = start(self.make, **arguments)
        else:
            environment, (generator, numpy_generator) = pickle.loads(memory)
            random.setstate(generator)
            if numpy_generator is not None:
                sys.modules["numpy"].random.set_state(numpy_generator)
            turn = advance(environment, **arguments)
        return b"" if turn.is_done else _pickled(environment), turn


class TextArenaGame:
    """A TextArena game of one player, with the methods of Gymnasium.

    The reward comes with the end. In games whose id ends with "-raw", the player's own messages are left out of its
    observations. The texts of other games repeat the whole game, so the text already seen is removed.
    """

    def __init__(self, game: Any) -> None:
        self._game = game
        self._seen = ""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Return the first observation and an empty info."""
        self._game.reset(num_players=1, seed=seed)
        return self._observation(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Return (observation, reward, terminated, truncated, info) after an action."""
        is_done, info = self._game.step(action)
        if not is_done:
            return self._observation(), 0.0, False, False, info
        rewards, details = self._game.close()
        return "", rewards[0], True, False, details

    def _observation(self) -> str:
        player, seen = self._game.get_observation()
        if player != 0:
            raise ConfigError(f"it is the turn of player {player}: expected a game of one player")
        if not isinstance(seen, str):
            return "\n".join(text for sender, text, _ in seen if sender != player)
        new, self._seen = seen.removeprefix(self._seen), seen
        return new


def start(make: Callable[..., Any], seed: int, options: Mapping[str, Any]) -> tuple[Any, Turn]:
    """Return a new environment and its first turn.

    Args:
        make: the factory.
        seed: seed for the environment's `reset`.
        options: keyword arguments of the factory.

    Raises:
        ConfigError: the factory returns no environment, or the first observation is not text.
    """
    environment = make(**options)
    if hasattr(environment, "get_observation"):  # TextArena's
        environment = TextArenaGame(environment)
    if not callable(getattr(environment, "reset", None)) or not callable(getattr(environment, "step", None)):
        raise ConfigError(f"make() returned {environment!r}; expected an environment with reset(seed) and step(action)")
    answer = environment.reset(seed=seed)
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], str):
        raise ConfigError(f"reset() returned {answer!r:.200}; expected (observation, info), the observation a text")
    return environment, Turn(answer[0])


def advance(environment: Any, action: str) -> Turn:
    """Return the turn after one step.

    Args:
        environment: the environment, with the methods of Gymnasium.
        action: text that the model has written.

    Raises:
        ConfigError: `step` returned a value of the wrong form. The message says which.
    """
    answer = environment.step(action)
    if not isinstance(answer, tuple) or len(answer) != 5:
        form = "(observation, reward, terminated, truncated, info)"
        raise ConfigError(f"step() returned {answer!r:.200}; expected {form}")
    text, reward, *flags, _ = answer
    number = _finite(reward, "step() returned the reward ")
    ends = [as_number(flag) for flag in flags]  # numpy's booleans are numbers of one element, too
    if not all(end in (0.0, 1.0) for end in ends):
        raise ConfigError(f"step() returned terminated, truncated = {flags!r:.200}; expected two booleans")
    is_done = any(ends)
    if not isinstance(text, str) and not is_done:
        raise ConfigError(f"step() returned the observation {text!r:.200}; expected a text")
    text = text if isinstance(text, str) else ""
    _check_length(text, "step()")
    if is_done:
        close(environment)
    return Turn(text, number, number, is_done)


def close(environment: Any) -> None:
    """Close an environment if it has a method `close`."""
    if callable(getattr(environment, "close", None)):
        environment.close()


def _pickled(environment: Any) -> bytes:
    numpy = sys.modules.get("numpy")
    generators = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        return cloudpickle.dumps((environment, generators))
    except Exception as error:
        raise ConfigError(
            f"{type(environment).__name__} cannot be kept as bytes between two steps ({error}); run it with "
            "in_process=True"
        ) from error
