"""What a function reads from a file that may be damaged: it runs in a process, which may die of it."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from rlite.errors import ConfigError, DataError, RliteError
from rlite.sandbox import wire
from rlite.sandbox.confine import confine

PIECE = 1 << 20
"""bytes that a frame carries at most"""
PATIENCE = 600.0
"""seconds in which a process must send something"""

_BOOT = (
    "import json, sys; descriptor, sys.path[:], function, arguments = json.loads(sys.argv[1]);"
    "from rlite.sandbox.stream import serve; serve(descriptor, function, arguments)"
)


class StreamError(RliteError):
    """The process of a stream has died, hung, or raised something that is no error of the user's; it says which."""


def stream(function: str, *arguments: Any) -> Iterator[bytes]:
    """Yield the bytes that a function yields, in other pieces; it runs in a process of its own, with no limits.

    Args:
        function: "module:name" of a generator function.
        arguments: for it, as JSON has them.

    Raises: ConfigError and DataError as the function does; StreamError for anything else that ends it.
    """
    ours, theirs = socket.socketpair()
    boot = json.dumps([theirs.fileno(), [path or os.getcwd() for path in sys.path], function, arguments])
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT, boot],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    try:
        yield from _received(ours, process)
    finally:
        ours.close()
        process.kill()
        process.wait()


def _received(channel: socket.socket, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    channel.settimeout(PATIENCE)
    reader = wire.Reader(PIECE)
    try:
        while data := channel.recv(PIECE):
            for message in reader.read(data):
                match message:
                    case bytes():
                        yield message
                    case None:
                        return
                    case ["ConfigError", str() as text]:
                        raise ConfigError(text)
                    case ["DataError", str() as text]:
                        raise DataError(text)
                    case _:
                        raise StreamError(f"it failed: {message!r:.2000}")
    except TimeoutError:
        raise StreamError(f"nothing came for {PATIENCE:g} s") from None
    except (ConnectionError, wire.WireError):
        process.kill()
    code = process.wait()
    how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
    raise StreamError(f"the process that read it died by {how}")


def serve(descriptor: int, function: str, arguments: list[Any]) -> None:
    """Run the function, and send what it yields."""
    confine()
    with os.fdopen(descriptor, "r+b", buffering=0) as channel:

        def send(value: Any) -> None:
            rest = memoryview(wire.frame(value, PIECE))
            while rest:
                rest = rest[channel.write(rest) :]

        try:
            module, _, name = function.partition(":")
            for piece in getattr(importlib.import_module(module), name)(*arguments):
                for start in range(0, len(piece), PIECE):
                    send(piece[start : start + PIECE])
            send(None)
        except Exception as error:
            send([type(error).__name__, str(error)[:10_000]])
