"""Run Gym-like environments: objects with `reset(seed=...)` and `step(action)` that communicate by texts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from rlite.errors import ConfigError
from rlite.rollout.environments.child import GymFunction, MakeFile, Turn, advance, close, read_turn, start
from rlite.rollout.environments.step import ProcessOptions, sandboxed
from rlite.rollout.failures import ENVIRONMENT_ERRORS, EnvironmentFailure
from rlite.runtime.sandbox.function import limited


@dataclass(frozen=True)
class GymEpisode:
    """An environment that has been reset."""

    observation: str | None
    """first observation"""
    step: Callable[[str], Awaitable[Turn]]
    """takes an action"""


class GymEnvironment:
    """Environments of one kind, created by a factory for each episode and run in processes that can be killed.

        reset(seed=...) -> (observation, info)
        step(action) -> (observation, reward, terminated, truncated, info)

    The methods are Gymnasium's. Observations and actions are texts. GEM's environments (`gem.make`) and TextArena's
    games of one player (`textarena.make`) fit. Between two steps an environment is pickled, together with the random
    states of `random` and NumPy. The seed decides these states, so an episode depends only on its seed. An environment
    with contents that cannot be pickled (a connection, a process) runs `in_process`.

    Args:
        make: a function that returns a new environment, or the path of a Python file with such a function `make`. Its
            keyword arguments are the row's `env_options`.
        timeout: seconds for one call. Making and resetting is one call, and each step is one call.
        in_process: run environments in threads of this process instead. A late call ends its episode, but its thread
            continues. The random numbers of `random` and NumPy are the program's.
        **options: see `ProcessOptions`.

    Raises:
        ConfigError: the file does not exist, `make` cannot be pickled, or an option is out of range.
    """

    def __init__(
        self,
        make: Callable[..., Any] | str | Path,
        timeout: float = 60.0,
        *,
        in_process: bool = False,
        **options: Unpack[ProcessOptions],
    ) -> None:
        self.make = MakeFile(make) if isinstance(make, str | Path) else make
        self.timeout = timeout
        self.name = f"the environment {make if isinstance(make, str | Path) else getattr(make, '__name__', make)}"
        limit = options.get("memory_limit_gib")
        if in_process and limit is not None:
            raise ConfigError(f"memory_limit_gib={limit}, in_process=True: a limit needs a process")
        self._function = None
        if not in_process:
            self._function = sandboxed(GymFunction(self.make), timeout, what=self.name, **options)

    def check(self) -> None:
        """Load the factory in its sandbox process. Do not call this method from within an event loop.

        Raises:
            EnvironmentFailure: the factory cannot be loaded.
        """
        if self._function is not None:
            asyncio.run(self._function.ask(read_turn, method="check"))

    @contextlib.asynccontextmanager
    async def episode(self, seed: int, options: Mapping[str, Any] | None = None) -> AsyncIterator[GymEpisode]:
        """Begin an episode in a new environment.

        Args:
            seed: seed for the environment's `reset`.
            options: keyword arguments of the factory.

        Yields:
            The episode.

        Raises:
            EnvironmentFailure: a call failed. The class depends on the outcome.
        """
        arguments = {"seed": seed, "options": dict(options or {})}
        if self._function is not None:
            ask = partial(self._function.ask, read_turn)
            memory, turn = await ask(method="reset", **arguments)

            async def step(action: str) -> Turn:
                nonlocal memory, turn
                memory, turn = await ask(method="step", memory=memory, action=action)
                return turn

            yield GymEpisode(turn.observation, step)
            return
        environment, turn = await self._in_thread(start, self.make, **arguments)

        async def advance_here(action: str) -> Turn:
            nonlocal turn
            turn = await self._in_thread(advance, environment, action)
            return turn

        try:
            yield GymEpisode(turn.observation, advance_here)
        finally:
            if not turn.is_done:
                with contextlib.suppress(EnvironmentFailure):  # it was abandoned, for a reason that matters more
                    await self._in_thread(close, environment)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        async with limited(self.name, self.timeout, ENVIRONMENT_ERRORS):
            return await asyncio.to_thread(function, *arguments, **options)
