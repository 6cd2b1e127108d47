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
from typing import Any

from rlite.rollout.text_threads import beside_loop


@dataclass(frozen=True)
class ToolCall:
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

        Args:
            text: the answer.
            prompt: the text before it; a thought that it begins goes on in the answer.
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
    schemas: dict[Any, Any] = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        schemas[function.get("name")] = (function.get("parameters") or {}).get("properties") or {}
    return [
        ToolCall(
            call.name,
            {key: _typed(value, schemas.get(call.name, {}).get(key)) for key, value in call.arguments.items()},
        )
        for call in calls
    ]


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
_HERMES_OPEN, _HERMES_CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION_OPEN, _FUNCTION_CLOSE = "<function=", "</function>"
_PARAMETER_OPEN, _PARAMETER_CLOSE = "<parameter=", "</parameter>"
_THOUGHT_NAMES = ("think", "thinking", "thought", "reasoning", "seed:think")
THOUGHTS = {f"<{name}>": f"</{name}>" for name in _THOUGHT_NAMES}
THOUGHTS |= {"[THINK]": "[/THINK]", "◁think▷": "◁/think▷"}
"""marks around a thought: its opening mark, which may stand in the prompt, and its closing mark"""
_MARKS = re.compile("|".join(map(re.escape, [_HERMES_OPEN, _HERMES_CLOSE, *THOUGHTS, *THOUGHTS.values()])))
_MISTRAL_OPEN, _MISTRAL_ID, _MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LLAMA_OPEN = "<|python_tag|>"
_MAX_LENGTH = 1 << 20
"""characters of a text in which calls are looked for"""
_MAX_PYTHONIC_LENGTH = 1 << 16
"""characters that Python's parser gets, which no other thread interrupts"""


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
    if len(text) > _MAX_LENGTH:
        return text, [], []
    try:
        content, calls, malformed = read(text)
    except UNREADABLE:
        return text, [], []
    return (content, calls, malformed) if calls else (text, [], malformed)


def _format(
    name: str, read: Callable[[str], Reading], num_settled: Callable[[str], int], shows_special_tokens: bool = False
) -> ToolCallFormat:
    read_all = partial(parsed, read)
    return ToolCallFormat(name, lambda text: read_all(text)[:2], num_settled, shows_special_tokens, read_all)


def opened_thought(prompt: str) -> str:
    """Return the opening mark of a thought with which a prompt ends; "" if it ends otherwise."""
    return next((mark for mark in THOUGHTS if prompt.rstrip().endswith(mark)), "")


def _thoughts_end(text: str) -> int:
    """Return the length of the thought with which a text begins."""
    begun = text.lstrip()
    for mark, closing in THOUGHTS.items():
        if begun.startswith(mark):
            end = text.find(closing)
            return len(text) if end < 0 else end + len(closing)
    return 0


def _after_thoughts(read: Callable[[str], Reading]) -> Callable[[str], Reading]:
    """Return a function that reads the text after a thought, and keeps the thought in the content."""

    def read_rest(text: str) -> Reading:
        end = _thoughts_end(text)
        content, calls, malformed = read(text[end:])
        return (text[:end] + content).rstrip(), calls, malformed

    return read_rest


def _between_marks(read_call: Callable[[str], ToolCall]) -> Callable[[str], Reading]:
    """Return the function for a format with marks around each call, by what reads the text between them."""

    def read(text: str) -> Reading:
        content: list[str] = []
        calls: list[ToolCall] = []
        malformed: list[str] = []
        for is_call, start, end in _pieces(text):
            piece = text[start:end]
            try:
                call = read_call(piece[len(_HERMES_OPEN) :].removesuffix(_HERMES_CLOSE)) if is_call else None
            except UNREADABLE:
                call = None
                malformed.append(piece)
            if call is None:
                content.append(piece)
            else:
                calls.append(call)
        return "".join(content).rstrip(), calls, malformed

    return read


def _pieces(text: str) -> list[tuple[bool, int, int]]:
    """Return whether each piece of a text is a call, and where it begins and ends. Thoughts hold no calls."""
    pieces: list[tuple[bool, int, int]] = []
    is_call, start, closing = False, 0, ""

    def cut(end: int, begins_call: bool) -> None:
        nonlocal is_call, start
        pieces.append((is_call, start, end))
        is_call, start = begins_call, end

    for found in _MARKS.finditer(text):
        mark = found[0]
        if closing:
            closing = "" if mark == closing else closing
        elif mark == _HERMES_OPEN:
            cut(found.start(), True)
        elif is_call:
            if mark == _HERMES_CLOSE:
                cut(found.end(), False)
        elif mark in THOUGHTS:
            closing = THOUGHTS[mark]
        elif mark != _HERMES_CLOSE:  # it ends a thought that the prompt has begun
            pieces, start = [], 0
    cut(len(text), False)  # the last call may end with the turn, where its closing mark was the end token
    return pieces


def _read_hermes(body: str) -> ToolCall:
    return read_call(_json(body), "arguments")


def _read_xml(body: str) -> ToolCall:
    body = body.strip()
    name, mark, text = body.removeprefix(_FUNCTION_OPEN).partition(">")
    if not body.startswith(_FUNCTION_OPEN) or not mark:
        raise _NoCall
    arguments: dict[str, Any] = {}
    *parts, rest = text.removesuffix(_FUNCTION_CLOSE).split(_PARAMETER_CLOSE)
    for part in parts:
        key, mark, value = part.lstrip().removeprefix(_PARAMETER_OPEN).partition(">")
        if not part.lstrip().startswith(_PARAMETER_OPEN) or not mark or not key or "\n" in key:
            raise _NoCall
        arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n")
    if rest.strip():
        raise _NoCall
    return read_call({"name": name.strip(), "arguments": arguments}, "arguments")


def _read_llama3(text: str) -> Reading:
    text = text.strip().removeprefix(_LLAMA_OPEN).strip()
    calls, malformed, end = _values(text, 0, ";", "parameters", "arguments")
    if text[end:] or not calls:
        raise _NoCall
    return "; ".join(malformed), calls, malformed


def _read_mistral(text: str) -> Reading:
    content, *parts = text.split(_MISTRAL_OPEN)
    calls: list[ToolCall] = []
    malformed: list[str] = []
    if parts and parts[0].lstrip().startswith("["):
        rest = _MISTRAL_OPEN.join(parts).strip()
        calls, malformed, end = _values(rest, 1, ",", "arguments")
        if not malformed and rest[end:] != "]":
            raise _NoCall
        parts = []
    for part in parts:
        try:
            calls.append(_read_named(part))
        except UNREADABLE:
            malformed.append(part)
    return "".join([content.rstrip(), *(_MISTRAL_OPEN + part for part in malformed)]), calls, malformed


def _values(text: str, at: int, separator: str, *keys: str) -> tuple[list[ToolCall], list[str], int]:
    """Read JSON values with a separator between.

    Returns:
        The calls; the texts that are none, the last of which is all the rest if it is no JSON; and where they end.
    """
    calls: list[ToolCall] = []
    malformed: list[str] = []
    while (start := _blank(text, at)) < len(text):
        end = len(text)
        try:
            value, end = _DECODER.raw_decode(text, start)
            calls.append(read_call(value, *keys))
        except UNREADABLE:
            malformed.append(text[start:end])
        at = _blank(text, end)
        if not text.startswith(separator, at):
            break
        at += 1
    return calls, malformed, at


def _blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return at if found is None else found.end()


def _read_named(text: str) -> ToolCall:
    # NAME[ARGS]{...} or NAME[CALL_ID]ID[ARGS]{...}
    name, mark, arguments = text.partition(_MISTRAL_ARGUMENTS)
    if not mark:
        raise _NoCall
    return read_call({"name": name.partition(_MISTRAL_ID)[0].strip(), "arguments": _json(arguments)}, "arguments")


def _read_pythonic(text: str) -> Reading:
    text = text.strip()
    if not text.startswith("[") or len(text) > _MAX_PYTHONIC_LENGTH:
        raise _NoCall
    malformed: list[str] = []
    try:
        nodes = _elements(text)
    except SyntaxError as error:
        # the calls that are complete before the error
        lines = text.splitlines(keepends=True)[: (error.lineno or 1) - 1]
        end = text.rfind("),", 0, sum(map(len, lines)) + (error.offset or 0)) + 1
        nodes, malformed = _elements(text[:end] + "]"), [text[end + 1 : -1].strip()]
    calls = []
    for node in nodes:
        try:
            calls.append(_python_call(node))
        except UNREADABLE:
            malformed.append(ast.unparse(node))
    return ", ".join(malformed), calls, malformed


def _elements(text: str) -> list[ast.expr]:
    with warnings.catch_warnings():  # of what a model writes, such as "\d"
        warnings.simplefilter("ignore")
        tree = ast.parse(text, mode="eval").body
    if not isinstance(tree, ast.List):
        raise _NoCall
    return tree.elts


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise _NoCall
    arguments = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    return read_call({"name": ast.unparse(node.func), "arguments": arguments}, "arguments")


def read_call(value: Any, *keys: str) -> ToolCall:
    """Return the call of a JSON value such as {"name": ..., "arguments": {...}}.

    Args:
        value: a JSON value.
        keys: names that the arguments may have.

    Raises:
        _NoCall: the value is no call.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not _NAME.fullmatch(value["name"]):
        raise _NoCall
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):  # JSON within JSON, as in OpenAI's interface
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise _NoCall
    try:
        return ToolCall(value["name"], json.loads(json.dumps(arguments, allow_nan=False)))
    except TypeError as error:  # bytes, a set
        raise _NoCall from error


def _no_constant(name: str) -> Any:
    raise _NoCall  # NaN and Infinity are not JSON


_DECODER = json.JSONDecoder(parse_constant=_no_constant, strict=False)
_BLANK = re.compile(r"\s*")


def _json(text: str) -> Any:
    value, end = _DECODER.raw_decode(text.strip())
    if text.strip()[end:].strip():
        raise _NoCall
    return value


def num_before(text: str, marks: tuple[str, ...]) -> int:
    """Return how many characters of an unfinished text stand before the first mark, or before the beginning of one."""
    ends = [text.find(mark) for mark in marks if mark in text]
    ends += [
        len(text) - size
        for mark in marks
        for size in range(1, min(len(mark), len(text) + 1))
        if text.endswith(mark[:size])
    ]
    return min(ends, default=len(text))


def _settled_before(mark: str) -> Callable[[str], int]:
    # white space before a call is not content
    return lambda text: len(text[: num_before(text, (mark,))].rstrip())


def _settled_unless(*beginnings: str) -> Callable[[str], int]:
    """Return the function for a format that is the whole text: all of the text is settled, or nothing."""

    def num_settled(text: str) -> int:
        end = _thoughts_end(text)
        begun = text[end:].lstrip()
        is_open = any(begun.startswith(mark) or mark.startswith(begun) for mark in beginnings)
        return len(text[:end].rstrip()) if is_open else len(text)

    return num_settled


FORMATS = {
    form.name: form
    for form in (
        _format("hermes", _between_marks(_read_hermes), _settled_before(_HERMES_OPEN)),
        _format("xml", _between_marks(_read_xml), _settled_before(_HERMES_OPEN)),
        _format("llama3_json", _after_thoughts(_read_llama3), _settled_unless("{", _LLAMA_OPEN), True),
        _format("mistral", _after_thoughts(_read_mistral), _settled_before(_MISTRAL_OPEN), True),
        _format("pythonic", _after_thoughts(_read_pythonic), _settled_unless("["), False),
    )
}
