"""What runs inside a reward process. It imports nothing but the standard library, so that it starts in a moment.

Frames are a length of 8 bytes and a pickle. In comes a list of calls (`Chunk`), out come `READY` once, and for every
call `STARTED`, when its function and arguments are loaded, and then one of `VALUE`, `INVALID`, `RAISED`, `MEMORY`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import math
import os
import pickle
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

READY, STARTED, VALUE, INVALID, RAISED, MEMORY = "ready", "started", "value", "invalid", "raised", "memory"

Chunk = tuple[dict[bytes, bytes], list[tuple[int, bytes, bytes, int | None]]]
"""functions that are new to the process, by key; calls as (number, key of the function, pickled keyword arguments,
bytes of memory that it may take)"""

HEADER = struct.Struct("<Q")
MAX_TEXT = 4000
"""characters of a traceback that are reported"""
BRAKE = 2
"""allocations fail at so many times the memory limit; the limit itself is watched, for a function can catch a
MemoryError and go on as if nothing had happened"""


class Passed(NamedTuple):
    """What a function returns to have bytes passed on as they are, where a number is expected otherwise."""

    payload: bytes


class Unusable(NamedTuple):
    """What a function returns whose result is no reward, to say why."""

    why: str


def frame(message: Any) -> bytes:
    """One message as it travels."""
    payload = pickle.dumps(message)
    return HEADER.pack(len(payload)) + payload


def frames(buffer: bytearray) -> Iterator[Any]:
    """Take the whole messages off the front of `buffer`, one by one: those before an unreadable one count."""
    while len(buffer) >= HEADER.size:
        end = HEADER.size + HEADER.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        payload = bytes(buffer[HEADER.size : end])
        del buffer[:end]
        yield pickle.loads(payload)


def serve(descriptor: int) -> None:
    """Answer calls from the socket `descriptor` until its other end is closed."""
    os.set_inheritable(descriptor, False)
    _die_with_parent()
    _die_first()
    own = os.getpid()
    with os.fdopen(descriptor, "r+b", buffering=0) as channel, asyncio.Runner() as runner:

        def answer(kind: str, number: int, seconds: float, result: Any) -> None:
            if os.getpid() != own:  # the function forked, and its child has come back, too
                os._exit(0)
            rest = memoryview(frame((kind, number, seconds, result)))
            while rest:
                rest = rest[channel.write(rest) :]

        answer(READY, 0, 0.0, None)
        blobs: dict[bytes, bytes] = {}
        functions: dict[bytes, Callable[..., Any]] = {}
        while (message := _read(channel)) is not None:
            new, calls = message
            blobs.update(new)
            for number, key, arguments, memory_limit in calls:
                _brake(memory_limit)
                try:
                    if key not in functions:
                        functions[key] = pickle.loads(blobs[key])
                    keywords = pickle.loads(arguments)
                except BaseException as error:
                    answer(*_failure(error, number, 0.0))
                    continue
                # the monotonic clock is one for all processes of a machine
                answer(STARTED, number, time.monotonic(), None)
                started = time.perf_counter()
                try:
                    kind, result = _outcome(functions[key], keywords, runner)
                except BaseException as error:  # SystemExit too: it is the function's, and the process serves on
                    answer(*_failure(error, number, time.perf_counter() - started))
                    continue
                if memory_limit is not None and (peak := _peak_memory()) > memory_limit:
                    kind, result = MEMORY, f"it took {peak / 2**30:.2f} GiB"
                answer(kind, number, time.perf_counter() - started, result)


def _outcome(function: Callable[..., Any], keywords: dict[str, Any], runner: asyncio.Runner) -> tuple[str, Any]:
    value = function(**keywords)
    if inspect.isawaitable(value):
        value = runner.run(_awaited(value))
    return checked_result(value)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _failure(error: BaseException, number: int, seconds: float) -> tuple[str, int, float, str]:
    """The answer to a call that raised."""
    _brake(None)  # else there may be no memory for the answer
    if isinstance(error, MemoryError):
        return MEMORY, number, seconds, "an allocation failed"
    return RAISED, number, seconds, told(error)


def told(error: BaseException) -> str:
    """What was raised, in a line, and below it the traceback."""
    line, _, _ = text_of(error).strip().partition("\n")
    what = f"{type(error).__name__}: {line[:MAX_TEXT]}" if line else type(error).__name__
    return f"{what}\n{''.join(traceback.format_exception(error))[-MAX_TEXT:]}"


def text_of(error: BaseException) -> str:
    """What an exception says, which a class of the user's own may fail to."""
    try:
        return str(error)
    except Exception as failure:
        return f"<its text cannot be made: {type(failure).__name__}>"


class BatchFunction:
    """A function of columns, lists with one entry for each completion, that returns a list of as many rewards.

    Called with the number of completions and the columns; returns its results as `read_batch` reads them.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, count: int, columns: Mapping[str, list[Any]]) -> Any:
        values = self.fn(**columns)
        return self._later(values, count) if inspect.isawaitable(values) else _checked_batch(values, count)

    async def _later(self, values: Awaitable[Any], count: int) -> Any:
        return _checked_batch(await values, count)


def _checked_batch(values: Any, count: int) -> Passed | Unusable:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)):
        return Unusable(f"{_text(values)} for a batch, where a list of {count} numbers was expected")
    if len(values) != count:
        return Unusable(f"{len(values)} values for a batch of {count}")
    return Passed(pickle.dumps([checked_result(value) for value in values]))


def read_batch(payload: bytes) -> list[tuple[str, Any]]:
    """What a BatchFunction returned: for each completion (VALUE, a finite number) or (INVALID, a description)."""
    return pickle.loads(payload)


def checked_result(value: Any) -> tuple[str, Any]:
    """(VALUE, a finite number, or the payload of what was `Passed`) or (INVALID, a description)."""
    if isinstance(value, Passed):
        return VALUE, value.payload
    if isinstance(value, Unusable):
        return INVALID, value.why
    number = as_number(value)
    return (VALUE, number) if number is not None else (INVALID, _text(value))


def _text(value: Any) -> str:
    try:
        return repr(value)[:MAX_TEXT]
    except Exception:  # a class of the function's own
        return f"a {type(value).__name__}"


def as_number(value: Any) -> float | None:
    """A finite float from a number, or from a tensor or array of one element; None for anything else."""
    try:
        if hasattr(value, "item") and getattr(value, "size", 1) != 0:
            value = value.item()
    except Exception:  # a class of the function's own, or several elements
        return None
    if not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _read(channel: BinaryIO) -> Chunk | None:
    header = _read_exactly(channel, HEADER.size)
    return None if header is None else pickle.loads(_read_exactly(channel, HEADER.unpack(header)[0]) or b"")


def _read_exactly(channel: BinaryIO, length: int) -> bytes | None:
    parts = []
    while length:
        part = channel.read(min(length, 1 << 20))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _brake(memory_limit: int | None) -> None:
    """Let allocations fail far beyond the limit, and begin to measure the peak anew."""
    if sys.platform != "linux":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = resource.RLIM_INFINITY if memory_limit is None else BRAKE * memory_limit
    if hard != resource.RLIM_INFINITY:
        soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    if memory_limit is not None:
        with contextlib.suppress(OSError):  # some sandboxes have no such file; then the peak is that of all calls
            Path("/proc/self/clear_refs").write_text("5")


def _peak_memory() -> int:
    """Bytes that were resident at most since the last `_brake`; 0 where nobody says so.

    Not getrusage's: that begins with the peak of the process that started this one.
    """
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _die_first() -> None:
    """When the machine runs out of memory, Linux shall end reward processes, not their driver."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _die_with_parent() -> None:
    """A hung function cannot see its driver go; on Linux the kernel ends the process then."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
