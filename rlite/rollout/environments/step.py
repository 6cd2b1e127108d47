"""Run environments that are functions of the whole state: Python files with `async step(state, action, extra_info)`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack

from rlite.errors import shortened
from rlite.rollout.environments.child import MAX_MEMORY, StepFile, Turn, read_turn
from rlite.rollout.failures import ENVIRONMENT_ERRORS, EnvironmentFailure
from rlite.runtime.sandbox.function import SandboxFunction


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
