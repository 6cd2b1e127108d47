"""A model's calls are read in the format of its chat template."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tokenizers import AddedToken

from rlite.assembly.quickstart.run import CHATML
from rlite.errors import ConfigError
from rlite.rollout import GenerationHyperparameters, ScriptedEngine, ToolUseWorkflow
from rlite.rollout.openai import AgentWorkflow
from rlite.rollout.tools import response_template
from rlite.rollout.tools.formats import FORMATS, ToolCall, ToolCallFormat
from rlite.rollout.tools.workflow import tool_call_format
from tests.agents import WITH_TOOLS, Speaker, tokenizer_with


def calling(call: str) -> str:
    """ChatML whose answers have calls, written so."""
    calls = f"{{% for call in message.tool_calls or [] %}}{call}{{% endfor %}}"
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}"
    return tools + CHATML.replace("{{ message['content'] }}", "{{ message['content'] }}" + calls)


# The mark is hermes', what stands inside is not: Qwen3-Coder, Qwen3.5.
XML = calling(
    "<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>"
)
LLAMA = calling('{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}')
MISTRAL = calling(
    '[TOOL_CALLS][{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments|tojson }}}]'
)
NAMED = calling("[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}")
FOREIGN = calling("<call {{ call.function.name }}>{{ call.function.arguments | tojson }}</call>")
RESPONSE_TEMPLATE: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"<call (?P<name>\w+)>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one
        b: another
    """
    return a + b


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (XML, "xml"),
        (WITH_TOOLS, "hermes"),
        (LLAMA, "llama3_json"),
        (MISTRAL, "mistral"),
        (NAMED, "mistral"),
        (CHATML, "hermes"),
        (None, "hermes"),
    ],
)
def test_the_format_is_that_in_which_the_template_writes_a_call(template: str | None, name: str) -> None:
    tokenizer = tokenizer_with()
    tokenizer.chat_template = template
    assert tool_call_format(None, tokenizer).name == name
    assert tool_call_format(name, tokenizer) is FORMATS[name]


@pytest.mark.parametrize(("template", "name"), [(XML, "xml"), (LLAMA, "llama3_json"), (MISTRAL, "mistral")])
def test_the_end_of_an_answer_need_not_be_a_special_token(template: str, name: str) -> None:
    for end in ("<end>", "<|end|>"):
        tokenizer = tokenizer_with(template.replace("<|im_end|>", end))
        tokenizer.add_tokens([AddedToken("<|end|>", normalized=False)])
        assert tool_call_format(None, tokenizer).name == name


@pytest.mark.parametrize("name", ["hermes", "xml"])
def test_a_template_that_begins_a_thought_shows_its_calls(name: str) -> None:
    template = XML if name == "xml" else WITH_TOOLS
    opened = template.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert opened != template
    assert tool_call_format(None, tokenizer_with(opened)).name == name


def test_a_call_that_does_not_return_is_an_error_at_the_start() -> None:
    tokenizer = tokenizer_with(FOREIGN)
    with pytest.raises(ConfigError, match=r"of a tool as '<call find_probe_record>.*cannot be read back"):
        tool_call_format(None, tokenizer)
    with pytest.raises(ConfigError, match=r"\(tried: hermes\)"):
        ToolUseWorkflow([add], len, GenerationHyperparameters(), tokenizer_with(XML), tool_format="hermes")
    own = ToolCallFormat("own", lambda text: (text, []), len)
    assert tool_call_format(own, tokenizer) is own
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        tool_call_format("herms", None)
    with pytest.raises(ConfigError, match="tool call format 5: known: hermes"):
        tool_call_format(5, None)  # type: ignore[arg-type]


def test_a_tokenizers_own_response_template_comes_first() -> None:
    tokenizer = tokenizer_with(FOREIGN)
    tokenizer.response_template = RESPONSE_TEMPLATE
    form = tool_call_format(None, tokenizer)
    assert form.name == "response_template"
    text = 'Let me see. <call add>{"a": 1}</call><call now>{}</call>'
    assert form.parse(text) == ("Let me see.", [ToolCall("add", {"a": 1}), ToolCall("now", {})])
    for other in ("No call.", "<call add>{oops}</call>", '<call add>"text"</call>'):
        assert form.parse(other) == (other, [])
    both = "Hm. <call add>{oops}</call><call now>{}</call>"
    expected = ("Hm. <call add>{oops}</call>", [ToolCall("now", {})], ["<call add>{oops}</call>"])
    assert asyncio.run(form.read(both)) == expected
    assert form.parse(both) == expected[:2]
    thought = "<think><call add>{}</call></think>"
    assert form.parse(thought + "<call add>{oops}</call><call now>{}</call>") == (
        thought + "<call add>{oops}</call>",
        [ToolCall("now", {})],
    )
    tokenizer.response_template = {**RESPONSE_TEMPLATE, "fields": {"content": {}}}
    with pytest.raises(ConfigError, match="tried: response_template"):
        tool_call_format(None, tokenizer)


def test_patterns_of_a_response_template_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_template, "PARSE_TIMEOUT", 2.0)
    tokenizer = tokenizer_with(FOREIGN)
    calls = {**RESPONSE_TEMPLATE["fields"]["tool_calls"], "close_pattern": "(x+x+)+y"}
    del calls["close"]
    fields = {**RESPONSE_TEMPLATE["fields"], "tool_calls": calls}
    tokenizer.response_template = {**RESPONSE_TEMPLATE, "fields": fields}
    form = response_template.template_format(tokenizer, "<|im_start|>assistant\n")
    text = "<call add>" + "x" * 5000

    async def read() -> tuple[Any, int]:
        reading, ticks = asyncio.ensure_future(form.read(text)), 0
        while not reading.done():
            await asyncio.sleep(0.05)
            ticks += 1
        return reading.result(), ticks

    found, ticks = asyncio.run(read())
    assert found == (text, [], [])
    assert ticks > 5, "the event loop goes on meanwhile"


def test_a_workflow_reads_calls_in_xml_with_the_types_of_the_schema() -> None:
    tokenizer = tokenizer_with(XML)
    call = "<tool_call><function=add><parameter=a>17</parameter><parameter=b>25</parameter></function></tool_call>"
    answers = [tokenizer(text + "<|im_end|>")["input_ids"] for text in (call, "It is 42.")]

    async def reward(**data: Any) -> float:
        return 1.0

    async def plus(a: int, b: int) -> int:
        return a + b

    properties = {key: {"type": "integer"} for key in "ab"}
    tool = {"schema": {"name": "add", "parameters": {"properties": properties}}, "call": plus}
    workflow = ToolUseWorkflow([tool], reward, GenerationHyperparameters(), tokenizer)
    item = {"messages": [{"role": "user", "content": "17 + 25?"}]}
    batch = asyncio.run(workflow.arun_episode(ScriptedEngine(answers), item))
    assert "<|im_start|>tool\n42<|im_end|>" in tokenizer.decode(batch["input_ids"][0])
    assert batch["num_tool_errors"].tolist() == [0.0]


def test_an_agents_tools_in_a_format_that_cannot_be_read_are_the_runs_error() -> None:
    async def agent(client: Any, data: Any) -> float:
        tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"properties": {}}}}
        messages: Any = [{"role": "user", "content": "?"}]
        await client.chat.completions.create(model="policy", messages=messages)
        await client.chat.completions.create(model="policy", messages=messages, tools=[tool])
        return 1.0

    tokenizer = tokenizer_with(FOREIGN)
    workflow = AgentWorkflow(agent, GenerationHyperparameters(), tokenizer)
    with pytest.raises(ConfigError, match="cannot be read back"):
        asyncio.run(workflow.arun_episode(Speaker(["yes"], tokenizer), {}))
