"""Encode and decode messages from an untrusted process: JSON and raw bytes, of a length that the receiver limits.

A frame is two lengths of 4 bytes, a JSON text, and raw bytes. The JSON holds the value. The raw part holds the value's
bytes and long texts, in order. JSON objects stand for types that JSON lacks:

    {"b": 5}       the next 5 raw bytes                    {"f": "nan"}      a float that is not finite
    {"t": 5}       a text, the next 5 raw bytes in UTF-8   {"d": [[k, v]]}   a dict

Texts may hold lone surrogates. Tuples arrive as lists. Scalars of NumPy and torch arrive as Python's numbers. This
module imports only the standard library.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

HEADER = struct.Struct("<II")
MAX_JSON = 1 << 18
"""bytes of the JSON text of a frame; its value takes many times as much memory"""
MAX_DEPTH = 64
SHORT_TEXT = 256
"""characters of a text that stands in the JSON itself"""


class WireError(ValueError):
    """Violation of the format or of a limit by a frame, or a value that has no form in the format."""


def frame(value: Any, limit: int) -> bytes:
    """Return the frame of a value.

    `limit`: maximum number of raw bytes.
    """
    raw: list[bytes] = []
    text = _encode(_packed(value, raw, MAX_DEPTH)).encode()
    size = sum(map(len, raw))
    if len(text) > MAX_JSON or size > limit:
        raise WireError(f"{len(text)} bytes of JSON and {size} of raw data; at most {MAX_JSON} and {limit} are taken")
    return b"".join((HEADER.pack(len(text), size), text, *raw))


def _packed(value: Any, raw: list[bytes], depth: int) -> Any:
    kind = type(value)
    if value is None or kind is bool or (kind is int and value.bit_length() <= 64):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"f": repr(value)}
    if kind is str:
        return value if len(value) <= SHORT_TEXT else _raw("t", value.encode("utf-8", "surrogatepass"), raw)
    if kind is bytes:
        return _raw("b", value, raw)
    if depth == 0:
        raise WireError(f"it is nested more than {MAX_DEPTH} deep")
    if isinstance(value, (list, tuple)):
        return [_packed(item, raw, depth - 1) for item in value]
    if isinstance(value, dict):
        return {"d": [[_packed(part, raw, depth - 1) for part in pair] for pair in value.items()]}
    return _packed(_plain(value), raw, depth - 1)


def _plain(value: Any) -> Any:
    """Return a scalar of NumPy or torch, or an instance of a subclass, as the plain Python value."""
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if hasattr(value, "item"):
        return value.item()
    raise WireError(f"{type(value).__name__} {value!r:.50} has no form in JSON")


def _raw(kind: str, data: bytes, raw: list[bytes]) -> dict[str, int]:
    raw.append(data)
    return {kind: len(data)}


class Reader:
    """A reader that splits received bytes into frames. It keeps one unfinished frame at most.

    `limit`: maximum number of raw bytes of a frame. It may be changed between two frames.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def read(self, data: bytes) -> Iterator[Any]:
        """Yield the complete values, one by one.

        `data`: bytes received since the last call.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            json_size, raw_size = HEADER.unpack_from(self._buffer)
            if json_size > MAX_JSON or raw_size > self.limit:
                raise WireError(f"a frame of {json_size} + {raw_size} bytes; expected {MAX_JSON} + {self.limit}")
            start, end = HEADER.size + json_size, HEADER.size + json_size + raw_size
            if len(self._buffer) < end:
                return
            text, raw = bytes(self._buffer[HEADER.size : start]), bytes(self._buffer[start:end])
            del self._buffer[:end]
            yield _value(text, raw)


def _value(text: bytes, raw: bytes) -> Any:
    try:
        value = _decode(text.decode("ascii"))
        if type(value) is list and not raw and text.find(b"[", 1) < 0 and b"{" not in text:  # most frames
            if math.inf in value or -math.inf in value:
                raise WireError("a number that no float holds")
            return value
        rest = io.BytesIO(raw)
        value = _unpack(value, rest, MAX_DEPTH)
    except WireError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # also UnicodeError and JSONDecodeError
        raise WireError(f"not a value: {type(error).__name__}") from None
    if rest.read(1):
        raise WireError("unused raw bytes in a message")
    return value


def _refuse(constant: str) -> Any:
    raise WireError(f"{constant} is no JSON")


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decode = json.JSONDecoder(parse_constant=_refuse).decode


def _unpack(value: Any, raw: io.BytesIO, depth: int) -> Any:
    """Return a decoded value. The raw bytes are read in order."""
    kind = type(value)
    if kind is list and depth:
        return [_unpack(item, raw, depth - 1) for item in value]
    if kind is float and not math.isfinite(value):  # 1e999
        raise WireError("a number that no float holds")
    if kind is not list and kind is not dict:
        return value
    if not depth:
        raise WireError("nested too deep")
    ((kind, content),) = value.items()
    if kind == "b":
        return _take(raw, content)
    if kind == "t":
        return _take(raw, content).decode("utf-8", "surrogatepass")
    if kind == "f":
        return float({"nan": "nan", "inf": "inf", "-inf": "-inf"}[content])
    if kind == "d":
        return {_unpack_key(key, raw): _unpack(item, raw, depth - 1) for key, item in content}
    raise WireError("an unknown type")


def _unpack_key(key: Any, raw: io.BytesIO) -> Any:
    key = None if isinstance(key, list) else _unpack(key, raw, 1)
    if not isinstance(key, (str, int, float, bool)):
        raise WireError("a key that is no text or number")
    return key


def _take(raw: io.BytesIO, size: Any) -> bytes:
    data = raw.read(size) if type(size) is int and size >= 0 else None
    if data is None or len(data) != size:
        raise WireError("more raw bytes than there are")
    return data
