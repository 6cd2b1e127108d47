"""Parts of messages, and their places in a rendered conversation.

A part is a text of a message: its content, its thoughts, the name and the arguments of a call. The conversation is
rendered once more with a mark before and after each part. If the rendered text without its marks is the conversation,
the marks show the place of each part.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

TOOLS = -1
"""stands for the index of a message in parts of tools"""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""keys of an answer's thoughts in the chat templates of different models"""
WEIGHTS = ("weight", "train", "loss_mask")
"""keys of a message, whose value 0 or false keeps it from being learnt"""
_MARK = str(10**18 + secrets.randbelow(10**18))
"""begins every mark; random digits: no text holds them, and no filter of a template changes them"""
_MARKS = re.compile(rf"{_MARK}(\d{{6}})")


class Part(NamedTuple):
    """A text of a message in a rendered conversation."""

    message: int
    """index of the message, or TOOLS"""
    name: str
    """name in errors, such as "'content'" or "the call of 'clock'" """
    text: str
    start: int | None
    """index of its first character; None if the template drops or replaces the beginning"""
    end: int | None
    """index after its last character; None if the template drops or replaces the end"""
    times: int
    """number of times that the template writes it"""

    @property
    def places(self) -> list[int]:
        """The known ends of the part in the rendered text."""
        return [place for place in (self.start, self.end) if place is not None]


class Marks:
    """A conversation with marks around its parts. White space at the ends of a text stays outside of the marks.

    Args:
        messages: the conversation.
        tools: JSON schemas, or None.
        numbers: indexes of the messages to mark, or TOOLS.
        has_starts: mark the beginning of a part, too; some templates ask how a content begins.
    """

    def __init__(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, numbers: Sequence[int], has_starts: bool
    ) -> None:
        self._parts: list[tuple[int, str, str]] = []
        self._has_starts, marked = has_starts, {*numbers}
        self.messages = [
            self._message(message, number) if number in marked else message for number, message in enumerate(messages)
        ]
        self.tools = self._value(tools, TOOLS, "a tool") if TOOLS in marked else tools

    def read(self, rendered: str) -> tuple[str, list[Part]]:
        """Return a rendered text without its marks, and the parts with their places."""
        pieces, places, size = _MARKS.split(rendered), dict[int, list[int | None]](), 0
        for piece, mark in zip(pieces[::2], pieces[1::2], strict=False):
            size += len(piece)
            places.setdefault(int(mark), []).append(size)
        ends = [(places.get(2 * n, [None]), places.get(2 * n + 1, [None])) for n in range(len(self._parts))]
        return "".join(pieces[::2]), [
            Part(*part, start[0], end[0], max(len(start), len(end)))
            for part, (start, end) in zip(self._parts, ends, strict=True)
        ]

    def _message(self, message: Mapping[str, Any], number: int) -> dict[str, Any]:
        keys = ("content", *(THOUGHTS if message["role"] == "assistant" else ()))
        marked = {key: self._value(message[key], number, repr(key)) for key in keys if key in message}
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = self._value(calls, number, "a call")
        elif message["role"] == "assistant" and not str(marked.get("content", "-")).strip():
            marked["content"] = self._text(message["content"], number, "'content'", is_empty=True)
        return {**message, **marked}

    def _value(self, value: Any, number: int, name: str, is_argument: bool = False) -> Any:
        if isinstance(value, str):
            return self._text(value, number, name)
        if isinstance(value, Sequence):
            return [self._value(part, number, name, is_argument) for part in value]
        if not isinstance(value, Mapping):
            return value
        if is_argument:
            keys = [self._text(key, number, name, is_empty=True) if self._has_starts else key for key in value]
            return dict(zip(keys, (self._value(own, number, name, True) for own in value.values()), strict=True))
        if isinstance(called := value.get("name"), str):
            name = repr(called) if number == TOOLS else f"the call of {called!r}"
        marked = {key: self._value(value[key], number, name) for key in ("text", "function", "name") if key in value}
        if "arguments" in value:
            marked["arguments"] = self._value(value["arguments"], number, f"the arguments of {name}", True)
        return {**value, **marked}

    def _text(self, text: str, number: int, name: str, is_empty: bool = False) -> str:
        """Return a text with its marks. Keys, which a template may sort, have both marks behind them."""
        core = "" if is_empty else text.strip()
        if not core and not is_empty:
            return text
        head, tail = text.split(core, 1) if core else (text, "")
        begin, end = (f"{_MARK}{2 * len(self._parts) + side:06d}" for side in (0, 1))
        self._parts.append((number, name, core))
        return f"{head}{begin if self._has_starts else ''}{core}{end}{tail}"


class Places:
    """The parts of a conversation in its rendered text.

    Args:
        text: the rendered conversation.
        render: renders a conversation with marks; returns None if the template fails.
        messages: the conversation.
        tools: JSON schemas, or None.
        only: index of the message whose parts are wanted; None wants all.
    """

    def __init__(
        self,
        text: str,
        render: Callable[[Marks], str | None],
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        only: int | None = None,
    ) -> None:
        self.text, self._render = text, render
        self.parts: dict[int, list[Part]] = {}
        """parts by the index of their message, or TOOLS; without messages whose text the marks change"""
        self._place(messages, tools, [TOOLS, *range(len(messages))] if only is None else [only])
        edges = [(place, number) for number, own in self.parts.items() for part in own for place in part.places]
        self._edges, self._size = sorted(edges), len(messages)

    def _place(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, numbers: Sequence[int], has_starts: bool = True
    ) -> None:
        """Mark these messages. If marks change the text, mark fewer of them, and in the end only their ends."""
        marks, half = Marks(messages, tools, numbers, has_starts), len(numbers) // 2
        found, parts = marks.read(self._render(marks) or "")
        if found == self.text:
            self.parts |= {number: [] for number in numbers}
            for part in parts:
                self.parts[part.message].append(part)
        elif half:
            self._place(messages, tools, numbers[:half])
            self._place(messages, tools, numbers[half:])
        elif has_starts:
            self._place(messages, tools, numbers, has_starts=False)

    def around(self, number: int, start: int, end: int) -> tuple[int, int, int]:
        """Return where another message's last part before `start` ends, and where the first one after `end` begins.

        The last value is the index of the latter message. At the ends of the conversation there is no part.

        Args:
            number: index of the message whose own parts are passed over.
            start: index of a character of the text.
            end: index of a character of the text.
        """
        edges = self._edges
        first, last = bisect_right(edges, (start, self._size)), bisect_left(edges, (end, TOOLS))
        before = next((edges[at][0] for at in range(first - 1, -1, -1) if edges[at][1] != number), 0)
        after = (edges[at] for at in range(last, len(edges)) if edges[at][1] != number)
        return (before, *next(after, (len(self.text), self._size)))

    def missing(self, number: int) -> list[Part]:
        """Return the parts of a message that the rendered text does not hold at their places."""
        return [part for part in self.parts.get(number, ()) if not self._has(part)]

    def _has(self, part: Part) -> bool:
        if len(part.places) != 1:
            return bool(part.places)
        before, after, _ = self.around(part.message, part.places[0], part.places[0])
        around = self.text[before if part.start is None else part.start : after if part.end is None else part.end]
        return "".join(part.text.split()) in "".join(around.split())  # in white space alone it may differ
