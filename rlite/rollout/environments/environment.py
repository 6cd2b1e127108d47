"""Environments that a rollout calls: `step` functions and Gym-like environments, each call in a process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

from rlite.errors import ConfigError, shortened
from rlite.rollout.environments.file import (
    MAX_MEMORY,
    GymFunction,
    MakeFile,
    StepFile,
    Turn,
    advance,
    close,
    read_turn,
    start,
)
from rlite.rollout.failures import ENVIRONMENT_ERRORS, EnvironmentFailure
from rlite.runtime.sandbox.function import SandboxFunction, limited


@contextmanager
def noting(turn: int, action: str) -> Iterator[None]:
    """Add the turn and the action to a failure of the environment inside of the block.

    Args:
        turn: number of the turn, from 1.
        action: text that the model has written.

    Yields:
        None.

    Raises:
        EnvironmentFailure: the failure, with a note.
    """
    try:
        yield
    except EnvironmentFailure as error:
        error.add_note(f"turn {turn}, action: {shortened(action)}")
        raise


sandboxed = partial(SandboxFunction, max_answer=MAX_MEMORY, errors=ENVIRONMENT_ERRORS)
"""makes a kind of environments a function that runs in sandbox processes"""


class ProcessOptions(TypedDict, total=False):
    """Keyword arguments of every kind of environment, for its processes."""

    num_processes: int | None
    """number of calls that run at the same time. Default: the cores, at most 8"""
    memory_limit_gib: float | None
    """resident memory that a process may have, in GiB. None sets no limit"""
    env_vars: Sequence[str]
    """names of environment variables that the process also receives (see RewardFunction)"""


class Environment:
    """A user's environment file, run in processes that can be killed, as rewards are.

        async def step(state, action, extra_info):
            return {"next_state": ..., "reward": ..., "score": ..., "done": ..., "extra_info": extra_info}

    `state` is the text that the model has read in the last turn, `action` the text that it has written. `next_state` is
    the text that it reads in the next turn. The episode ends with `done`, or without a next state. Optionally `async
    reset(extra_info)` returns the first state, instead of the row's prompt. Each call may run in another process, so
    put the state of an episode into `extra_info`.

    Args:
        path: path of the file.
        timeout: seconds for one call.
        **options: see `ProcessOptions`.

    Raises:
        ConfigError: the file does not exist, or an option is out of range.
    """

    def __init__(self, path: str | Path, timeout: float = 60.0, **options: Unpack[ProcessOptions]) -> None:
        self._ask = sandboxed(StepFile(path), timeout, what=f"the environment {path}", **options).ask
        self._has_reset: bool | None = None

    @property
    def begins_with_prompt(self) -> bool:
        """True if the first state is the row's prompt. It is known once the file was loaded."""
        return self._has_reset is False

    def check(self) -> None:
        """Import the file in its sandbox process. Do not call this method from within an event loop.

        Raises:
            EnvironmentFailure: the file cannot be loaded, or has no `step`.
        """
        _, turn = asyncio.run(self._ask(read_turn, method="check"))
        self._has_reset = turn.observation is not None

    async def reset(self, extra_info: bytes) -> tuple[bytes, Turn]:
        """Begin an episode.

        Args:
            extra_info: pickled `extra_info`.

        Returns:
            The next pickled `extra_info`, and a turn whose observation is the first state. The observation is None if
                the first state is the row's prompt.

        Raises:
            EnvironmentFailure: the call failed. The class depends on the outcome.
        """
        if self._has_reset is False:
            return extra_info, Turn(None)
        memory, turn = await self._ask(read_turn, method="reset", memory=extra_info)
        self._has_reset = turn.observation is not None
        return memory, turn

    async def step(self, state: str, action: str, extra_info: bytes) -> tuple[bytes, Turn]:
        """Make one step.

        Args:
            state: text that the model has read.
            action: text that the model has written.
            extra_info: pickled `extra_info`.

        Returns:
            The next pickled `extra_info`, and the turn.

        Raises:
            EnvironmentFailure: the call failed. The class depends on the outcome.
        """
        return await self._ask(read_turn, method="step", memory=extra_info, state=state, action=action)


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
