"""What runs inside a reward process. It imports nothing but the standard library, so that it starts in a moment.

Frames are a length of 8 bytes and a pickle. In comes a list of calls (`Chunk`), out come `READY` once, and for every
call `STARTED`, when its function and arguments are loaded, and then one of `VALUE`, `INVALID`, `RAISED`.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import math
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

READY, STARTED, VALUE, INVALID, RAISED = "ready", "started", "value", "invalid", "raised"

Chunk = tuple[dict[bytes, bytes], list[tuple[int, bytes, bytes]]]
"""functions that are new to the process, by key; calls as (number, key of the function, pickled keyword arguments)"""

HEADER = struct.Struct("<Q")
MAX_TEXT = 4000
"""characters of a traceback that are reported"""


class Passed(NamedTuple):
    """What a function returns to have bytes passed on as they are, where a number is expected otherwise."""

    payload: bytes


def frame(message: Any) -> bytes:
    """One message as it travels."""
    payload = pickle.dumps(message)
    return HEADER.pack(len(payload)) + payload


def frames(buffer: bytearray) -> list[Any]:
    """Take the whole messages off the front of `buffer`."""
    messages, start = [], 0
    while len(buffer) - start >= HEADER.size:
        (length,) = HEADER.unpack_from(buffer, start)
        end = start + HEADER.size + length
        if len(buffer) < end:
            break
        messages.append(pickle.loads(memoryview(buffer)[start + HEADER.size : end]))
        start = end
    del buffer[:start]
    return messages


def serve(descriptor: int) -> None:
    """Answer calls from the socket `descriptor` until its other end is closed."""
    os.set_inheritable(descriptor, False)
    _die_with_parent()
    with os.fdopen(descriptor, "r+b", buffering=0) as channel, asyncio.Runner() as runner:
        channel.write(frame((READY, 0, 0.0, None)))
        blobs: dict[bytes, bytes] = {}
        functions: dict[bytes, Callable[..., Any]] = {}
        while (message := _read(channel)) is not None:
            new, calls = message
            blobs.update(new)
            for number, key, arguments in calls:
                try:
                    if key not in functions:
                        functions[key] = pickle.loads(blobs[key])
                    keywords = pickle.loads(arguments)
                except BaseException:
                    channel.write(frame((RAISED, number, 0.0, _traceback())))
                    continue
                # the monotonic clock is one for all processes of a machine
                channel.write(frame((STARTED, number, time.monotonic(), None)))
                started = time.perf_counter()
                kind, result = _outcome(functions[key], keywords, runner)
                channel.write(frame((kind, number, time.perf_counter() - started, result)))


def _outcome(function: Callable[..., Any], keywords: dict[str, Any], runner: asyncio.Runner) -> tuple[str, Any]:
    try:
        value = function(**keywords)
        if inspect.iscoroutine(value):
            value = runner.run(value)
    except BaseException:  # SystemExit too: it is the function's, and the process serves on
        return RAISED, _traceback()
    return checked_result(value)


def checked_result(value: Any) -> tuple[str, Any]:
    """(VALUE, a finite number, or the payload of what was `Passed`) or (INVALID, a description)."""
    if isinstance(value, Passed):
        return VALUE, value.payload
    number = as_number(value)
    return (VALUE, number) if number is not None else (INVALID, repr(value)[:MAX_TEXT])


def as_number(value: Any) -> float | None:
    """A finite float from a number, or from a tensor or array of one element; None for anything else."""
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:
        try:
            value = value.item()
        except (RuntimeError, TypeError, ValueError):
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


def _traceback() -> str:
    return traceback.format_exc()[-MAX_TEXT:]


def _die_with_parent() -> None:
    """A hung function cannot see its driver go; on Linux the kernel ends the process then."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
