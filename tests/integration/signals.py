"""Signals to a run in the process of the tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlite.trainer.run.interruption import INTERRUPTION, Terminated


def terminate() -> None:
    """Send SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def followed() -> Iterator[None]:
    """Let the signals of this process interrupt a run inside of the block, as a command does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    INTERRUPTION.follow()
    try:
        yield
    finally:
        INTERRUPTION.release()
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupted(fit: Callable[[], Any]) -> None:
    """Run a trainer that is ended by SIGTERM."""
    with followed(), pytest.raises(Terminated):
        fit()
