"""Gym-like environments: their calls in sandbox processes, and the form of what they return. No torch here."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from rlite.errors import ConfigError
from rlite.rollout.environments.file import Turn, check_length, finite_number
from rlite.rollout.rewards.score import as_number


class GymFunction:
    """A factory of Gym-like environments. The memory is the environment.

    Many environments use the random number generators of the whole process. The state of the generators is stored with
    the environment. An episode therefore depends only on its seed.

    `make`: returns a new environment. Its keyword arguments are the row's `env_options`.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, method: str, memory: bytes = b"", **arguments: Any) -> tuple[bytes, Turn]:
        """Return the next memory and the turn of `check`, `reset` or `step`."""
        if method == "check":
            return b"", Turn("")
        if method == "reset":
            seeded(arguments["seed"])
            environment, turn = start(self.make, **arguments)
        else:
            environment = unpickled(memory)
            turn = advance(environment, **arguments)
        return b"" if turn.is_done else pickled(environment), turn


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
    """Return a new environment and its first turn."""
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
    """Return the turn after one step."""
    answer = environment.step(action)
    if not isinstance(answer, tuple) or len(answer) != 5:
        form = "(observation, reward, terminated, truncated, info)"
        raise ConfigError(f"step() returned {answer!r:.200}; expected {form}")
    text, reward, *flags, _ = answer
    number = finite_number(reward, "step() returned the reward ")
    ends = [as_number(flag) for flag in flags]  # numpy's booleans are numbers of one element, too
    if not all(end in (0.0, 1.0) for end in ends):
        raise ConfigError(f"step() returned terminated, truncated = {flags!r:.200}; expected two booleans")
    is_done = any(ends)
    if not isinstance(text, str) and not is_done:
        raise ConfigError(f"step() returned the observation {text!r:.200}; expected a text")
    text = text if isinstance(text, str) else ""
    check_length(text, "step()")
    if is_done:
        close(environment)
    return Turn(text, number, number, is_done)


def close(environment: Any) -> None:
    """Close an environment if it has a method `close`."""
    if callable(getattr(environment, "close", None)):
        environment.close()


def seeded(seed: int) -> None:
    """Seed the random number generators of the process."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def unpickled(memory: bytes) -> Any:
    """Return an environment, and restore the states of the random number generators."""
    environment, (generator, numpy_generator) = pickle.loads(memory)
    random.setstate(generator)
    if numpy_generator is not None:
        sys.modules["numpy"].random.set_state(numpy_generator)
    return environment


def pickled(environment: Any) -> bytes:
    """Return an environment and the states of the random number generators as bytes."""
    numpy = sys.modules.get("numpy")
    generators = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        return cloudpickle.dumps((environment, generators))
    except Exception as error:
        told = f"{type(environment).__name__} cannot be kept as bytes between two steps ({error})"
        raise ConfigError(f"{told}; run it with in_process=True") from error
