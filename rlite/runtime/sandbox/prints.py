"""Keep what user code prints in sandbox processes. This module imports only the standard library.

A process writes into a small file in memory, which the driver reads when a call ends, however it ends:

    bytes of the file that are used, then for each print: number of the call, number of bytes, the bytes

So a flood costs nothing beyond the file, and the last words of a process that was killed are there. A process is not
trusted: the driver reads a bounded part of the file, and takes any bytes. What Python code writes to sys.stdout and
sys.stderr is kept. What programs and libraries write to the descriptors is discarded.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import re
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIZE = 1 << 16
"""bytes of the file, for the calls of a chunk"""
MOST = 4096
"""bytes that are kept of a call"""
_USED, _PRINT = struct.Struct("<I"), struct.Struct("<QI")


def new_file() -> int:
    """Return the descriptor of a new file without a name; on Linux in memory, and of this size for good."""
    if sys.platform != "linux":
        with tempfile.TemporaryFile() as file:
            file.truncate(SIZE)
            return os.dup(file.fileno())
    descriptor = os.memfd_create("rlite-prints", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, SIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return descriptor


class PrintStream(io.RawIOBase):
    """Standard output and standard error of a sandbox process, which keeps the first bytes of each call.

    Args:
        descriptor: the file. It is closed: the memory stays, also in forks, and mmap keeps a descriptor of its own.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE)
        os.close(descriptor)
        self.begin(0, is_first=True)

    def install(self) -> None:
        """Take the place of sys.stdout and sys.stderr."""
        text: Any = io.TextIOWrapper(self, "utf-8", "backslashreplace", write_through=True)
        sys.stdout = sys.stderr = text

    def begin(self, number: int, is_first: bool = False) -> None:
        """Keep what the call of this number prints from now on.

        Args:
            number: number of the call.
            is_first: forget the calls before.
        """
        self._number, self._room = number, MOST
        if is_first:
            _USED.pack_into(self._memory, 0, _USED.size)

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the standard output, for programs that inherit it."""
        return 1

    def write(self, data: Any) -> int:
        """Return the number of the bytes. Those for which there is room are kept."""
        content, [used] = bytes(data), _USED.unpack_from(self._memory)
        kept = content[: max(min(self._room, SIZE - used - _PRINT.size), 0)]
        if kept:
            end, self._room = used + _PRINT.size + len(kept), self._room - len(kept)
            self._memory[used:end] = _PRINT.pack(self._number, len(kept)) + kept
            _USED.pack_into(self._memory, 0, end)
        return len(content)


def read_prints(descriptor: int) -> dict[int, str]:
    """Return what each call of the last chunk has printed, by its number.

    A text that was cut ends with " ...", and has no part of its last word, which may be a secret.
    """
    [used] = _USED.unpack(os.pread(descriptor, _USED.size, 0).ljust(_USED.size, b"\0"))
    content = os.pread(descriptor, min(used, SIZE), 0) if used > _USED.size else b""
    found: dict[int, bytes] = {}
    place, last = _USED.size, 0
    while place + _PRINT.size <= len(content):
        last, length = _PRINT.unpack_from(content, place)
        place += _PRINT.size + length
        found[last] = found.get(last, b"") + content[place - length : place]
    cut = {number for number, text in found.items() if len(text) >= MOST or (number == last and used > SIZE - 100)}
    texts = {number: text.decode(errors="replace") for number, text in found.items()}
    return {
        number: re.sub(r"\S{0,200}$", " ...", text, count=1) if number in cut else text
        for number, text in texts.items()
    }


_listeners: list[Callable[[str, str], None]] = []


def listen(listener: Callable[[str, str], None] | None) -> None:
    """Let a listener take what calls print, in place of the listener before.

    Args:
        listener: called in the task of a call with the name of the function and the text.
    """
    _listeners[:] = [] if listener is None else [listener]


@contextmanager
def listening(listener: Callable[[str, str], None]) -> Iterator[None]:
    """Let a listener take what calls print in the block, in place of the listener before."""
    before = _listeners[:]
    listen(listener)
    try:
        yield
    finally:
        _listeners[:] = before


def tell(what: str, text: str) -> None:
    """Tell the listener what a call of a function has printed."""
    for listener in _listeners if text else ():
        listener(what, text)
