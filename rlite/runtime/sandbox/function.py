"""Run user functions in a sandbox, and await user code in this process."""

from __future__ import annotations

import asyncio
import io
import math
import os
import pickle
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, closing, nullcontext
from queue import SimpleQueue
from typing import Any

import cloudpickle

from rlite.errors import ConfigError, DataError, refuse
from rlite.observability import trace
from rlite.runtime.event_loop import result_of
from rlite.runtime.sandbox.calls import SANDBOX_ERRORS, Call, Code, ErrorKinds
from rlite.runtime.sandbox.child import MAX_ANSWER, describe, same
from rlite.runtime.sandbox.pool import SandboxPool, shared_pool
from rlite.runtime.sandbox.prints import tell

MIN_MEMORY_GIB = 0.0625
"""smallest limit; an empty process uses a quarter"""
STREAM_TIMEOUT = 600.0
"""seconds in which a generator must yield"""


def default_num_processes() -> int:
    """Return the number of cores that this process may use, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8)


class SandboxFunction:
    """A user's function, sync or async, whose calls run in processes that can be killed.

    `fn`: the function. It is pickled by cloudpickle. `timeout`: seconds from the function's own start. `num_processes`:
    number of processes that the program's pool has room for, at least. Default: the cores, at most 8.
    `memory_limit_gib`: resident memory that a process may have, in GiB. None sets no limit. `finish`: function applied
    in the process to the return value of `fn`. Its result must have a form in `rlite.runtime.sandbox.wire`.
    `max_answer`: maximum size of an answer in bytes.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        timeout: float,
        num_processes: int | None = None,
        memory_limit_gib: float | None = None,
        what: str = "the function",
        env_vars: Sequence[str] = (),
        finish: Callable[[Any], Any] = same,
        max_answer: int = MAX_ANSWER,
        errors: ErrorKinds = SANDBOX_ERRORS,
    ) -> None:
        memory = math.inf if memory_limit_gib is None else memory_limit_gib
        refuse(
            {
                f"timeout={timeout}: expected more than 0 s": not timeout > 0,
                f"num_processes={num_processes}: expected at least 1": num_processes is not None and num_processes < 1,
                f"memory_limit_gib={memory}: expected at least {MIN_MEMORY_GIB} GiB": memory < MIN_MEMORY_GIB,
            }
        )
        self.timeout = timeout
        self._num_processes = num_processes or default_num_processes()
        self._memory_limit = None if memory_limit_gib is None else int(memory * 2**30)
        self._env_vars = frozenset(env_vars)
        try:
            self._code = Code.of(fn, finish, what=what, errors=errors, max_answer=max_answer)
        except Exception as error:
            remedy = "let it hold plain data only, or run it with in_process=True"
            raise ConfigError(f"{what} {fn!r} cannot be sent to another process ({error}); {remedy}") from error

    async def call(self, /, **keywords: Any) -> Any:
        """Return the unchecked answer to a call with these arguments."""
        try:
            arguments = _pickled(keywords)
        except Exception as error:
            raise DataError(f"a row cannot be sent to the process of {self._code.what}: {error}") from error
        pool = shared_pool(self._num_processes, self._env_vars)
        call = Call(self._code, arguments, self.timeout, self._memory_limit)
        try:
            return await result_of(pool.submit(call))
        finally:
            tell(self._code.what, call.printed)

    async def ask(self, read: Callable[[Any], Any], /, **keywords: Any) -> Any:
        """Return the answer to a call, checked and converted by `read`.

        The process may have answered any value that the wire carries.

        `read`: converts the answer. It returns None if the answer has the wrong form.
        """
        code = self._code
        with trace.task(code.what.removeprefix("the ")):
            value = read(answer := await self.call(**keywords))
        if value is None:
            raise code.errors["invalid"](f"{code.what} answered {answer!r:.200}, which is not the expected form")
        return value


@asynccontextmanager
async def limited(what: str, timeout: float | None, errors: ErrorKinds = SANDBOX_ERRORS) -> AsyncIterator[None]:
    """Await user code inside a `with` block in this process, and convert its exceptions.

    `timeout`: seconds; None for no limit.
    """
    try:
        async with asyncio.timeout(timeout) as limit:
            yield
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and limit.expired():
            raise errors["timeout"](f"{what} ran for more than {timeout:g} s") from error
        raise errors["raised"](f"{what} raised {describe(error)}") from error


def stream(
    function: Callable[..., Any], what: str, is_kept: bool = False, /, **keywords: Any
) -> Generator[Any, None, Any]:
    """Yield the values of a generator function that runs in another process.

    The process has the environment variables, the standard output and the standard error of this process.

    `function`: the generator function. It must yield within STREAM_TIMEOUT. `is_kept`: run all such calls in one
    process, whose output is discarded. Else the process is of this call only. Returns the return value of the generator
    function.
    """
    pieces: SimpleQueue[Any] = SimpleQueue()
    end = object()
    kept = nullcontext(shared_pool(1, frozenset(os.environ))) if is_kept else None
    with kept or closing(SandboxPool(1, env_vars=os.environ, is_silent=False)) as pool:
        call = Call(Code.of(function, what=what), _pickled(keywords), STREAM_TIMEOUT, on_piece=pieces.put)
        result = pool.submit(call)
        result.add_done_callback(lambda _: pieces.put(end))
        yield from iter(pieces.get, end)
        return result.result()


class _PlainPickler(pickle.Pickler):
    """A pickler for values of Python's own types, several times faster than cloudpickle."""

    def reducer_override(self, obj: Any) -> Any:
        raise TypeError


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    try:
        _PlainPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    except TypeError:
        return cloudpickle.dumps(value)
    return file.getvalue()
