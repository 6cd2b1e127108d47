"""What runs a Gym-like environment, in a reward process or a thread; it imports no torch.

Between two steps an environment is bytes, so that any process can make the next one: a step that hangs or crashes costs
its own episode alone. Many environments draw from the random numbers of the whole process: the state of these travels
with them, so that an episode depends on its seed alone.
"""

from __future__ import annotations

import math
import pickle
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from rlite.errors import ConfigError
from rlite.rollout.environments.file import identify, import_file
from rlite.sandbox.child import MAX_OBSERVATION, Passed, as_number


class Turn(NamedTuple):
    """What an environment answers."""

    observation: str
    """what the model reads next"""
    reward: float = 0.0
    """of the model's turn"""
    is_done: bool = False


class GymFunction:
    """A factory of environments as a function of (method, ...) in a reward process.

    Args:
        make: returns a new environment; its keyword arguments are the row's `env_options`.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, method: str, **arguments: Any) -> Passed:
        """`check`: True; `reset`, of seed and options, and `step`, of state and action: (state, Turn)."""
        if method == "check":
            return Passed(True)
        if method == "reset":
            random.seed(arguments["seed"])
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(arguments["seed"] % 2**32)
            environment, turn = start(self.make, **arguments)
        else:
            environment, generators = pickle.loads(arguments["state"])
            _set_generators(generators)
            turn = advance(environment, arguments["action"])
        return Passed((b"" if turn.is_done else _frozen(environment), turn))


def read_turn(answer: Any) -> tuple[bytes, Turn] | None:
    """The state, pickled, and the Turn that a process has passed; None if it is none."""
    match answer:
        case [bytes() as state, [str() as observation, float() as reward, bool() as is_done]]:
            if math.isfinite(reward) and len(observation) <= MAX_OBSERVATION:
                return state, Turn(observation, reward, is_done)
    return None


class MakeFromFile:
    """The function `make` of an environment file, which is imported where it arrives."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.digest = identify(path)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._function()  # here, where imports may take longer than a step

    def __call__(self, **options: Any) -> Any:
        return self._function()(**options)

    def _function(self) -> Callable[..., Any]:
        make = getattr(import_file(self.path, self.digest), "make", None)
        if not callable(make):
            raise ConfigError(f"rollout.env_path={self.path!r}: expected `def make(**env_options)` in it")
        return make


class TextArenaGame:
    """A game of one player by TextArena, with the methods of Gymnasium.

    The reward comes with the end. What the player itself has said is not repeated to it, in games whose id ends with
    "-raw"; from other ones' texts, which repeat the whole game, what was seen before is taken away.
    """

    def __init__(self, game: Any) -> None:
        self._game = game
        self._seen = ""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._game.reset(num_players=1, seed=seed)
        return self._observation(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
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
    """A new environment, and what it says first. Raises: ConfigError if that is no text."""
    environment = make(**options)
    if hasattr(environment, "get_observation"):  # TextArena's
        environment = TextArenaGame(environment)
    if not callable(getattr(environment, "reset", None)) or not callable(getattr(environment, "step", None)):
        raise ConfigError(f"make() returned {environment!r}; expected an environment with reset(seed) and step(action)")
    answer = environment.reset(seed=seed)
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], str):
        raise ConfigError(f"reset() returned {_shown(answer)}; expected (observation, info), the observation a text")
    return environment, Turn(answer[0])


def advance(environment: Any, action: str) -> Turn:
    """One step. Raises: ConfigError that says what is wrong with what it returned."""
    answer = environment.step(action)
    if not isinstance(answer, tuple) or len(answer) != 5:
        raise ConfigError(
            f"step() returned {_shown(answer)}; expected (observation, reward, terminated, truncated, info)"
        )
    observation, reward, *flags, _ = answer
    number = as_number(reward)
    if number is None or not math.isfinite(number):
        raise ConfigError(f"step() returned the reward {_shown(reward)}; expected a finite number")
    # numpy's booleans are numbers of one element, too
    ends = [as_number(flag) for flag in flags]
    if not all(end in (0.0, 1.0) for end in ends):
        raise ConfigError(f"step() returned terminated, truncated = {_shown(flags)}; expected two booleans")
    is_done = any(ends)
    if not isinstance(observation, str) and not is_done:
        raise ConfigError(f"step() returned the observation {_shown(observation)}; expected a text")
    if isinstance(observation, str) and len(observation) > MAX_OBSERVATION:
        raise ConfigError(f"step() returned {len(observation)} characters; at most {MAX_OBSERVATION} are taken")
    if is_done:
        close(environment)
    return Turn(observation if isinstance(observation, str) else "", number, is_done)


def close(environment: Any) -> None:
    """Let an environment give back what it holds, if it knows how."""
    if callable(getattr(environment, "close", None)):
        environment.close()


def _frozen(environment: Any) -> bytes:
    try:
        return cloudpickle.dumps((environment, _generators()))
    except Exception as error:
        raise ConfigError(
            f"{type(environment).__name__} cannot be kept as bytes between two steps ({error}); run it with "
            "in_process=True"
        ) from error


def _generators() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy is not None else None


def _set_generators(generators: tuple[Any, Any]) -> None:
    random.setstate(generators[0])
    if generators[1] is not None:
        sys.modules["numpy"].random.set_state(generators[1])


def _shown(value: Any) -> str:
    return repr(value)[:200]
