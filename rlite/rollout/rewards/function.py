"""Reward functions: ordinary Python functions, run where they can neither block, hang nor crash the program."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import io
import os
import pickle
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any, Protocol

import cloudpickle

from rlite.errors import ConfigError, DataError
from rlite.observability import trace
from rlite.rollout.rewards.adapters import TrlReward, from_trl, from_verl
from rlite.sandbox.call import (
    RewardCode,
    RewardCrash,
    RewardError,
    RewardInvalid,
    RewardMemory,
    RewardRaised,
    RewardTimeout,
)
from rlite.sandbox.child import (
    INVALID,
    MAX_ANSWER,
    BatchFunction,
    checked_result,
    read_batch,
    read_reward,
    told,
)
from rlite.sandbox.coroutines import Expired, LoopBlocked, RewardLoop, Slots
from rlite.sandbox.pool import shared_pool

MIN_MEMORY_GIB = 0.0625
"""a process that has loaded nothing takes a fourth of it"""


def default_num_processes() -> int:
    """The cores that this process may use, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8)


class Retrying(Protocol):
    """A `tenacity.AsyncRetrying`."""

    def copy(self, *, reraise: bool) -> Retrying: ...

    def __call__(self, fn: Callable[..., Awaitable[Any]], *args: Any) -> Awaitable[Any]: ...


class RewardFunction:
    """Awaits `fn(prompt, completions, prompt_ids, completion_ids, **data)`, run in a process that can be killed.

        reward = RewardFunction(fn, timeout=10)
        score = await reward(prompt=..., completions=..., prompt_ids=..., completion_ids=..., answer=...)

    `fn` may be a lambda, a function of `__main__`, or `async`. It travels by cloudpickle, and its process imports
    only what it needs. Every call ends with a finite float or with a RewardError that says what became of it:
    RewardTimeout, RewardCrash, RewardMemory, RewardRaised or RewardInvalid. A hung or crashed function costs its own
    process alone.

    Args:
        fn: the function; `from_trl` and `from_verl` turn those libraries' functions into one.
        timeout: seconds from the function's own start.
        retries: further attempts after anything but an invalid result, at once; or a `tenacity.AsyncRetrying`, which
            says what is attempted again (it sees the RewardErrors), how often, and after which waits.
        num_processes: processes that the program's reward pool has at least room for; default: the cores, at most 8.
        in_process: use no process. A synchronous `fn` runs in the event loop of its caller, at no cost: for cheap
            functions that cannot hang, for the time-out does not reach them. What an `async` one returns is awaited in
            a thread with an event loop of this function's own: for those that only wait, such as for a remote judge.
        memory_limit_gib: resident memory that its process may have, in GiB; None leaves it to the machine.
        max_concurrent: calls that run at once; waiting for one's turn is not part of the time-out.
        batch_size: `fn` takes batches: lists in place of each argument, and a list of as many rewards back. Calls that
            come together are put into one of at most so many. One that fails is done again row by row, so that each
            completion has the outcome that it would have alone.
        batch_wait: seconds that the first call of a batch waits for others.
        what: its name in error messages.
        env_vars: names of environment variables that its process gets as well, such as the key of an API. Without them
            it gets those that Python, the machine and its numerics need, and no secrets of the run.
        max_answer: bytes of what `ask` returns, at most.

    `outcomes` counts the attempts by their end: ok, timeout, crash, memory, raised, invalid.
    Raises: ConfigError for options out of range, or a function that cannot be pickled.
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
        max_answer: int = MAX_ANSWER,
    ) -> None:
        if not callable(fn):
            raise ConfigError(f"RewardFunction({fn!r}): expected a function")
        if not timeout > 0 or batch_wait < 0:
            raise ConfigError(f"timeout={timeout}, batch_wait={batch_wait}: expected more than 0 s, and at least 0 s")
        counts = {"num_processes": num_processes, "max_concurrent": max_concurrent, "batch_size": batch_size}
        for key, count in counts.items():
            if count is not None and count < 1:
                raise ConfigError(f"{key}={count}: expected at least 1")
        if isinstance(retries, int) and retries < 0:
            raise ConfigError(f"retries={retries}: expected at least 0")
        if not isinstance(retries, int) and not inspect.iscoroutinefunction(type(retries).__call__):
            raise ConfigError(f"retries={retries!r}: expected a number or a tenacity.AsyncRetrying")
        if memory_limit_gib is not None and (in_process or memory_limit_gib < MIN_MEMORY_GIB):
            raise ConfigError(
                f"memory_limit_gib={memory_limit_gib}, in_process={in_process}: expected a process, and at least "
                f"{MIN_MEMORY_GIB} GiB for it"
            )
        self.fn = fn
        self.timeout = timeout
        self.retries = retries
        self.num_processes = num_processes or default_num_processes()
        self.in_process = in_process
        self.memory_limit = None if memory_limit_gib is None else int(memory_limit_gib * 2**30)
        self.max_concurrent = max_concurrent
        self.batch_size = batch_size
        self.batch_wait = batch_wait
        self.what = what
        self.outcomes: Counter[str] = Counter()
        self.env_vars = frozenset(env_vars)
        self.max_answer = max_answer
        self._names = fn.names if isinstance(fn, TrlReward) else ()
        self._slots = None if max_concurrent is None else Slots(max_concurrent)
        self._loop = RewardLoop()
        self._batch_function = BatchFunction(fn)
        self._joining: weakref.WeakKeyDictionary[Any, list[_Row]] = weakref.WeakKeyDictionary()
        if not in_process:
            self._code = self._pickled(fn)
            self._batch_code = self._pickled(self._batch_function)

    def _pickled(self, fn: Callable[..., Any]) -> RewardCode:
        try:
            blob = cloudpickle.dumps(fn)
        except Exception as error:
            raise ConfigError(
                f"{self.what} {self.fn!r} cannot be sent to another process ({error}); "
                "let it hold plain data only, or run it with in_process=True"
            ) from error
        key = hashlib.blake2b(blob, digest_size=16).digest()
        return RewardCode(key, blob, what=self.what, max_answer=self.max_answer)

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
    ) -> float:
        """The reward of one completion; a `Reward`, with its parts, if it is the sum of several functions'.

        Raises: RewardError; DataError if `data` cannot be pickled.
        """
        return await self.run(
            prompt=prompt, completions=completions, prompt_ids=prompt_ids, completion_ids=completion_ids, **data
        )

    async def run(self, **keywords: Any) -> float:
        """Call the function with just these arguments. Raises: RewardError."""
        with trace.task(self.what.removeprefix("the ")):
            return await self._attempted(self._once, keywords)

    async def ask(self, read: Callable[[Any], Any], **keywords: Any) -> Any:
        """Call the function with just these arguments; returns what `read` makes of what it `Passed`.

        Its process may have answered anything that the wire carries: `read` returns None unless it is as it must be.
        Raises: RewardError.
        """

        async def once(keywords: dict[str, Any]) -> Any:
            return await self._counted(self._call(keywords), read)

        with trace.task(self.what.removeprefix("the ")):
            return await self._attempted(once, keywords)

    async def batch(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """The rewards of completions that belong together, by one call with lists, whatever `batch_size` is.

        For functions that compare the completions of a group. Each row holds the arguments of one completion. The call
        fails as a whole: `outcomes` then counts each row with the same end.
        """

        async def once(rows: Sequence[Mapping[str, Any]]) -> list[float]:
            try:
                results = await self._call_batch(rows)
                values = [self._value(result) for result in results]
            except RewardError as error:
                self.outcomes[error.outcome] += len(rows)
                raise
            self.outcomes["ok"] += len(rows)
            return values

        return await self._attempted(once, rows)

    async def _attempted(self, once: Callable[[Any], Awaitable[Any]], argument: Any) -> Any:
        if not isinstance(self.retries, int):
            return await self.retries.copy(reraise=True)(once, argument)  # its state is that of one call
        attempts = 0
        while True:
            attempts += 1
            try:
                return await once(argument)
            except RewardError as error:
                if attempts > self.retries or isinstance(error, RewardInvalid):
                    raise

    async def _once(self, keywords: dict[str, Any]) -> float:
        call = self._call(keywords) if self.batch_size is None else self._join_batch(keywords)
        return await self._counted(call, lambda answer: read_reward(answer, self._names))

    async def _counted(self, call: Awaitable[Any], read: Callable[[Any], Any]) -> Any:
        try:
            value = read(answer := await call)
            if value is None:
                raise RewardInvalid(f"{self.what} answered {answer!r:.200}, which is not what was asked for")
        except RewardError as error:
            self.outcomes[error.outcome] += 1
            raise
        self.outcomes["ok"] += 1
        return value

    # -- one call ------------------------------------------------------------------------------------------------

    async def _call(self, keywords: dict[str, Any], is_batch: bool = False) -> Any:
        async with self._slots.one() if self._slots is not None else nullcontext():
            if self.in_process:
                return await self._call_here(self._batch_function if is_batch else self.fn, keywords)
            return await self._call_there(self._batch_code if is_batch else self._code, keywords)

    async def _call_there(self, code: RewardCode, keywords: dict[str, Any]) -> Any:
        try:
            arguments = _dumped(keywords)
        except Exception as error:
            raise DataError(f"a row cannot be sent to the reward process: {error}") from error
        pool = shared_pool(self.num_processes, self.env_vars)
        return await asyncio.wrap_future(pool.submit(code, arguments, self.timeout, self.memory_limit))

    async def _call_here(self, fn: Callable[..., Any], keywords: dict[str, Any]) -> Any:
        try:
            value = fn(**keywords)
            if inspect.isawaitable(value):
                value = await self._loop.run(value, self.timeout)
        except LoopBlocked as error:
            raise RewardTimeout(
                f"{self.what} ran for more than {self.timeout:g} s and blocks its event loop: with in_process=True it "
                "must await, not compute"
            ) from error
        except Expired as error:
            raise RewardTimeout(f"{self.what} ran for more than {self.timeout:g} s") from error
        except (Exception, SystemExit) as error:
            raise RewardRaised(f"{self.what} raised {told(error)}") from error
        return self._value(checked_result(value))

    def _value(self, result: tuple[str, Any]) -> Any:
        kind, value = result
        if kind == INVALID:
            raise RewardInvalid(f"{self.what} returned {value}; expected a finite number")
        return value

    # -- batches -------------------------------------------------------------------------------------------------

    async def _call_batch(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        results = read_batch(
            await self._call({"count": len(rows), "columns": columns}, is_batch=True), len(rows), self._names
        )
        if results is None:
            raise RewardInvalid(f"{self.what} answered something else than {len(rows)} results")
        return results

    async def _join_batch(self, keywords: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        row = _Row(keywords, loop.create_future())
        joining = self._joining.setdefault(loop, [])
        joining.append(row)
        if len(joining) == 1:
            loop.call_later(self.batch_wait, self._send_batch, loop, joining)
        if len(joining) == self.batch_size:
            self._send_batch(loop, joining)
        return self._value(await row.result)

    def _send_batch(self, loop: asyncio.AbstractEventLoop, rows: list[_Row]) -> None:
        if self._joining.get(loop) is rows:  # else it was full before its time was up
            del self._joining[loop]
            task = loop.create_task(self._run_batch(rows))
            for row in rows:
                row.task = task  # the loop itself holds tasks weakly

    async def _run_batch(self, rows: Sequence[_Row]) -> None:
        rows = [row for row in rows if not row.result.done()]  # else it was cancelled
        if not rows:
            return
        try:
            results = await self._call_batch([row.keywords for row in rows])
        except asyncio.CancelledError:
            for row in rows:
                row.result.cancel()
            raise
        except Exception as error:
            if isinstance(error, (RewardError, DataError)) and len(rows) > 1:
                await asyncio.gather(*(self._run_batch([row]) for row in rows))
            else:
                for row in rows:
                    row.settle(error)
        else:
            for row, result in zip(rows, results, strict=True):
                row.settle(result)


class _PlainPickler(pickle.Pickler):
    """Pickles what consists of Python's own values, several times faster than cloudpickle."""

    def reducer_override(self, obj: Any) -> Any:
        raise TypeError


def _dumped(value: Any) -> bytes:
    file = io.BytesIO()
    try:
        _PlainPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    except TypeError:
        return cloudpickle.dumps(value)
    return file.getvalue()


class _Row:
    """One completion of a batch."""

    def __init__(self, keywords: dict[str, Any], result: asyncio.Future[tuple[str, Any]]) -> None:
        self.keywords = keywords
        self.result = result
        self.task: asyncio.Task[None] | None = None

    def settle(self, result: tuple[str, Any] | Exception) -> None:
        if self.result.done():  # cancelled
            return
        if isinstance(result, Exception):
            self.result.set_exception(result)
        else:
            self.result.set_result(result)


@asynccontextmanager
async def limited(what: str, timeout: float) -> AsyncIterator[None]:
    """Await a user's code inside, in this process. Raises: RewardTimeout after `timeout` seconds, or RewardRaised."""
    try:
        async with asyncio.timeout(timeout) as limit:
            yield
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and limit.expired():
            raise RewardTimeout(f"{what} ran for more than {timeout:g} s") from error
        raise RewardRaised(f"{what} raised {told(error)}") from error


__all__ = [
    "RewardCrash",
    "RewardError",
    "RewardFunction",
    "RewardInvalid",
    "RewardMemory",
    "RewardRaised",
    "RewardTimeout",
    "from_trl",
    "from_verl",
]
