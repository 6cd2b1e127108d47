"""State of an episode that its tools share: made per episode, read for the reward, and closed after it.

make(row) ──> state ──> tool calls, which see it ──> report() ──> the reward's arguments ──> close()

The state may hold anything: a database connection, a folder, a browser. So it lives in this process, not in a sandbox.
All its synchronous code runs in one thread of the episode, one call at a time: a connection stays in its thread, and a
tool needs no locks.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, get_type_hints

from rlite.errors import ConfigError, DataError
from rlite.rollout.failures import ENVIRONMENT_ERRORS
from rlite.rollout.tools.results import result_text
from rlite.runtime.sandbox.function import limited

STATE = ("self", "state")
"""names of a tool's first parameter that receives the state; the model does not see it"""
MakeState = Callable[[dict[str, Any]], Any]


class EpisodeState:
    """The state of one episode.

    `timeout`: seconds for one call. A thread cannot be killed: after a call that hangs, later calls of the episode are
    late, too, and other episodes go on.
    """

    def __init__(self, timeout: float, what: str) -> None:
        self.value: Any = None
        self._timeout, self._what = timeout, what
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="episode-state")

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns, in the episode's thread, or if it is async in the event loop."""
        async with limited(self._what, self._timeout, ENVIRONMENT_ERRORS):
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def use(self, tool: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
        """Return the result of a tool with the state as its first argument, as the model reads it."""
        found = await self.call(partial(tool, self.value, **arguments))
        return str(await self.call(result_text, found))  # a result that is no JSON fails as the tool does

    async def ask(self, method: str, default: Any = None) -> Any:
        """Return what a method of the state returns; the default if it has no such method."""
        function = getattr(self.value, method, None)
        return default if function is None else await self.call(function)

    async def report(self) -> dict[str, Any]:
        """Return what the reward receives of the state beside the row."""
        found = await self.ask("report", {})
        if not isinstance(found, Mapping):
            raise DataError(f"{self._what}: report() returned {found!r:.200}; expected a dict for the reward")
        return dict(found)

    async def close(self) -> None:
        """Close the state, and let its thread end."""
        try:
            await self.ask("close")
        finally:
            self._thread.shutdown(wait=False)


@asynccontextmanager
async def episode_state(
    make: MakeState | None, item: Mapping[str, Any], timeout: float
) -> AsyncIterator[EpisodeState | None]:
    """Make the state of an episode, and close it at the end of the block.

    `make`: returns the state for a row; a class, or a function that may be async. None: there is none. Yields the
    state; None if there is none.
    """
    if make is None:
        yield None
        return
    state = EpisodeState(timeout, f"the state {getattr(make, '__name__', type(make).__name__)}")
    try:
        state.value = await state.call(make, dict(item))
        yield state
    finally:
        await state.close()


def takes_state(function: Callable[..., Any]) -> bool:
    """Return whether a tool's first parameter is the state."""
    return next(iter(inspect.signature(function).parameters), None) in STATE


def without_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the name, docstring and parameters of a tool, but for the state; it is not called."""
    signature = inspect.signature(function)
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise ConfigError(f"the tool {function.__name__!r}: its type hints name something unknown: {error}") from error

    def described() -> None:
        """Do nothing."""

    stub: Any = described
    _, *shown = [
        parameter.replace(annotation=hints.get(name, parameter.annotation))
        for name, parameter in signature.parameters.items()
    ]
    stub.__name__, stub.__doc__ = function.__name__, function.__doc__
    stub.__annotations__ = {name: hint for name, hint in hints.items() if name not in STATE}
    stub.__signature__ = signature.replace(parameters=shown)
    return stub
