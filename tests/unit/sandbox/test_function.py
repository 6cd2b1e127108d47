from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any

import cloudpickle
import psutil
import pytest

from rlite.runtime.sandbox.calls import SandboxCrash, SandboxRaised
from rlite.runtime.sandbox.function import stream


@pytest.fixture(autouse=True, scope="module")
def _this_module_travels_by_value() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def yield_until(end: str) -> Generator[Any, None, str]:
    yield b"some"
    if end == "die":
        os.kill(os.getpid(), signal.SIGBUS)
    if end == "raise":
        raise KeyError("no more")
    yield {"a": [1]}
    return "the end"


def test_a_stream_yields_what_its_function_yields_and_returns_what_it_returns() -> None:
    before = set(psutil.Process().children())
    pieces = stream(yield_until, "the reader", end="")
    assert [next(pieces), next(pieces)] == [b"some", {"a": [1]}]
    with pytest.raises(StopIteration) as end:
        next(pieces)
    assert end.value.value == "the end"
    assert set(psutil.Process().children()) <= before, "no process is left"


@pytest.mark.parametrize(
    ("end", "kind", "message"),
    [
        ("die", SandboxCrash, r"the process of the reader was ended by signal 7 \(Bus error"),
        ("raise", SandboxRaised, "the reader raised KeyError: 'no more'"),
    ],
)
def test_a_stream_ends_as_its_process_does(end: str, kind: type[Exception], message: str) -> None:
    pieces = stream(yield_until, "the reader", end=end)
    assert next(pieces) == b"some"
    with pytest.raises(kind, match=message):
        next(pieces)


def test_a_stream_that_is_given_up_leaves_no_process() -> None:
    before = set(psutil.Process().children())
    pieces = stream(yield_until, "the reader", end="")
    next(pieces)
    pieces.close()
    assert set(psutil.Process().children()) <= before
