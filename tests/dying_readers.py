"""Functions that yield bytes, for processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

from rlite.errors import DataError


def whole() -> Iterator[bytes]:
    yield b"who"
    yield b"le"


def die_late() -> Iterator[bytes]:
    yield b"some"
    os.kill(os.getpid(), signal.SIGBUS)


def raise_late() -> Iterator[bytes]:
    yield b"some"
    raise DataError("no more")
