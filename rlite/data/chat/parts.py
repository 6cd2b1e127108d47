"""Parts of messages, and their places in a rendered conversation.

A part is a text of a message: its content, its thoughts, the name and the arguments of a call. The conversation is
rendered once more with a mark before and after each part. If the rendered text without its marks is the conversation,
the marks show the place of each part.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

TOOLS = -1
"""stands for the index of a message in parts of tools"""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""keys of an answer's thoughts in the chat templates of different models"""
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
    """how often the template writes it"""

    @property
    def places(self) -> list[int]:
        """The known ends of the part in the rendered text."""
        return [place for place in (self.start, self.end) if place is not None]


class Marks:
    """A conversation with marks around its parts. White space at the ends of a text stays outside of the marks.

    Args:
        messages: the conversation.
        tools: JSON schemas, or None.
        only: index of the message to mark, or TOOLS; None marks all.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools: Any, only: int | None = None) -> None:
        self._parts: list[tuple[int, str, str]] = []
        self.messages = [
            self._message(message, number) if only in (None, number) else message
            for number, message in enumerate(messages)
        ]
        is_marked = only in (None, TOOLS) and isinstance(tools, Sequence)
        self.tools = [self._tool(tool) for tool in tools] if is_marked else tools

    def read(self, rendered: str) -> tuple[str, list[Part]]:
        """Return a rendered text without its marks, and the parts with their places."""
        pieces, places, size = _MARKS.split(rendered), dict[int, int](), 0
        for piece, mark in zip(pieces[::2], [*pieces[1::2], None], strict=True):
            size += len(piece)
            if mark is not None:
                places.setdefault(int(mark), size)
        times = Counter(map(int, pieces[1::2]))
        return "".join(pieces[::2]), [
            Part(*part, places.get(2 * n), places.get(2 * n + 1), max(times[2 * n], times[2 * n + 1]))
            for n, part in enumerate(self._parts)
        ]

    def _text(self, text: str, number: int, name: str, is_key: bool = False) -> str:
        core = text.strip()
        if not core:
            return text
        begin, end = (f"{_MARK}{2 * len(self._parts) + side:06d}" for side in (0, 1))
        self._parts.append((number, name, "" if is_key else core))
        head, tail = text.split(core, 1)
        return f"{text}{begin}{end}" if is_key else f"{head}{begin}{core}{end}{tail}"  # keys may be sorted

    def _message(self, message: Mapping[str, Any], number: int) -> dict[str, Any]:
        marked = dict(message)
        for key in ("content", *(THOUGHTS if message["role"] == "assistant" else ())):
            marked[key] = self._content(message.get(key), number, repr(key))
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(call, number) for call in message["tool_calls"]]
        return {key: value for key, value in marked.items() if key in message}

    def _content(self, value: Any, number: int, name: str) -> Any:
        if isinstance(value, str):
            return self._text(value, number, name)
        if isinstance(value, Sequence):
            return [self._content(part, number, name) for part in value]
        if isinstance(value, Mapping) and isinstance(value.get("text"), str):
            return {**value, "text": self._text(value["text"], number, name)}
        return value

    def _call(self, call: Any, number: int) -> Any:
        if not isinstance(call, Mapping):
            return call
        function = call.get("function") or call
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return call
        name = f"the call of {function['name']!r}"
        marked = {**function, "name": self._text(function["name"], number, name)}
        if "arguments" in function:
            marked["arguments"] = self._argument(function["arguments"], number, f"the arguments of {name}")
        return {**call, "function": marked} if "function" in call else marked

    def _argument(self, value: Any, number: int, name: str) -> Any:
        if isinstance(value, str):
            return self._text(value, number, name)
        if isinstance(value, Mapping):
            return {
                self._text(key, number, name, is_key=True): self._argument(own, number, name)
                for key, own in value.items()
            }
        return [self._argument(own, number, name) for own in value] if isinstance(value, list) else value

    def _tool(self, tool: Any) -> Any:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return tool
        marked = {**function, "name": self._text(function["name"], TOOLS, repr(function["name"]))}
        return {**tool, "function": marked} if "function" in tool else marked


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
        numbers = [*range(len(messages)), TOOLS] if only is None else [only]
        self.parts: dict[int, list[Part]] = {}
        """parts by the index of their message, or TOOLS; without messages whose text the marks change"""
        if not self._place(Marks(messages, tools, only), numbers) and only is None:
            for number in numbers:
                self._place(Marks(messages, tools, number), [number])
        edges = [(place, number) for number, own in self.parts.items() for part in own for place in part.places]
        self._edges, self._size = sorted(edges), len(messages)

    def _place(self, marks: Marks, numbers: Sequence[int]) -> bool:
        rendered = self._render(marks)
        if rendered is None:
            return False
        text, parts = marks.read(rendered)
        if text != self.text:
            return False
        self.parts |= {number: [] for number in numbers}
        for part in parts:
            self.parts[part.message].append(part)
        return True

    def between(self, number: int, start: int, end: int) -> tuple[int, int]:
        """Return where the last part of another message before `start` ends, and where the first after `end` begins."""
        edges = self._edges
        first, last = bisect_right(edges, (start, self._size)), bisect_left(edges, (end, TOOLS))
        before = next((edges[at][0] for at in range(first - 1, -1, -1) if edges[at][1] != number), 0)
        return before, next((edges[at][0] for at in range(last, len(edges)) if edges[at][1] != number), len(self.text))

    def missing(self, number: int) -> Part | None:
        """Return the first part of a message that the rendered text does not hold at its place."""
        return next((part for part in self.parts.get(number, ()) if not self._has(part)), None)

    def _has(self, part: Part) -> bool:
        if len(part.places) != 1:
            return bool(part.places)
        before, after = self.between(part.message, part.places[0], part.places[0])
        around = self.text[before if part.start is None else part.start : after if part.end is None else part.end]
        return "".join(part.text.split()) in "".join(around.split())  # in white space alone it may differ
