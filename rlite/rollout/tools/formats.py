"""Tool calls in generated text: the formats that open models are trained on, as pure functions of the text.

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number      Hermes, Qwen2.5, Qwen3
    llama3_json  {"name": ..., "parameters": {...}}, several with ";" between               Llama 3
    xml          <tool_call><function=NAME><parameter=KEY>text</parameter>...               Qwen3-Coder, Qwen3.5
    mistral      [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...],                     Mistral
                 or [TOOL_CALLS]NAME[ARGS]{...}, any number
    pythonic     [name(argument=literal, ...), ...]                                         Llama 3.2 and 4

Text without a call in its format stays unchanged. A call that cannot be read stays in the text, beside other calls that
can. Thoughts, such as `<think>...</think>`, hold no calls. All functions take linear time.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from rlite.runtime.event_loop import beside_loop


class ToolCall(NamedTuple):
    """Call of a tool that a model asks for."""

    name: str
    arguments: dict[str, Any]
    """JSON values by parameter"""


Reading = tuple[str, list[ToolCall], list[str]]
"""text outside of calls, the calls, and the texts of calls that cannot be read, which stand in the first text, too"""


@dataclass(frozen=True)
class ToolCallFormat:
    """Notation in which a model writes its calls."""

    name: str
    parse: Callable[[str], tuple[str, list[ToolCall]]]
    """text -> (the text outside of calls, the calls); without calls the text as it is"""
    num_settled: Callable[[str], int]
    """number of characters at the beginning of an unfinished text that are content in any case"""
    shows_special_tokens: bool = False
    """true if the format's marks may be special tokens, which decoding then must not skip"""
    read_all: Callable[[str], Reading] | None = None
    """`parse`, and the texts of calls that cannot be read; they are also in the text outside of calls"""
    aside: Callable[[str], Awaitable[Reading]] | None = None
    """`read_all` with a deadline, for patterns that the checkpoint brings along; None reads here"""

    def text(self, tokenizer: Any, tokens: Sequence[int]) -> str:
        """Return the text of an answer without its end token, in which calls are looked for."""
        return tokenizer.decode(tokens, skip_special_tokens=not self.shows_special_tokens)

    async def read(self, text: str, prompt: str = "") -> Reading:
        """Return the text outside of calls, the calls, and the texts of calls that cannot be read.

        `prompt`: the text before it; a thought that it begins goes on in the answer.
        """
        if self.aside is not None:  # a response template knows what the prompt has begun
            return await self.aside(text)
        opening = opened_thought(prompt)
        read = self.read_all or (lambda text: (*self.parse(text), []))
        content, calls, malformed = await beside_loop(len(text), read, opening + text)
        return content.removeprefix(opening), calls, malformed

    def num_settled_after(self, prompt: str, text: str) -> int:
        """Return `num_settled` of an unfinished text after a prompt, which may have begun a thought."""
        opening = opened_thought(prompt)
        return max(self.num_settled(opening + text) - len(opening), 0)


def typed(calls: Sequence[ToolCall], tools: Iterable[Mapping[str, Any]] | None) -> list[ToolCall]:
    """Return the calls with texts turned into the values that the tools' schemas ask for, where they can be.

    Formats in XML write every argument as text. A text for a parameter that may be a text stays one.
    """
    functions = [tool.get("function", tool) for tool in tools or ()]
    schemas = {function.get("name"): (function.get("parameters") or {}).get("properties") for function in functions}

    def typed_arguments(call: ToolCall) -> dict[str, Any]:
        properties = schemas.get(call.name) or {}
        return {key: _typed(value, properties.get(key)) for key, value in call.arguments.items()}

    return [call._replace(arguments=typed_arguments(call)) for call in calls]


def _typed(value: Any, schema: Any) -> Any:
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    wanted = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(value, str) or not wanted or "string" in wanted:
        return value
    text = {"True": "true", "False": "false", "None": "null"}.get(value.strip(), value)  # as Jinja writes them
    try:
        read = _json(text)
    except (_NoCall, ValueError, RecursionError):
        return value
    return read if any(type(read) in JSON_TYPES.get(kind, ()) for kind in wanted) else value


def numbered(calls: Sequence[ToolCall], numbers: Iterator[int]) -> list[dict[str, Any]]:
    """Return calls in the form of a message for chat templates: the arguments are a mapping, not JSON text."""
    return [
        {
            "id": f"call{next(numbers):05d}",  # nine letters or digits, as Mistral's templates want them
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


_NAME = re.compile(r"[\w.:/-]{1,256}")
_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"<function=([^>]+)>(.*?)(?:</function>)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?((?:[^<]|<(?!/parameter>))*+)(</parameter>)?")
_MISTRAL_OPEN, _MISTRAL_ID, _MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LLAMA_OPEN = "<|python_tag|>"
_LLAMA_CALLS = r"(?:<\|python_tag\|>)?\s*(?=\{)"
_THOUGHT_NAMES = ("think", "thinking", "thought", "reasoning", "seed:think")
THOUGHTS = {f"<{name}>": f"</{name}>" for name in _THOUGHT_NAMES}
THOUGHTS |= {"[THINK]": "[/THINK]", "◁think▷": "◁/think▷"}
"""marks around a thought: its opening mark, which may stand in the prompt, and its closing mark"""
MAX_ENDING = 100
"""characters of a prompt in which its last mark is looked for, at each token of a stream"""
_THOUGHT_MARKS = [re.escape(mark) for pair in THOUGHTS.items() for mark in pair]
_MARKED_CALL = r"<tool_call>(?:[^<]|<(?!/?tool_call>))*+(?:</tool_call>)?"
"""a call may end with the turn, whose end token was its closing mark"""
_MISTRAL_CALLS = r"\[TOOL_CALLS\](?:\s*+(\[)(?!TOOL_CALLS\])|(?:[^\[]|\[(?!TOOL_CALLS\]))*+)"
"""the beginning of a list, or a call by name"""
_STRUCTURE = re.compile(r"""('{3}|"{3}|['"])(?:\\.|(?!\1).)*+(?:\1)?|[\[({\])},;]""", re.DOTALL)
"""strings, brackets and separators, of JSON and of Python"""
_CALLED = re.compile(r"[\w.]+\(")
"""beginning of a call in Python"""
_MAX_LENGTH = 1 << 20
"""characters of a text in which calls are looked for"""
_MAX_PYTHONIC_LENGTH = 1 << 16
"""characters of a call that Python's parser gets, which no other thread interrupts"""


JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
"""JSON schema's types as `json` reads them"""


class _NoCall(Exception):
    """The text is not in the format."""


# deep nesting and numbers of thousands of digits are a model's doing, too
UNREADABLE = (_NoCall, ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError)


def parsed(read: Callable[[str], Reading], text: str) -> Reading:
    """Return what `read` finds in a text. A text without a call is content as it is."""
    try:
        content, calls, malformed = read(text) if len(text) <= _MAX_LENGTH else (text, [], [])
    except UNREADABLE:
        return text, [], []
    return (content, calls, malformed) if calls else (text, [], malformed)


def opened_thought(prompt: str) -> str:
    """Return the opening mark of a thought with which a prompt ends; "" if it ends otherwise."""
    return next((mark for mark in THOUGHTS if prompt[-MAX_ENDING:].rstrip().endswith(mark)), "")


# -- scanning ----------------------------------------------------------------------------------------------------------

Pieces = tuple[list[ToolCall], list[str]]
"""the calls, and the texts of calls that cannot be read"""
ReadBlock = Callable[[re.Match[str]], tuple[Pieces, int]]
"""match of the beginning of a block of calls -> what the block holds, and where it ends"""


def scanned(text: str, beginning: str, read_block: ReadBlock) -> Reading:
    """Return the calls in the blocks of a text, and the text outside of them. Thoughts hold no calls.

    `beginning`: pattern of the beginning of a block; it does not match the empty text. Returns the reading. Calls that
    cannot be read stay at their places in the text.
    """
    marks = re.compile("|".join([beginning, *_THOUGHT_MARKS]), re.DOTALL)
    content: list[str] = []
    calls: list[ToolCall] = []
    malformed: list[str] = []
    start = at = 0
    while found := marks.search(text, at):
        if closing := THOUGHTS.get(found[0]):
            at = _end_of(closing, text, found.end())
        elif found[0] in THOUGHTS.values():  # it ends a thought that the prompt has begun
            content, calls, malformed, start, at = [], [], [], 0, found.end()
        else:
            (good, bad), at = read_block(found)
            content += [text[start : found.start()], *bad]
            calls += good
            malformed += bad
            start = at
    return "".join([*content, text[start:]]).rstrip(), calls, malformed


def _thoughts_end(text: str) -> int:
    """Return the length of the thought with which a text begins."""
    begun = text.lstrip()
    return next((_end_of(closing, text, 0) for mark, closing in THOUGHTS.items() if begun.startswith(mark)), 0)


def _end_of(closing: str, text: str, at: int) -> int:
    found = text.find(closing, at)
    return len(text) if found < 0 else found + len(closing)


def read_each(pieces: Iterable[str], read: Callable[[str], ToolCall]) -> Pieces:
    """Return the calls that `read` reads, and the pieces of text that it cannot read."""
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for piece in pieces:
        try:
            calls.append(read(piece))
        except UNREADABLE:
            malformed.append(piece)
    return calls, malformed


def _split(text: str, separator: str, start: int) -> tuple[list[str], int]:
    """Split a text at separators outside of strings and brackets, up to the end of the list in which it begins.

    Returns the parts that are not blank, and the end of the list.
    """
    parts: list[str] = []
    depth = 0
    for found in _STRUCTURE.finditer(text, start):
        mark = found[0]
        if mark in ("(", "[", "{"):
            depth += 1
        elif mark in (")", "]", "}") and depth:
            depth -= 1
        elif mark == "]" or (mark == separator and not depth):
            parts.append(text[start : found.start()])
            start = found.end()
            if mark == "]":
                break
    else:  # the list may end with the turn
        parts.append(text[start:])
        start = len(text)
    return [part.strip() for part in parts if part.strip()], start


# -- formats -----------------------------------------------------------------------------------------------------------


def _marked(read_body: Callable[[str], ToolCall]) -> Callable[[str], Reading]:
    """Return the function for a format with marks around each call, by the function that reads the text between."""

    def read(piece: str) -> ToolCall:
        return read_body(piece.removeprefix(_CALL_OPEN).removesuffix(_CALL_CLOSE))

    return lambda text: scanned(text, _MARKED_CALL, lambda found: (read_each([found[0]], read), found.end()))


def _whole(beginning: str, separator: str, read_part: Callable[[str], ToolCall]) -> Callable[[str], Reading]:
    """Return the function for a format whose calls are the whole text after a thought."""

    def read(text: str) -> Reading:
        end = _thoughts_end(text)
        body = text[end:].strip()
        if (begun := re.match(beginning, body)) is None:
            raise _NoCall
        parts, at = _split(body, separator, begun.end())
        calls, malformed = read_each(parts, read_part)
        if body[at:] or not (calls or any(map(_CALLED.match, malformed))):  # a list, or JSON, may be an answer
            raise _NoCall
        return (text[:end] + "\n".join(malformed)).rstrip(), calls, malformed

    return read


def _read_json(text: str) -> ToolCall:
    return read_call(_json(text))


def _read_xml(body: str) -> ToolCall:
    function = _FUNCTION.fullmatch(body.strip())
    if function is None or _PARAMETER.sub("", function[2]).strip():
        raise _NoCall
    parameters = _PARAMETER.findall(function[2])
    if not all(closing for _, _, closing in parameters):
        raise _NoCall
    arguments = {key.strip(): value.removesuffix("\n") for key, value, _ in parameters}
    return read_call({"name": function[1].strip(), "arguments": arguments})


def _read_mistral(found: re.Match[str]) -> tuple[Pieces, int]:
    if found[1] is None:
        return read_each([found[0]], _read_named), found.end()
    parts, end = _split(found.string, ",", found.end())
    calls, malformed = read_each(parts, _read_json)
    return (calls, [_MISTRAL_OPEN + part for part in malformed]), end


def _read_named(text: str) -> ToolCall:
    # NAME[ARGS]{...} or NAME[CALL_ID]ID[ARGS]{...}
    name, mark, arguments = text.removeprefix(_MISTRAL_OPEN).partition(_MISTRAL_ARGUMENTS)
    if not mark:
        raise _NoCall
    return read_call({"name": name.partition(_MISTRAL_ID)[0].strip(), "arguments": _json(arguments)})


def _read_python(text: str) -> ToolCall:
    if len(text) > _MAX_PYTHONIC_LENGTH:
        raise _NoCall
    with warnings.catch_warnings():  # of what a model writes, such as "\d"
        warnings.simplefilter("ignore")
        node = ast.parse(text, mode="eval").body
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise _NoCall
    arguments = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    return read_call({"name": ast.unparse(node.func), "arguments": arguments})


def read_call(value: Any) -> ToolCall:
    """Return the call of a JSON value such as {"name": ..., "arguments": {...}}, or with "parameters"."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not _NAME.fullmatch(value["name"]):
        raise _NoCall
    arguments: Any = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON, as in OpenAI's interface
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise _NoCall
    return ToolCall(value["name"], json.loads(json.dumps(arguments, allow_nan=False)))  # no bytes, no sets


def _no_constant(name: str) -> Any:
    raise _NoCall  # NaN and Infinity are not JSON


_DECODER = json.JSONDecoder(parse_constant=_no_constant, strict=False)


def _json(text: str) -> Any:
    return _DECODER.decode(text.strip())


def num_before(text: str, marks: Sequence[str]) -> int:
    """Return how many characters of an unfinished text stand before the first mark, or before the beginning of one."""
    ends = [text.find(mark) for mark in marks if mark in text]
    ends += [len(text) - size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])]
    return min(ends, default=len(text))


def settled_before(*marks: str) -> Callable[[str], int]:
    """Return the `num_settled` of a format whose calls begin with one of these marks."""
    return lambda text: len(text[: num_before(text, marks)].rstrip())  # white space before a call is not content


def _settled_unless(*beginnings: str) -> Callable[[str], int]:
    """Return the function for a format that is the whole text: all of the text is settled, or nothing."""

    def num_settled(text: str) -> int:
        end = _thoughts_end(text)
        begun = text[end:].lstrip()
        is_open = any(begun.startswith(mark) or mark.startswith(begun) for mark in beginnings)
        return len(text[:end].rstrip()) if is_open else len(text)

    return num_settled


def _format(
    name: str, read: Callable[[str], Reading], num_settled: Callable[[str], int], shows_special_tokens: bool = False
) -> ToolCallFormat:
    read_all = partial(parsed, read)
    return ToolCallFormat(name, lambda text: read_all(text)[:2], num_settled, shows_special_tokens, read_all)


FORMATS = {
    form.name: form
    for form in (
        _format("hermes", _marked(_read_json), settled_before(_CALL_OPEN)),
        _format("xml", _marked(_read_xml), settled_before(_CALL_OPEN)),
        _format("llama3_json", _whole(_LLAMA_CALLS, ";", _read_json), _settled_unless("{", _LLAMA_OPEN), True),
        _format(
            "mistral", lambda text: scanned(text, _MISTRAL_CALLS, _read_mistral), settled_before(_MISTRAL_OPEN), True
        ),
        _format("pythonic", _whole(r"\[", ",", _read_python), _settled_unless("[")),
    )
}
