"""What functions print in sandbox processes reaches a listener, bounded, however their calls end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlite.runtime.sandbox import prints
from rlite.runtime.sandbox.calls import SandboxError
from rlite.runtime.sandbox.function import SandboxFunction
from rlite.runtime.sandbox.prints import MOST, SIZE, listen


@pytest.fixture
def heard() -> Iterator[list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    listen(lambda what, text: told.append((what, text)))
    yield told
    listen(None)


def call(fn: Any, *arguments: Any, timeout: float = 15.0) -> list[Any]:
    """Return the answers of calls that are made at once; None of those that fail."""
    function = SandboxFunction(fn, timeout, num_processes=1, what="reward f")

    async def one(argument: Any) -> Any:
        try:
            return await function.call(x=argument)
        except SandboxError:
            return None

    async def all_of_them() -> list[Any]:
        return list(await asyncio.gather(*map(one, arguments)))

    return asyncio.run(all_of_them())


def speaks(x: int) -> int:
    print("x is", x)
    print("warning", x, file=sys.stderr)
    logging.getLogger("mine").warning("logged %d", x)
    return x


def test_the_texts_of_each_call_are_heard_with_the_name_of_the_function(heard: Any) -> None:
    assert call(speaks, *range(40)) == [*range(40)]
    assert heard == [("reward f", f"x is {x}\nwarning {x}\nlogged {x}\n") for x in range(40)]
    heard.clear()
    assert call(lambda x: x, 1, 2) == [1, 2]
    assert heard == [], "silent functions say nothing"


def ends(x: str) -> None:
    print("last words before", x, flush=True)
    if x == "hang":
        time.sleep(60)
    if x == "crash":
        os.abort()
    if x == "made":
        exec("print('of made code')")
    raise ValueError(x)


def test_the_last_words_of_a_call_that_hangs_crashes_or_raises_are_heard(heard: Any) -> None:
    assert call(ends, "hang", timeout=0.5) == [None]
    assert call(ends, "crash", "raise") == [None, None]
    assert call(ends, "made") == [None]
    assert call(ends, "made") == [None], "in a fork"
    said = [text.splitlines() for _, text in heard]
    made = ["last words before made", "of made code"]
    assert said == [*([f"last words before {how}"] for how in ("hang", "crash", "raise")), made, made]


def floods(x: str) -> int:
    for number in range(10):
        print(f"line {number} of a flood " + "x" * (1 << 20))
    os.write(1, b"to the descriptor")
    sys.stdout.buffer.write(b"\xff\xfe bytes")
    return sys.stdout.fileno()


def test_ten_megabytes_cost_nothing_but_their_end(heard: Any) -> None:
    assert call(floods, "a") == [1]
    ((_, text),) = heard
    assert len(text) < MOST
    assert text.startswith("line 0 of a flood x")
    assert text.endswith(" ...")


def test_the_last_word_of_a_text_that_is_cut_is_left_out(heard: Any) -> None:
    secret = "sk-0123456789abcdef0123456789abcdef"
    call(lambda x: print("y " * ((MOST - 20) // 2) + x), secret)
    ((_, text),) = heard
    assert text.endswith("y  ...")


@pytest.mark.parametrize("content", [b"", b"\xff" * SIZE, b"\xff\xff\0\0" + b"\0" * 100, os.urandom(SIZE)])
def test_the_driver_takes_any_bytes_of_a_hostile_process(content: bytes) -> None:
    descriptor = prints.new_file()
    os.pwrite(descriptor, content, 0)
    found = prints.read_prints(descriptor)
    assert sum(map(len, found.values())) <= SIZE
    for size in (1, 2 * SIZE):
        with pytest.raises(PermissionError) if sys.platform == "linux" else contextlib.nullcontext():
            os.ftruncate(descriptor, size)
    os.close(descriptor)
