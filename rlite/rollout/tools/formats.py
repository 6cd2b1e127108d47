"""Tool calls in generated text: the formats that open models are trained on, as pure functions of the text.

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number      Hermes, Qwen2.5, Qwen3
    llama3_json  {"name": ..., "parameters": {...}}, several with ";" between               Llama 3
    xml          <tool_call><function=NAME><parameter=KEY>text</parameter>...               Qwen3-Coder, Qwen3.5
    mistral      [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...],                     Mistral
                 or [TOOL_CALLS]NAME[ARGS]{...}, any number
    pythonic     [name(argument=literal, ...), ...]                                         Llama 3.2 and 4

Text that is not completely in its format contains no call and stays unchanged.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """Call of a tool that a model asks for."""

    name: str
    arguments: dict[str, Any]
    """JSON values by parameter"""


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

    def text(self, tokenizer: Any, tokens: Sequence[int]) -> str:
        """Return the text of an answer, in which calls are looked for."""
        if self.shows_special_tokens and tokens[-1] in getattr(tokenizer, "all_special_ids", ()):
            tokens = tokens[:-1]  # the end of the turn is not said
        return tokenizer.decode(tokens, skip_special_tokens=not self.shows_special_tokens)


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


def template_format(tokenizer: Any, prompt: str) -> ToolCallFormat:
    """Return the format of a tokenizer's own response template.

    Args:
        tokenizer: with a `response_template`.
        prompt: the end of it is what the chat template opens an answer with.
    """
    field = tokenizer.response_template.get("fields", {}).get("tool_calls", {})
    opened = field.get("open", ())
    marks = (opened,) if isinstance(opened, str) else tuple(opened)
    pattern = re.compile("|".join(map(re.escape, marks)) if marks else field.get("open_pattern", ""), re.DOTALL)

    def read(text: str) -> tuple[str, list[ToolCall]]:
        message = tokenizer.parse_response(text, prefix=prompt)
        calls = [_call(call["function"], "arguments") for call in message.get("tool_calls") or ()]
        found = pattern.search(text)
        return (text[: found.start()] if found else text).rstrip(), calls

    def num_settled(text: str) -> int:
        return len(text[: num_before(text, marks)].rstrip()) if marks else 0

    return ToolCallFormat("response_template", _parser(read), num_settled, shows_special_tokens=True)


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
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MISTRAL_OPEN, _MISTRAL_ID, _MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LLAMA_OPEN = "<|python_tag|>"
_MAX_LENGTH = 1 << 20
"""characters of a text in which calls are looked for"""


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


def _parser(read: Callable[[str], tuple[str, list[ToolCall]]]) -> Callable[[str], tuple[str, list[ToolCall]]]:
    def parse(text: str) -> tuple[str, list[ToolCall]]:
        if len(text) > _MAX_LENGTH:
            return text, []
        try:
            content, calls = read(text)
        # deep nesting and numbers of thousands of digits are a model's doing, too
        except (_NoCall, ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError):
            return text, []
        return (content, calls) if calls else (text, [])

    return parse


def _between_marks(read_call: Callable[[str], ToolCall]) -> Callable[[str], tuple[str, list[ToolCall]]]:
    """Return the function for a format with marks around each call, by what reads the text between them."""

    def read(text: str) -> tuple[str, list[ToolCall]]:
        content, *rest = text.split(_HERMES_OPEN)
        # the last call may end with the turn, where its closing mark was the end token or did not fit
        parts = [part.partition(_HERMES_CLOSE) for part in rest]
        calls = [read_call(body) for body, _, _ in parts]
        return "".join([content, *(after for _, _, after in parts)]).rstrip(), calls

    return read


def _read_hermes(body: str) -> ToolCall:
    return _call(_json(body), "arguments")


def _read_xml(body: str) -> ToolCall:
    function = _FUNCTION.fullmatch(body)
    if function is None or _PARAMETER.sub("", function[2]).strip():
        raise _NoCall
    arguments = {match[1].strip(): match[2] for match in _PARAMETER.finditer(function[2])}
    return _call({"name": function[1].strip(), "arguments": arguments}, "arguments")


def _read_llama3(text: str) -> tuple[str, list[ToolCall]]:
    rest, calls = text.strip().removeprefix(_LLAMA_OPEN).strip(), []
    while rest:
        value, end = _DECODER.raw_decode(rest)
        calls.append(_call(value, "parameters", "arguments"))
        rest = rest[end:].strip()
        if rest and not rest.startswith(";"):
            raise _NoCall
        rest = rest.removeprefix(";").strip()
    return "", calls


def _read_mistral(text: str) -> tuple[str, list[ToolCall]]:
    content, mark, rest = text.partition(_MISTRAL_OPEN)
    if not mark:
        raise _NoCall
    if not rest.lstrip().startswith("["):
        return content.rstrip(), [_read_named(part) for part in rest.split(_MISTRAL_OPEN)]
    values = _json(rest)
    if not isinstance(values, list):
        raise _NoCall
    return content.rstrip(), [_call(value, "arguments") for value in values]


def _read_named(text: str) -> ToolCall:
    # NAME[ARGS]{...} or NAME[CALL_ID]ID[ARGS]{...}
    name, mark, arguments = text.partition(_MISTRAL_ARGUMENTS)
    if not mark:
        raise _NoCall
    return _call({"name": name.partition(_MISTRAL_ID)[0].strip(), "arguments": _json(arguments)}, "arguments")


def _read_pythonic(text: str) -> tuple[str, list[ToolCall]]:
    text = text.strip()
    if not text.startswith("["):
        raise _NoCall
    with warnings.catch_warnings():  # of what a model writes, such as "\d"
        warnings.simplefilter("ignore")
        tree = ast.parse(text, mode="eval").body
    if not isinstance(tree, ast.List):
        raise _NoCall
    calls = []
    for node in tree.elts:
        if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
            raise _NoCall
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
        calls.append(_call({"name": ast.unparse(node.func), "arguments": arguments}, "arguments"))
    return "", calls


def _call(value: Any, *keys: str) -> ToolCall:
    # from {"name": ..., KEY: {...}}
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
        begun = text.lstrip()
        is_open = any(begun.startswith(mark) or mark.startswith(begun) for mark in beginnings)
        return 0 if is_open else len(text)

    return num_settled


FORMATS = {
    form.name: form
    for form in (
        ToolCallFormat("hermes", _parser(_between_marks(_read_hermes)), _settled_before(_HERMES_OPEN)),
        ToolCallFormat("xml", _parser(_between_marks(_read_xml)), _settled_before(_HERMES_OPEN)),
        ToolCallFormat("llama3_json", _parser(_read_llama3), _settled_unless("{", _LLAMA_OPEN), True),
        ToolCallFormat("mistral", _parser(_read_mistral), _settled_before(_MISTRAL_OPEN), True),
        ToolCallFormat("pythonic", _parser(_read_pythonic), _settled_unless("["), False),
    )
}
