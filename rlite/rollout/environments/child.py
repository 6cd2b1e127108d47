"""What runs an environment, in a reward process; it imports no torch.

`extra_info` stays pickled outside: only the environment's own processes know the classes that it holds, and nobody else
may load what one of them has written.
"""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from rlite.errors import ConfigError
from rlite.rollout.environments.file import identify, import_file
from rlite.sandbox.child import MAX_OBSERVATION, Passed, as_number

STEP_KEYS = ("next_state", "reward", "score", "done", "extra_info")


class Step(NamedTuple):
    """What one step of an environment answers."""

    next_state: str | None
    """what the model reads in its next turn"""
    reward: float
    """of this turn: what is learnt from"""
    score: float
    """of this turn: what is logged"""
    is_done: bool
    extra_info: bytes
    """pickled, for the next step"""


class EnvironmentFunction:
    """An environment file as a function of (method, extra_info, ...); the file is imported where it arrives."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.digest = identify(path)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        load_environment(self.path, self.digest)  # here, where imports may take longer than a step

    async def __call__(self, method: str, extra_info: bytes, state: str = "", action: str = "") -> Passed:
        """`describe`: whether it has a `reset`; `reset`: (first state, extra_info); `step`: a Step."""
        module = load_environment(self.path, self.digest)
        if method == "describe":
            return Passed(hasattr(module, "reset"))
        info = pickle.loads(extra_info)
        if method == "reset":
            first = await module.reset(info)
            if not isinstance(first, str):
                raise ConfigError(f"reset() in {self.path} returned {type(first).__name__}; expected a text")
            return Passed((first, pickle.dumps(info)))
        return Passed(checked_step(await module.step(state, action, info), self.path))


@cache
def load_environment(path: str, digest: str) -> ModuleType:
    """Import an environment file. Raises: ConfigError if it has no async function `step`."""
    module = import_file(path, digest)
    for function, is_needed in (("step", True), ("reset", hasattr(module, "reset"))):
        if is_needed and not inspect.iscoroutinefunction(getattr(module, function, None)):
            raise ConfigError(
                f"rollout.env_path={path!r}: expected `async def step(state, action, extra_info)` in it, "
                "and if it has a reset, `async def reset(extra_info)`; or, for a Gym-like environment, `def make()`"
            )
    return module


def checked_step(response: Any, path: str) -> Step:
    """What `step()` returned, as a Step. Raises: ConfigError that names what is missing or of another type."""
    missing = [key for key in STEP_KEYS if key not in response] if isinstance(response, Mapping) else STEP_KEYS
    if missing:
        raise ConfigError(f"step() in {path} returned no {', '.join(missing)}")
    numbers = {}
    for key in ("reward", "score"):
        number = as_number(response[key])
        if number is None or not math.isfinite(number):
            raise ConfigError(f"step() in {path} returned {key}={response[key]!r}; expected a finite number")
        numbers[key] = number
    next_state = response["next_state"]
    if not isinstance(next_state, str | None):
        raise ConfigError(f"step() in {path} returned next_state={next_state!r}; expected a text or None")
    if next_state is not None and len(next_state) > MAX_OBSERVATION:
        raise ConfigError(
            f"step() in {path} returned {len(next_state)} characters; at most {MAX_OBSERVATION} are taken"
        )
    return Step(next_state, **numbers, is_done=bool(response["done"]), extra_info=pickle.dumps(response["extra_info"]))


def read_step(answer: Any) -> Step | None:
    """The Step that a process has passed; None if it is none."""
    match answer:
        case [str() | None as state, float() as reward, float() as score, bool() as is_done, bytes() as extra_info]:
            if math.isfinite(reward) and math.isfinite(score) and len(state or "") <= MAX_OBSERVATION:
                return Step(state, reward, score, is_done, extra_info)
    return None
