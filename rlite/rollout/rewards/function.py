"""Reward functions: ordinary Python functions, run where they can neither block, hang nor crash the program."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from rlite.errors import ConfigError, DataError
from rlite.observability import trace
from rlite.rollout.rewards.adapters import TrlReward
from rlite.rollout.rewards.errors import REWARD_ERRORS, RewardError, RewardInvalid
from rlite.rollout.rewards.judges import JudgeLoop, Slots
from rlite.rollout.rewards.score import read_batch, read_score, score, score_batch
from rlite.sandbox.function import SandboxFunction, limited

_Rows = dict["asyncio.Future[float | str]", dict[str, Any]]
"""calls of a batch: keyword arguments by the future of the result"""


class Retrying(Protocol):
    """A `tenacity.AsyncRetrying`."""

    def copy(self, *, reraise: bool) -> Retrying: ...

    def __call__(self, fn: Callable[..., Awaitable[Any]], *args: Any) -> Awaitable[Any]: ...


class RewardFunction:
    """Awaits `fn(prompt, completions, prompt_ids, completion_ids, **data)`, run in a process that can be killed.

        reward = RewardFunction(fn, timeout=10)
        score = await reward(prompt=..., completions=..., prompt_ids=..., completion_ids=..., answer=...)

    `fn` may be a lambda, a function of `__main__`, or `async`. It travels by cloudpickle, and its process imports only
    what it needs. Every call ends with a finite float or with a RewardError that says why there is none: RewardTimeout,
    RewardCrash, RewardMemory, RewardRaised or RewardInvalid. A hung or crashed function costs its own process alone.
    `outcomes` counts the attempts by their end: ok, timeout, crash, memory, raised, invalid.

    Args:
        fn: the function. `from_trl` and `from_verl` turn functions for those libraries into one.
        timeout: seconds from the function's own start.
        retries: further attempts after anything but an invalid result, at once; or a `tenacity.AsyncRetrying`, which
            sees the RewardErrors and decides what is attempted again, how often, and after which waits.
        num_processes: processes that the program's pool has at least room for. Default: the cores, at most 8.
        in_process: use no process. A synchronous `fn` runs in the event loop of its caller, at no cost: for cheap
            functions that cannot hang, because the time-out does not reach them. The awaitable of an `async` one runs
            in a thread with an event loop of this function's own: for functions that only wait, such as for a judge.
        memory_limit_gib: resident memory that its process may have, in GiB. None leaves the limit to the machine.
        max_concurrent: calls that run at once. Waiting for a turn is not part of the time-out.
        batch_size: `fn` takes batches: a list in place of each argument, and it returns a list of rewards. Calls that
            come together form batches of at most this size. The calls of a batch that fails are done again one by one,
            so that each completion has the outcome that it would have alone.
        batch_wait: seconds that the first call of a batch waits for others.
        what: its name in error messages.
        env_vars: names of environment variables that its process gets as well, such as the key of an API. Without them
            it gets those that Python, the machine and its numerics need, and no secrets of the run.

    Raises:
        ConfigError: an option is out of range, or the function cannot be pickled.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        timeout: float = 15.0,
        retries: int | Retrying = 0,
        num_processes: int | None = None,
        in_process: bool = False,
        memory_limit_gib: float | None = None,
        max_concurrent: int | None = None,
        batch_size: int | None = None,
        batch_wait: float = 0.02,
        what: str = "the reward function",
        env_vars: Sequence[str] = (),
    ) -> None:
        if not callable(fn):
            raise ConfigError(f"RewardFunction({fn!r}): expected a function")
        if not timeout > 0 or batch_wait < 0:
            raise ConfigError(f"timeout={timeout}, batch_wait={batch_wait}: expected more than 0 s, and at least 0 s")
        for key, count in {"max_concurrent": max_concurrent, "batch_size": batch_size}.items():
            if count is not None and count < 1:
                raise ConfigError(f"{key}={count}: expected at least 1")
        if isinstance(retries, int) and retries < 0:
            raise ConfigError(f"retries={retries}: expected at least 0")
        if not isinstance(retries, int) and not inspect.iscoroutinefunction(type(retries).__call__):
            raise ConfigError(f"retries={retries!r}: expected a number or a tenacity.AsyncRetrying")
        if in_process and memory_limit_gib is not None:
            raise ConfigError(f"memory_limit_gib={memory_limit_gib}, in_process=True: a limit needs a process")
        self.fn = fn
        self.timeout = timeout
        self.retries = retries
        self.in_process = in_process
        self.batch_size = batch_size
        self.batch_wait = batch_wait
        self.what = what
        self.outcomes: Counter[str] = Counter()
        self._names = fn.names if isinstance(fn, TrlReward) else ()
        self._slots = None if max_concurrent is None else Slots(max_concurrent)
        self._loop = JudgeLoop(what, timeout)
        self._joining: weakref.WeakKeyDictionary[Any, _Rows] = weakref.WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        if not in_process:
            options = (fn, timeout, num_processes, memory_limit_gib, what, env_vars)
            self._functions: dict[Callable[[Any], Any], SandboxFunction] = {
                finish: SandboxFunction(*options, finish=finish, errors=REWARD_ERRORS)
                for finish in (score, score_batch)
            }

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
    ) -> float:
        """Return the reward of one completion.

        Args:
            prompt: the text of the prompt.
            completions: the text of the completion.
            prompt_ids: tokens of the prompt.
            completion_ids: tokens of the completion.
            data: the row's other columns.

        Raises:
            RewardError: there is no reward, by the outcome.
            DataError: `data` cannot be pickled.
        """
        return await self.run(
            prompt=prompt, completions=completions, prompt_ids=prompt_ids, completion_ids=completion_ids, **data
        )

    async def run(self, /, **keywords: Any) -> float:
        """Call the function with just these arguments. Raises: RewardError."""
        with trace.task(self.what.removeprefix("the ")):
            return await self._attempt(self._compute, keywords)

    async def batch(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the rewards of completions that belong together, by one call with lists, whatever `batch_size` is.

        For functions that compare the completions of a group. Each row holds the arguments of one completion. The call
        fails as a whole: `outcomes` then counts each row with the same end. Raises: RewardError.
        """
        return await self._attempt(self._compute_batch, rows)

    async def _attempt(self, compute: Callable[[Any], Awaitable[Any]], argument: Any) -> Any:
        if not isinstance(self.retries, int):
            return await self.retries.copy(reraise=True)(compute, argument)  # its state is that of one call
        attempts = 0
        while True:
            attempts += 1
            try:
                return await compute(argument)
            except RewardError as error:
                if attempts > self.retries or isinstance(error, RewardInvalid):
                    raise

    async def _compute(self, keywords: dict[str, Any]) -> float:
        with self._counted(1):
            if self.batch_size is not None:
                return self._reward(await self._join_batch(keywords))
            answer = await self._call(score, keywords)
            return self._reward(read_score(answer, self._names), answer)

    async def _compute_batch(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        with self._counted(len(rows)):
            return [self._reward(result) for result in await self._call_batch(rows)]

    @contextmanager
    def _counted(self, count: int) -> Iterator[None]:
        try:
            yield
        except RewardError as error:
            self.outcomes[error.outcome] += count
            raise
        self.outcomes["ok"] += count

    def _reward(self, result: Any, answer: Any = None) -> Any:
        """Return a result unless it says why there is none. Raises: RewardInvalid."""
        if result is None:
            raise RewardInvalid(f"{self.what} answered {answer!r:.200}, which is not what was asked for")
        if isinstance(result, str):
            raise RewardInvalid(f"{self.what} returned {result}; expected a finite number")
        return result

    # -- one call ------------------------------------------------------------------------------------------------

    async def _call(self, finish: Callable[[Any], Any], keywords: dict[str, Any]) -> Any:
        async with self._slots.one() if self._slots is not None else nullcontext():
            if not self.in_process:
                return await self._functions[finish].call(**keywords)
            async with limited(self.what, None, REWARD_ERRORS):
                value = self.fn(**keywords)
            return finish(await self._loop.run(value) if inspect.isawaitable(value) else value)

    # -- batches -------------------------------------------------------------------------------------------------

    async def _call_batch(self, rows: Sequence[Mapping[str, Any]]) -> list[float | str]:
        names = dict.fromkeys(name for row in rows for name in row)
        answer = await self._call(score_batch, {name: [row.get(name) for row in rows] for name in names})
        return self._reward(read_batch(answer, len(rows), self._names), answer)

    async def _join_batch(self, keywords: dict[str, Any]) -> float | str:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[float | str] = loop.create_future()
        rows = self._joining.setdefault(loop, {})
        rows[result] = keywords
        if len(rows) == 1:
            loop.call_later(self.batch_wait, self._send_batch, loop, rows)
        if len(rows) == self.batch_size:
            self._send_batch(loop, rows)
        return await result

    def _send_batch(self, loop: asyncio.AbstractEventLoop, rows: _Rows) -> None:
        if self._joining.get(loop) is rows:  # else it was full before its time was up
            del self._joining[loop]
            task = loop.create_task(self._run_batch(rows))
            self._tasks.add(task)  # the loop itself holds tasks weakly
            task.add_done_callback(self._tasks.discard)

    async def _run_batch(self, rows: _Rows) -> None:
        rows = {result: keywords for result, keywords in rows.items() if not result.done()}  # else it was cancelled
        if not rows:
            return
        found: Sequence[float | str | Exception]
        try:
            found = await self._call_batch([*rows.values()])
        except Exception as error:
            if isinstance(error, (RewardError, DataError)) and len(rows) > 1:
                await asyncio.gather(*(self._run_batch({result: rows[result]}) for result in rows))
                return
            found = [error] * len(rows)
        for result, value in zip(rows, found, strict=True):
            if result.done():
                continue
            if isinstance(value, Exception):
                result.set_exception(value)
            else:
                result.set_result(value)
