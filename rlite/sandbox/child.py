"""What runs inside a reward process. It imports nothing but the standard library, so that it starts in a moment.

In come pickled lists of calls (`Chunk`), each after its length of 8 bytes; the driver is trusted. Out come frames of
rlite.sandbox.wire, [kind, number, value]: `READY` once; for every call `STARTED`, when its function and arguments are
loaded, then one of `VALUE`, `INVALID`, `RAISED`, `MEMORY`, or what rlite.sandbox.foreign says; and after the last call
of a list `CLEAN` with what was put back, or `DIRTY` with what could not be.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import pickle
import re
import resource
import struct
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rlite.sandbox import wire
from rlite.sandbox.confine import confine, silence
from rlite.sandbox.foreign import STARTED, Guard, Moved
from rlite.sandbox.state import ProcessState

READY, CLEAN, DIRTY = "ready", "clean", "dirty"
VALUE, INVALID, RAISED, MEMORY = ANSWERS = ("value", "invalid", "raised", "memory")

Chunk = tuple[dict[bytes, bytes], int | None, list[tuple[int, bytes, bytes, int]]]
"""functions that are new to the process, by key; bytes of memory that it may take; calls as (number, key of the
function, pickled keyword arguments, raw bytes that the answer may have)"""

HEADER = struct.Struct("<Q")
MAX_TEXT = 4000
"""characters of a traceback that are reported"""
MAX_ANSWER = 1 << 20
"""raw bytes that an answer may have; that of a function which passes states on, MAX_STATE"""
MAX_STATE = 32 << 20
MAX_OBSERVATION = 1 << 20
"""characters of what an environment says; more would hold up the event loop that tokenises it"""
_UNPRINTABLE = re.compile(r"[^\n\t\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]")
BRAKE = 2
"""allocations fail at so many times the memory limit; the limit itself is watched, for a function can catch a
MemoryError and go on as if nothing had happened"""


class Passed(NamedTuple):
    """What a function returns to have a value passed on that the wire can carry, where else a number is expected."""

    value: Any


class Unusable(NamedTuple):
    """What a function returns whose result is no reward, to say why."""

    why: str


class Sum(NamedTuple):
    """What a function returns whose reward is the weighted sum of several."""

    total: Any
    parts: list[Any]
    """each before its weight; None does not count"""


class Reward(float):
    """A reward that is a weighted sum, with its parts by name."""

    parts: Mapping[str, float]
    """each before its weight; NaN does not count"""


def serve(descriptor: int) -> None:
    """Answer calls from the socket `descriptor` until its other end is closed."""
    os.set_inheritable(descriptor, False)
    confine()
    with os.fdopen(descriptor, "r+b", buffering=0) as channel:
        server = _Server(channel)
        silence()
        while (chunk := _read(channel)) is not None:
            server.run(*chunk)


class _Server:
    """Runs calls one by one, and puts back what they have changed in the process."""

    def __init__(self, channel: BinaryIO) -> None:
        self._channel = channel
        self._own = os.getpid()
        self._runner = asyncio.Runner()
        self._blobs: dict[bytes, bytes] = {}
        self._functions: dict[bytes, Callable[..., Any]] = {}
        self._guard = Guard(channel.fileno(), self._write, ANSWERS)
        self._state = ProcessState(())
        self._write(READY, 0, None)

    def run(
        self, new: dict[bytes, bytes], memory_limit: int | None, calls: list[tuple[int, bytes, bytes, int]]
    ) -> None:
        self._blobs.update(new)
        broken = self._load({key for _, key, _, _ in calls} - self._functions.keys())
        _brake(memory_limit)
        self._state.adopt_limits()
        for number, key, arguments, limit in calls:
            if memory_limit is not None:
                _brake(memory_limit)
            self._guard.watch(number, limit)
            try:
                if key in broken:
                    raise broken[key]
                answer = self._answer(self._functions[key], arguments)
                if memory_limit is not None and (peak := _peak_memory()) > memory_limit:
                    answer = MEMORY, f"it took {peak / 2**30:.2f} GiB"
            except BaseException as error:  # SystemExit too: it is the function's, and the process serves on
                answer = _failure(error)
            self._guard.stop()
            self._end(answer)
        _brake(memory_limit)
        self._judge()

    def _load(self, keys: set[bytes]) -> dict[bytes, BaseException]:
        """Load functions, before the calls: what they change when they are imported stays. Returns what failed."""
        broken: dict[bytes, BaseException] = {}
        for key in keys:
            try:
                self._functions[key] = pickle.loads(self._blobs[key])
            except BaseException as error:
                broken[key] = error
        if keys:
            self._state = ProcessState(self._functions.values())
        return broken

    def _answer(self, function: Callable[..., Any], arguments: bytes) -> tuple[str, Any]:
        keywords = pickle.loads(arguments)
        self._guard.say(STARTED, None)
        value = function(**keywords)
        if inspect.isawaitable(value):
            value = self._runner.run(_awaited(value))
        return checked_result(value)

    def _end(self, answer: tuple[str, Any]) -> None:
        if os.getpid() != self._own and not self._guard.is_fork:
            os._exit(0)  # the function forked, and its child has come back, too
        if self._guard.has_moved:  # the fork has answered, and has used the loop
            with contextlib.suppress(BaseException):
                self._runner.close()
            self._runner = asyncio.Runner()
            return
        try:
            self._guard.say(*answer)
        except (wire.WireError, RecursionError) as error:
            self._guard.say(*_failure(error))
        if self._guard.is_fork:
            os._exit(0)

    def _judge(self) -> None:
        try:
            self._write(CLEAN, 0, self._state.restore())
        except Exception as error:
            self._write(DIRTY, 0, told(error))

    def _write(self, kind: str, number: int, value: Any, limit: int = MAX_ANSWER) -> None:
        rest = memoryview(wire.frame([kind, number, value], limit))
        while rest:
            rest = rest[self._channel.write(rest) :]


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _failure(error: BaseException) -> tuple[str, str]:
    """The answer to a call that raised."""
    if isinstance(error, Moved):
        return RAISED, ""  # void; its traceback costs as much as the fork
    _brake(None)  # else there may be no memory for the answer
    return (MEMORY, "an allocation failed") if isinstance(error, MemoryError) else (RAISED, told(error))


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


def shown(text: str) -> str:
    """Return a text of a process that is not trusted as a log or a terminal may have it: short and printable."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode-escape").decode(), text[: 3 * MAX_TEXT])


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
    return Passed([checked_result(value) for value in values])


def read_reward(answer: Any, names: Sequence[str] = ()) -> float | None:
    """Return the reward in an answer, a `Reward` if its parts have names; None if the answer is something else."""
    if isinstance(answer, Reward):
        return answer
    if not names:
        return as_number(answer)
    match answer:
        case [int() | float() as number, [*parts]] if len(parts) == len(names) and as_number(number) is not None:
            numbers = [math.nan if part is None else as_number(part) for part in parts]
            reward = Reward(number)
            reward.parts = {name: part for name, part in zip(names, numbers, strict=True) if part is not None}
            return reward if len(reward.parts) == len(names) else None
    return None


def read_batch(answer: Any, count: int, names: Sequence[str] = ()) -> list[tuple[str, Any]] | None:
    """What a BatchFunction passed: for each completion (VALUE, its reward) or (INVALID, a description).

    None if it is something else: the process may have forged it. `names` as for `read_reward`.
    """
    if not isinstance(answer, list) or len(answer) != count:
        return None
    results: list[tuple[str, Any]] = []
    for entry in answer:
        match entry:
            case ["value", value] if (reward := read_reward(value, names)) is not None:
                results.append((VALUE, reward))
            case ["invalid", str() as description]:
                results.append((INVALID, shown(description)))
            case _:
                return None
    return results


def checked_result(value: Any) -> tuple[str, Any]:
    """(VALUE, a finite number, the form of a `Sum`, or what was `Passed`) or (INVALID, a description)."""
    if isinstance(value, Passed):
        return VALUE, value.value
    if isinstance(value, Unusable):
        return INVALID, value.why
    if isinstance(value, Sum):
        kind, total = checked_result(value.total)
        return (kind, total) if kind == INVALID else (VALUE, [total, [as_number(part) for part in value.parts]])
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
