from __future__ import annotations

import json
import math
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch

from rlite.runtime.sandbox.wire import MAX_JSON, Reader, WireError, frame


def sent(value: Any, limit: int = 1 << 20) -> Any:
    (received,) = Reader(limit).read(frame(value, limit))
    return received


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**63),
        0.1,
        "é\ud800x" * 3,
        "half \udfff of a pair" * 100,
        "x" * 300_000,
        b"\x00\xff" * 1000,
        [1, [b"a", "b" * 400, b""], {"k": {"b": 3}, "": [None], 3: "three", "l" * 400: b"c"}],
        {"b": 5, "f": "nan", "d": []},
    ],
)
def test_values_arrive_as_they_were(value: Any) -> None:
    assert sent(value) == value


def test_numbers_arrive_as_pythons_own() -> None:
    class Float(float): ...

    values = [np.float32(0.5), np.int64(3), np.bool_(True), torch.tensor(2.5), Float(1.5), np.str_("a")]
    assert [(value, type(value)) for value in sent(values)] == [
        (0.5, float),
        (3, int),
        (True, bool),
        (2.5, float),
        (1.5, float),
        ("a", str),
    ]
    assert sent((1, 2)) == [1, 2]
    infinite = sent([math.inf, -math.inf, math.nan])
    assert infinite[:2] == [math.inf, -math.inf]
    assert math.isnan(infinite[2])


def test_sender_refuses_unsupported_and_long_values() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    for value in (object(), 10**100, deep, {1, 2}, np.zeros((2, 2), dtype=object), [0.5] * MAX_JSON, 1j):
        with pytest.raises((WireError, ValueError)):
            frame(value, 1 << 20)
    with pytest.raises(WireError, match="of raw data"):
        frame(b"x" * 101, 100)


def made(text: str | bytes, raw: bytes = b"") -> bytes:
    text = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<II", len(text), len(raw)) + text + raw


@pytest.mark.parametrize(
    "data",
    [
        made("[" * 5000 + "]" * 5000),
        made("[" * 100 + "]" * 100),
        made("NaN"),
        made("1e999"),
        made("[1,-1e999]"),
        made("[[1e999]]"),
        made("1" * 5000),
        made('"é"'),
        made(b"\xff"),
        made(""),
        made("[1"),
        made("{}"),
        made('{"b":1,"t":0}'),
        made('{"x":1}'),
        made('{"b":1}'),
        made('{"b":-1}', b"a"),
        made('{"b":true}', b"a"),
        made('{"b":"1"}', b"a"),
        made("1", b"left over"),
        made('{"t":1}', b"\xff"),
        made('{"f":"1e5"}'),
        made('{"f":[]}'),
        made('{"d":[[[],1]]}'),
        made('{"d":[[{"d":[]},1]]}'),
        made('{"d":[1]}'),
        made('{"d":5}'),
        struct.pack("<II", MAX_JSON + 1, 0),
        struct.pack("<II", 1, 1001),
        b"\xff" * 8,
    ],
)
def test_invalid_frames_raise_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        list(Reader(1000).read(data))


def test_random_garbage_is_a_wire_error_or_waits_for_more() -> None:
    draw = random.Random(0)
    good = frame(["value", 3, {"a": [b"xyz", "t" * 300, 0.5]}], 1000)
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            for value in Reader(1000).read(bytes(data)):
                json.dumps(value, default=repr)
        except WireError:
            pass


def test_frames_are_read_from_pieces_of_any_size() -> None:
    values = [1, "two" * 200, b"three", {"four": 4.0}]
    data = b"".join(frame(value, 1000) for value in values)
    reader = Reader(1000)
    assert [value for at in range(0, len(data), 3) for value in reader.read(data[at : at + 3])] == values


def test_frames_before_an_unreadable_frame_count() -> None:
    values = Reader(10).read(frame(1, 10) + frame(2, 10) + b"\xff" * 20)
    assert [next(values), next(values)] == [1, 2]
    with pytest.raises(WireError):
        next(values)
