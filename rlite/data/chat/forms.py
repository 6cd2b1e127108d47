"""Forms of messages that a chat template takes: content as text or as parts, arguments of calls as object or as text.

Both forms are in use, in data and in templates. A template that is given the other form leaves content out, writes
Python's notation, or escapes JSON twice. Probes find the forms that a template writes correctly.

Limits of a chat template, which is a program of a stranger: seconds of a processor, and characters of its text.

A template runs in the caller's thread. A thread of this module looks at the clocks of the renderings that are slow, and
raises an exception in theirs.

A part is a text of a message: its content, its thoughts, the name and the arguments of a call. The conversation is
rendered once more with a mark before and after each part. If the rendered text without its marks is the conversation,
the marks show the place of each part.
"""

from __future__ import annotations

import ctypes
import json
import re
import secrets
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from jinja2 import Environment
from transformers.utils.chat_template_utils import render_jinja_template

from rlite.errors import DataError

SECONDS = 1.0
"""seconds of a processor for one conversation; a thousand messages take a tenth of one"""
MAX_CHARACTERS = 2**26
MAX_INTEGER = 10**6
MAX_TEMPLATE = 2**20
"""characters of a template; the longest of today have a thirtieth of them"""
INTERVAL_S = 0.05
"""seconds between two looks at the clocks"""


class TemplateLimit(ValueError):
    """A chat template exceeds a limit."""


class _Stop(BaseException):
    """Raised in a thread whose template has had its time; no template and no library catches it."""


_lock = threading.Lock()
_under_way: dict[int, float] = {}
"""seconds at which each thread's rendering is stopped; one that was stopped is no longer here"""
_begun = threading.Event()
_watch: list[threading.Thread] = []


def limited(render: Callable[[], Any]) -> Any:
    """Return the result of a rendering."""
    thread = threading.get_ident()
    try:
        try:
            with _lock:
                _under_way[thread] = _seconds_of(thread) + SECONDS
                _start_watching()
            _begun.set()
            result = render()
        finally:
            with _lock:
                is_stopped = _under_way.pop(thread, None) is None
            if is_stopped and not isinstance(sys.exc_info()[1], _Stop):
                time.sleep(1)  # the exception is on its way and ends this
    except _Stop:
        raise TemplateLimit(f"it takes more than {SECONDS:g} s") from None
    if isinstance(result, str) and len(result) > MAX_CHARACTERS:
        raise TemplateLimit(f"it writes {len(result)} characters, expected at most {MAX_CHARACTERS}")
    return result


def check_constants(template: str) -> None:
    """Refuse a size and numbers that no conversation needs: an operation on them cannot be interrupted."""
    if len(template) > MAX_TEMPLATE:
        raise TemplateLimit(f"its chat template has more than {MAX_TEMPLATE} characters")
    before = ""
    for _, kind, text in Environment().lex(template):
        if (kind == "integer" and int(text.replace("_", ""), 0) > MAX_INTEGER) or (text == "**" and before not in "(,"):
            raise TemplateLimit(f"its chat template computes with powers or with numbers above {MAX_INTEGER}")
        before = before if kind == "whitespace" else text


def _seconds_of(thread: int) -> float:
    """Return the seconds of a processor that a thread has had; of the clock, where the system does not tell."""
    return time.monotonic() if sys.platform == "darwin" else time.clock_gettime(time.pthread_getcpuclockid(thread))


def _start_watching() -> None:
    if not any(thread.is_alive() for thread in _watch):  # a fork has no thread
        _watch[:] = [threading.Thread(target=_stop_slow_renderings, name="limits of chat templates", daemon=True)]
        _watch[0].start()


def _stop_slow_renderings() -> None:
    while True:
        _begun.wait()
        time.sleep(INTERVAL_S)
        with _lock:
            if not _under_way:
                _begun.clear()
            for thread, end in list(_under_way.items()):
                if _seconds_of(thread) > end:
                    del _under_way[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Stop))


Message = Mapping[str, Any]
Messages = Sequence[Message]

TEXT_PARTS = ("text", "input_text", "output_text")
"""types of parts whose `text` is all that they hold"""
MEDIA = ("image", "video", "audio", "file", "document")
"""words in the types of parts that this library does not read"""
_PROBES = ("PROBE-ONE", "PROBE-TWO")
_OBJECT = {"PROBE-KEY": "PROBE-VALUE"}
_TEXT = json.dumps(_OBJECT)


class MessageForms:
    """Gives messages to a chat template in the forms that it takes."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._roles: dict[tuple[str, bool], bool] = {}

    def fitted(self, messages: Messages, where: str = "") -> list[Message]:
        """Return messages in the forms that the template takes. What is in such a form already is unchanged.

        `where`: stands before the name of a message in errors, such as "data.path=x.json, row 3, ".
        """
        return [self._fitted(message, f"{where}messages[{number}]") for number, message in enumerate(messages)]

    def _fitted(self, message: Message, where: str) -> Message:
        if None in message.values():  # a template would write it as text; newer transformers leave it out, too
            message = {key: value for key, value in message.items() if value is not None}
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, list):
            content = self._content(message["role"], content, where)
        if isinstance(content, str) and not self._takes(message["role"], is_text=True):
            content = _parts(content)
        if content is None and calls and self._needs_content:
            content = ""
        if content is not message.get("content"):
            message = {**message, "content": content}
        if isinstance(calls, (list, tuple)) and calls:
            message = {**message, "tool_calls": [self._call(call, where) for call in calls]}
        return message

    # -- content -------------------------------------------------------------------------------------------------

    def _content(self, role: str, parts: list[Any], where: str) -> str | list[Any]:
        """Return the parts if the template takes parts, else their texts, a line each."""
        check_parts(parts, where)
        for part in parts:
            if (kind := part["type"]) not in TEXT_PARTS and f"'{kind}'" not in self._source.replace('"', "'"):
                found = f"a part of the type {kind!r}, which the chat template lacks"
                raise DataError(f"{where}: 'content' has {found}", where)
        if self._takes(role, is_text=False) or any(part["type"] not in TEXT_PARTS for part in parts):
            return [part | {"type": "text"} if part["type"] in TEXT_PARTS else part for part in parts]
        return "\n".join(part["text"] for part in parts)

    def _takes(self, role: str, *, is_text: bool) -> bool:
        """Return whether the template writes a content of a role, given as text or as parts, as it is.

        Text is also given to a template that takes neither, so that its own error is reported.
        """
        if (role, is_text) not in self._roles:
            text = " ".join(_PROBES)
            contents: tuple[Any, ...] = (text, _parts(text), _parts(*_PROBES))
            plain, one, parts = (self._probed(role, content) or "" for content in contents)
            most = plain.count("text")
            has_one = text in one and one.count("text") <= most
            has_parts = all(text in parts for text in _PROBES) and parts.count("text") <= most
            self._roles |= {(role, False): has_parts, (role, True): text in plain or not (has_one or has_parts)}
        return self._roles[role, is_text]

    def _probed(self, role: str, content: Any) -> str | None:
        message = {"role": role, "content": content, "tool_call_id": "call00001", "name": "probe"}
        if role == "assistant":
            return self._rendered([self._question, message])
        if role in ("user", "system", "developer"):
            return self._rendered([message, *([] if role == "user" else [self._question])])
        return self._rendered([*self._calling({}), message]) or self._rendered([*self._calling("{}"), message])

    @cached_property
    def _question(self) -> Message:
        return self._fitted({"role": "user", "content": "question"}, "")

    def _calling(self, arguments: Any) -> list[Message]:
        call = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        return [self._question, {**self._fitted({"role": "assistant", "content": ""}, ""), "tool_calls": [call]}]

    # -- calls of tools ------------------------------------------------------------------------------------------

    def _call(self, call: Any, where: str) -> Any:
        """Return a call whose arguments the template takes."""
        if not isinstance(call, Mapping) or not isinstance(function := call.get("function", call), Mapping):
            return call
        found = function.get("arguments")
        arguments: Any = {} if found in (None, "") else found
        if isinstance(arguments, str) and self._arguments == {"object"}:
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
            if not isinstance(arguments, dict):
                text = f"the arguments of the call of {function.get('name')!r} are the text {found!r:.200}"
                raise DataError(f"{where}: {text}, which is no JSON object; the chat template takes an object", where)
        elif not isinstance(arguments, str) and self._arguments == {"text"}:
            arguments = json.dumps(arguments, ensure_ascii=False)
        if arguments is found:
            return call
        function = {**function, "arguments": arguments}
        return {**call, "function": function} if "function" in call else function

    @cached_property
    def _needs_content(self) -> bool:
        """True if the template fails on a call without a content."""
        question, answer = self._calling(_TEXT if self._arguments == {"text"} else _OBJECT)
        return self._rendered([question, {key: answer[key] for key in answer if key != "content"}]) is None

    @cached_property
    def _arguments(self) -> set[str]:
        """The forms of arguments that the template writes as they are: "object", "text", or both if they are equal."""
        as_object, as_text = (self._rendered(self._calling(form)) or "" for form in (_OBJECT, _TEXT))
        has_object = all(name in as_object for item in _OBJECT.items() for name in item)
        has_object = has_object and repr(_OBJECT) not in as_object
        found = {"object": has_object, "text": _TEXT in as_text and (as_text == as_object or not has_object)}
        return {form for form, is_taken in found.items() if is_taken}

    def _rendered(self, messages: Messages) -> str | None:
        """Return a conversation as text; None if the template refuses it."""
        names = {"bos_token": "", "eos_token": "", "pad_token": "", "unk_token": ""}
        try:
            [text], _ = limited(
                lambda: render_jinja_template(conversations=[list(messages)], chat_template=self._source, **names)
            )
        except Exception:  # a template is a program of others: the conversation itself is refused with the reason
            return None
        return text


forms_of = lru_cache(maxsize=64)(MessageForms)
"""returns the forms of messages that a template takes"""


def check_parts(parts: Sequence[Any], where: str) -> None:
    """Check that the parts of a content are texts, or are left to the chat template."""
    for number, part in enumerate(parts):
        at = f"{where}: 'content'[{number}]"
        if not isinstance(part, Mapping) or not isinstance(kind := part.get("type"), str):
            raise DataError(f"{at} is {part!r:.100}; expected {{'type': 'text', 'text': ...}}")
        if any(word in kind for word in MEDIA):
            raise DataError(f"{at} is of the type {kind!r}; models here read text alone: leave the row out")
        if kind in TEXT_PARTS and not isinstance(part.get("text"), str):
            raise DataError(f"{at} has the 'text' {part.get('text')!r:.100}; expected a text")


def _parts(*texts: str) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


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

    `tools`: JSON schemas, or None. `has_starts`: mark the beginning of a part, too; some templates ask how a content
    begins.
    """

    def __init__(self, messages: Messages, tools: Any, numbers: Sequence[int], has_starts: bool) -> None:
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

    def _message(self, message: Message, number: int) -> dict[str, Any]:
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

    `render`: renders a conversation with marks; returns None if the template fails. `tools`: JSON schemas, or None.
    `only`: index of the message whose parts are wanted; None wants all.
    """

    def __init__(
        self, text: str, render: Callable[[Marks], str | None], messages: Messages, tools: Any, only: int | None
    ) -> None:
        self.text, self._render = text, render
        self.parts: dict[int, list[Part]] = {}
        """parts by the index of their message, or TOOLS; without messages whose text the marks change"""
        self._place(messages, tools, [TOOLS, *range(len(messages))] if only is None else [only])
        edges = [(place, number) for number, own in self.parts.items() for part in own for place in part.places]
        self._edges, self._size = sorted(edges), len(messages)

    def _place(self, messages: Messages, tools: Any, numbers: Sequence[int], has_starts: bool = True) -> None:
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
