"""Tool calls in generated text, format by format."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlite.rollout.tools.formats import FORMATS, THOUGHTS, ToolCall, typed

ADD = ToolCall("add", {"a": 1, "b": [2, {"c": None}]})
SCHEMAS = [{"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}}]
ASK = ToolCall("web.search", {"query": 'what "is" </this>; \\d?'})


def as_text(value):
    return value if isinstance(value, str) else json.dumps(value)


def written(name: str, calls: list[ToolCall]) -> str:
    """Return the text of a model that knows the format."""
    if name == "hermes":
        bodies = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    if name == "xml":
        bodies = [
            "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in call.arguments.items())
            for call in calls
        ]
        return "\n".join(
            f"<tool_call>\n<function={call.name}>\n{body}</function>\n</tool_call>"
            for call, body in zip(calls, bodies, strict=True)
        )
    if name == "llama3_json":
        return "; ".join(json.dumps({"name": call.name, "parameters": call.arguments}) for call in calls)
    if name == "mistral":
        return "[TOOL_CALLS] " + json.dumps([{"name": call.name, "arguments": call.arguments} for call in calls])
    arguments = [", ".join(f"{key}={value!r}" for key, value in call.arguments.items()) for call in calls]
    return "[" + ", ".join(f"{call.name}({text})" for call, text in zip(calls, arguments, strict=True)) + "]"


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_in_their_order_with_their_values(name):
    for calls in ([ADD, ASK], [ADD]):
        content, found = FORMATS[name].parse(written(name, calls))
        assert (content, typed(found, SCHEMAS)) == ("", calls)


@pytest.mark.parametrize("name", ["hermes", "mistral", "xml"])
def test_text_before_the_calls_is_content(name):
    content, calls = FORMATS[name].parse("Let me see.\n\n" + written(name, [ADD]))
    assert (content, typed(calls, SCHEMAS)) == ("Let me see.", [ADD])


def test_a_call_whose_closing_mark_is_missing_counts():
    assert FORMATS["hermes"].parse('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}') == (
        "",
        [ToolCall("add", {"a": 1})],
    )
    assert FORMATS["llama3_json"].parse('<|python_tag|>{"name": "now", "parameters": {}}') == (
        "",
        [ToolCall("now", {})],
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("llama3_json", '{"name": "add", "parameters": {}} and so on'),
        ("llama3_json", "{" * 100_000),
        ("mistral", '[TOOL_CALLS] {"name": "add"}'),
        ("mistral", "[TOOL_CALLS]add"),
        ("mistral", "[TOOL_CALLS]add[ARGS]1"),
        ("xml", "<tool_call><function=add><parameter=a>1</function></tool_call>"),
        ("xml", "<tool_call><function=add>1</function></tool_call>"),
        ("xml", "<tool_call>add</tool_call>"),
        ("mistral", '[{"name": "add", "arguments": {}}]'),
        ("pythonic", "[add(1, 2)]"),
        ("pythonic", "[add(**x)]"),
        ("pythonic", "[add(a=open('x'))]"),
        ("pythonic", "[add(a={1, 2})]"),
        ("pythonic", "[add(a=b'x')]"),
        ("pythonic", "[add(a=" + "9" * 5000 + ")]"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[]"),
    ],
)
def test_a_text_that_is_not_in_the_format_stays_as_it_is(name, text):
    assert FORMATS[name].parse(text) == (text, [])


MALFORMED = {
    "hermes": '<tool_call>{"name": oops}</tool_call>',
    "xml": "<tool_call><function=add>1</function></tool_call>",
    "llama3_json": '{"name": "add", "parameters": {oops}}',
    "mistral": '{"name": "add", "arguments": {oops}}]',
    "pythonic": "add(a=)]",
}
SEPARATORS = {"llama3_json": "; ", "mistral": ", ", "pythonic": ", "}


@pytest.mark.parametrize("name", FORMATS)
def test_a_malformed_call_stays_in_the_text_and_drops_no_other(name):
    malformed, separator = MALFORMED[name], SEPARATORS.get(name, "")
    text = written(name, [ADD, ASK]).removesuffix("]") + separator + malformed
    content, calls, found = asyncio.run(FORMATS[name].read(text))
    assert (typed(calls, SCHEMAS), len(found)) == ([ADD, ASK], 1)
    assert FORMATS[name].parse(text) == (content, calls)
    core = malformed.removesuffix("]")
    assert core in content
    assert core in found[0]


def test_calls_around_a_malformed_one_are_read():
    good = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    bad = '<tool_call>{"name": "a b"}</tool_call>'
    assert FORMATS["hermes"].parse(f"Hm. {good} {bad}\n{good}") == (f"Hm.  {bad}", [ToolCall("now", {})] * 2)
    mention = "I write <tool_call> now: " + good
    assert FORMATS["hermes"].parse(mention) == ("I write <tool_call> now:", [ToolCall("now", {})])
    values = '[TOOL_CALLS] [{"name": 5}, {"name": "now", "arguments": {}}]'
    assert FORMATS["mistral"].parse(values) == ('[TOOL_CALLS]{"name": 5}', [ToolCall("now", {})])
    assert FORMATS["mistral"].parse("[TOOL_CALLS]now[ARGS]{[TOOL_CALLS]now[ARGS]{}") == (
        "[TOOL_CALLS]now[ARGS]{",
        [ToolCall("now", {})],
    )
    assert FORMATS["llama3_json"].parse('{"name": 5}; {"name": "now"}') == ('{"name": 5}', [ToolCall("now", {})])
    assert FORMATS["pythonic"].parse("[now(), add(1), now()]") == ("add(1)", [ToolCall("now", {})] * 2)


def test_a_malformed_call_drops_none_behind_it_and_a_list_may_lack_its_end():
    now = ToolCall("now", {})
    assert FORMATS["pythonic"].parse("[add(a=), now()]") == ("add(a=)", [now])
    assert FORMATS["pythonic"].parse("[now(), now(") == ("now(", [now])
    triple = "[write(text='''it's, (\n'''), now()]"
    assert FORMATS["pythonic"].parse(triple)[1] == [ToolCall("write", {"text": "it's, (\n"}), now]
    oops = '{"name": "add", "arguments": {oops}}'
    listed = f'[TOOL_CALLS] [{oops}, {{"name": "now", "arguments": {{"a": "[TOOL_CALLS]"}}}}'
    assert FORMATS["mistral"].parse(listed) == ("[TOOL_CALLS]" + oops, [ToolCall("now", {"a": "[TOOL_CALLS]"})])
    assert FORMATS["llama3_json"].parse(f'{oops}; {{"name": "now"}}') == (oops, [now])


@pytest.mark.parametrize(
    ("name", "text"),
    [("pythonic", "[3, 5]"), ("pythonic", "[see](the page)"), ("llama3_json", '{"a": 1}'), ("mistral", "[1]")],
)
def test_an_answer_that_only_looks_like_the_format_is_no_malformed_call(name, text):
    assert asyncio.run(FORMATS[name].read(text)) == (text, [], [])


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_arguments_may_be_named_parameters(name):
    text = written(name, [ADD]).replace("arguments", "parameters")
    assert FORMATS[name].parse(text) == ("", [ADD])


@pytest.mark.parametrize("marks", THOUGHTS.items())
@pytest.mark.parametrize("name", FORMATS)
def test_calls_in_thoughts_are_not_read(name, marks):
    opening, closing = marks
    form, call = FORMATS[name], written(name, [ADD])
    for thought in (
        f"{opening}\nI could say {call}",
        f"{opening}{call}{closing}",
        f"{opening}{call} hm{closing} It is 3.",
    ):
        assert form.parse(thought) == (thought, [])
    thought = f"{opening}\n{call}\n{closing}"
    content, calls = form.parse(f"{thought}\n\n{call}")
    assert (content, typed(calls, SCHEMAS)) == (thought, [ADD])
    begun = thought.removeprefix(opening)  # by the prompt
    content, calls, _ = asyncio.run(form.read(f"{begun}\n\n{call}", f"...assistant\n{opening}\n"))
    assert (content, typed(calls, SCHEMAS)) == (begun, [ADD])
    assert asyncio.run(form.read(call, opening)) == (call, [], [])


@pytest.mark.parametrize("name", ["hermes", "xml"])
def test_thoughts_between_calls_hold_none_and_marks_in_arguments_are_text(name):
    call = written(name, [ADD])
    text = f"First. <think>{call}</think>{call}"
    content, calls = FORMATS[name].parse(text)
    assert (content, typed(calls, SCHEMAS)) == (f"First. <think>{call}</think>", [ADD])
    text = written(name, [ToolCall("write", {"text": "<think>a</think>"})]) + call
    assert [one.name for one in FORMATS[name].parse(text)[1]] == ["write", "add"]


LONG = 200_000
HOSTILE = {
    "hermes": ["<tool_call>" + " " * LONG, "<tool_call>" * (LONG // 11), "<think>" * (LONG // 7), "<" * LONG],
    "xml": [
        "<tool_call>" + " " * LONG,
        "<tool_call><function=f>" + " " * LONG + "x</function></tool_call>",
        "<tool_call><function=f>" + "<parameter=a>" * (LONG // 13) + "</function>",
        "<tool_call><function=f><parameter=a>" + "\n" * LONG,
        "<tool_call><function=f>" + "<parameter=a>1</parameter>" * (LONG // 26) + "</function></tool_call>",
    ],
    "llama3_json": ['{"name": "a"};' * (LONG // 14), "{" + " " * LONG, '{"name": "a"}' + " " * LONG, "[" * LONG],
    "mistral": [
        "[TOOL_CALLS]" * (LONG // 12),
        "[TOOL_CALLS][" + '{"name": "a"},' * (LONG // 14),
        "[TOOL_CALLS] [" + " " * LONG,
    ],
    "pythonic": ["[" * LONG, "[f(a=" + "(" * LONG, "[" + "f(a=1)," * (LONG // 7) + "]", "[" + " " * LONG],
}


@pytest.mark.parametrize("name", FORMATS)
def test_hostile_text_of_any_length_takes_linear_time(name):
    for text in HOSTILE[name]:
        started = time.process_time()
        FORMATS[name].parse(text)
        FORMATS[name].num_settled(text)
        assert time.process_time() - started < 20, text[:40]  # quadratic: hours


class LongPrompt(str):
    """A prompt of which only the end may be read: it is asked for at each token of a stream."""

    def rstrip(self, *characters: str) -> str:
        raise AssertionError("the whole prompt was copied")


@pytest.mark.parametrize(("ending", "num_calls"), [("<think>\n\n", 0), ("\n", 1)])
def test_only_the_end_of_a_prompt_is_read_at_each_token(ending, num_calls):
    form, prompt = FORMATS["hermes"], LongPrompt("<think>a</think>" * 100 + ending)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert form.num_settled_after(prompt, f"hello {call[:9]}") == len("hello")
    assert len(asyncio.run(form.read(call, prompt))[1]) == num_calls


pieces = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        '{"name": "f", "arguments": {"x": 1}}',
        '{"name": "f", "parameters": {}}',
        "[f(x=1)]",
        "[",
        "]",
        "{",
        "}",
        ";",
        '"',
        "\\",
        "\n",
        "f(",
        "<think>",
        "</think>",
        "[f(x=1), f(",
        "NaN",
        "é",
        "\x00",
    ]
)


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.lists(pieces | st.text(max_size=5)).map("".join))
def test_any_text_is_calls_or_itself_and_what_was_streamed_stays_said(name, text):
    form = FORMATS[name]
    content, calls = form.parse(text)
    assert calls or content == text
    for call in calls:
        assert json.loads(json.dumps(call.arguments)) == call.arguments
    for end in range(len(text) + 1):
        assert content.startswith(text[: form.num_settled(text[:end])])


arguments = st.dictionaries(
    st.from_regex(r"[a-z]{1,8}_", fullmatch=True),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"xml"}))
@given(values=arguments)
def test_every_json_value_survives(name, values):
    call = ToolCall("lookup", json.loads(json.dumps(values)))
    text = written(name, [call])
    if name == "hermes" and ("<tool_call>" in text[1:] or "</tool_call>" in text[:-12]):
        return
    assert FORMATS[name].parse(text) == ("", [call])


def test_mistrals_newer_calls_name_the_function_before_its_arguments():
    calls = [ToolCall("add", {"a": 1}), ToolCall("now", {})]
    assert FORMATS["mistral"].parse('Hm. [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}') == ("Hm.", calls)
    assert FORMATS["mistral"].parse('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}') == ("", calls[:1])


def test_texts_become_what_the_schema_asks_for_if_they_can():
    kinds = {"i": "integer", "n": "number", "b": "boolean", "o": ["object", "null"], "s": "string", "u": None}
    tools = [{"function": {"name": "f", "parameters": {"properties": {k: {"type": v} for k, v in kinds.items()}}}}]
    values = {"i": " 3 ", "n": "2.5", "b": "True", "o": "None", "s": "3", "u": "3", "x": "3"}
    assert typed([ToolCall("f", values)], tools) == [
        ToolCall("f", {"i": 3, "n": 2.5, "b": True, "o": None, "s": "3", "u": "3", "x": "3"})
    ]
    for wrong in ({"i": "three"}, {"i": "3.5"}, {"i": "True"}, {"n": "false"}, {"b": "1"}, {"o": "[1]"}, {"n": "NaN"}):
        assert typed([ToolCall("f", wrong)], tools) == [ToolCall("f", wrong)]
    assert typed([ToolCall("g", {"i": "3"})], None) == [ToolCall("g", {"i": "3"})]
