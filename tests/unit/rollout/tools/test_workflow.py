from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import cloudpickle
import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import ConfigError, DataError
from rlite.rollout import GenerationHyperparameters, LLMRequest, RewardFunction, ScriptedEngine, Tool, ToolUseWorkflow
from rlite.rollout.tools import toolbox
from rlite.runtime.sandbox.pool import close_shared_pool

TEMPLATE = (  # as Qwen2.5's
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    '<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}<tool_response>{{ message.content }}</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = byte_tokenizer()
TOKENIZER.chat_template = TEMPLATE
END = TOKENIZER.eos_token_id
ITEM = {"messages": [{"role": "user", "content": "2+3, and 4+5?"}], "answer": "5 and 9"}


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


HALF = ids("é")[0]


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one of them
        b: the other
    """
    return a + b


def sleep() -> str:
    """Sleeps for an hour."""
    time.sleep(3600)
    return "rested"


async def doze() -> str:
    """Sleeps for an hour."""
    await asyncio.sleep(3600)
    return "rested"


async def fall() -> str:
    """Raises."""
    raise ValueError("too high")


async def tumble() -> str:
    """Raises several, with a note."""
    error = ExceptionGroup("too steep", [ValueError("left"), ValueError("right")])
    error.add_note("look at the map")
    raise error


async def flood() -> str:
    """Says much."""
    return "x" * 20000


@pytest.fixture(autouse=True, scope="module")
def _this_module_travels_by_value() -> Iterator[None]:
    """Processes that run its tools do not import it; and no process is left."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    close_shared_pool()


seen: dict[str, Any] = {}


def is_right(completions: str, answer: str, **data: Any) -> float:
    seen.update(data, completions=completions)
    return float(completions == answer)


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def run(answers: Any, tools: Any = (add,), item: Any = None, **options: Any) -> Any:
    gconfig = GenerationHyperparameters(max_new_tokens=options.pop("max_new_tokens", 512))
    reward = RewardFunction(is_right, in_process=True)
    workflow = ToolUseWorkflow(tools, reward, gconfig, options.pop("tokenizer", TOKENIZER), **options)
    return asyncio.run(workflow.arun_episode(ScriptedEngine(answers), dict(item or ITEM)))


def test_calls_are_made_and_their_results_appended_token_by_token() -> None:
    both = call("add", '{"a": 2,  "b": 3}') + call("add", '{"b":5,"a":4}')
    answers = [[*ids("hm"), HALF, *ids(both), END], [*ids("5 and 9"), END]]
    requests: list[LLMRequest] = []

    def answer(request: LLMRequest) -> list[int]:
        requests.append(request)
        return answers[len(requests) - 1]

    row = run(answer)
    tools = [Tool.of(add).schema]
    prompt = TOKENIZER.apply_chat_template(ITEM["messages"], tools=tools, add_generation_prompt=True, return_dict=False)
    results = ids(
        "\n<|im_start|>user<tool_response>5</tool_response><tool_response>9</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    parts = [prompt, answers[0], results, answers[1]]
    assert row["input_ids"].tolist() == [[*chain(*parts)]], "the model's own spaces, half characters and all"
    assert row["loss_mask"].int().tolist() == [[index % 2 for index, part in enumerate(parts) for _ in part]]
    assert requests[1].input_ids == [*chain(*parts[:3])]
    assert (row["rewards"].item(), row["num_turns"].item(), row["turn_limited"].item()) == (1.0, 2, 0)
    assert (row["num_tool_calls"].item(), row["num_tool_errors"].item()) == (2.0, 0.0)
    assert [message["role"] for message in seen["conversation"]] == ["user", "assistant", "tool", "tool", "assistant"]
    assert seen["conversation"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}


def test_the_tokens_that_an_episode_begins_with_are_known_before_and_show_the_tools() -> None:
    workflow = ToolUseWorkflow([add], is_right, GenerationHyperparameters(), TOKENIZER)
    row = run([ids("5")])
    assert workflow.opening(ITEM) == row["input_ids"][~row["loss_mask"]].tolist()
    assert "add" in TOKENIZER.decode(workflow.opening(ITEM))


def test_failed_calls_return_error_results_to_the_model() -> None:
    calls = [call("sub"), call("add", '{"a": 1}'), call("add", '{"a": 1, "b": "x"}'), call("sleep"), call("doze")]
    calls += [call("fall"), call("tumble")]
    row = run([ids("".join(calls)), ids("ok")], tools=[add, sleep, doze, fall, tumble], tool_timeout=1.5)
    text = TOKENIZER.decode(row["input_ids"][0])
    for result in (
        "Error: there is no tool sub; there are: add, sleep, doze, fall, tumble",
        "Error: TypeError: add() missing 1 required positional argument: 'b'",
        "Error: TypeError: unsupported operand type(s) for +: 'int' and 'str'",
        "Error: sleep took too long",
        "Error: doze took too long",
        "Error: ValueError: too high",
        "Error: ExceptionGroup: too steep (2 sub-exceptions)",
    ):
        assert f"<tool_response>{result}</tool_response>" in text
    assert (row["num_tool_calls"].item(), row["num_tool_errors"].item()) == (7.0, 7.0)


def test_max_turns_ends_an_episode_with_its_calls_unanswered() -> None:
    row = run([ids(call("flood"))], tools=[flood], max_turns=2)
    assert (row["num_turns"].item(), row["turn_limited"].item()) == (2, 1)
    assert row["num_tool_calls"].item() == 1
    assert "x ... (11808 characters left out)</tool_response>" in TOKENIZER.decode(row["input_ids"][0])
    assert row["loss_mask"][0, -1]


def test_a_result_that_leaves_no_room_ends_an_episode() -> None:
    row = run([ids(call("flood"))], tools=[flood], max_length=2000)
    assert row["truncated"].tolist() == [True]
    assert row["loss_mask"][0, -1]
    assert [message["role"] for message in seen["conversation"]] == ["user", "assistant", "tool"]


def test_calls_that_the_template_reformats_begin_another_sequence() -> None:
    same = call("add", '{"a": 2, "b": 3}')
    assert run([[*ids(same), END], ids("x")], history="template")["input_ids"].shape[0] == 1
    rows = run([[*ids(same.replace(" ", "")), END], ids("x")], history="template")
    assert rows["sequence_index"].tolist() == [0, 1]
    assert same in TOKENIZER.decode(rows["input_ids"][1])


def test_tools_are_given_as_functions_or_schemas_and_refused_by_name() -> None:
    schema = {"name": "echo", "description": "Says it.", "parameters": {"type": "object", "properties": {}}}
    assert Tool.of({"schema": schema, "call": doze}).name == "echo"
    with pytest.raises(ConfigError, match="the tool '<lambda>' has no schema"):
        Tool.of(lambda x: x)
    for tool in (3, {"schema": schema}, {"schema": {"type": "function", "function": {}}, "call": doze}):
        with pytest.raises(ConfigError, match="a tool"):
            Tool.of(tool)
    with pytest.raises(ConfigError, match="add more than once"):
        run([ids("x")], tools=[add, add])
    with pytest.raises(ConfigError, match="tool call format 'hermse': did you mean 'hermes'"):
        run([ids("x")], tool_format="hermse")


def test_an_item_or_a_template_that_cannot_show_tools_is_refused() -> None:
    with pytest.raises(DataError, match="expected an item with messages, found a raw prompt"):
        run([ids("x")], item={"prompt": "2+3=", "answer": "5"})
    with pytest.raises(ConfigError, match="does not show the tools add"):
        run([ids("x")], tokenizer=byte_tokenizer())
    deaf = byte_tokenizer()
    deaf.chat_template = TEMPLATE.replace("<tool_response>{{ message.content }}</tool_response>", "")
    with pytest.raises(ConfigError, match="leaves out messages of the role 'tool'"):
        run([ids(call("add", '{"a": 1, "b": 1}'))], tokenizer=deaf)


MALFORMED = '<tool_call>{"name": "add", "arguments": {"a": 1, oops}}</tool_call>'


@pytest.mark.parametrize("history", ["tokens", "template"])
def test_the_model_is_told_of_a_malformed_call_and_the_others_are_made(history: Any) -> None:
    good = call("add", '{"a": 2, "b": 3}')
    row = run([[*ids(MALFORMED + good), END], [*ids("5 and 9"), END]], history=history)
    text = TOKENIZER.decode(row["input_ids"][-1])
    assert "<tool_response>5</tool_response>" in text
    assert f"was not made: {MALFORMED}</tool_response>" in text
    assert (row["num_tool_calls"][0].item(), row["num_tool_errors"][0].item()) == (2.0, 1.0)
    assert row["rewards"][0].item() == 1.0


def test_a_malformed_call_alone_is_answered_too() -> None:
    row = run([[*ids(MALFORMED), END], [*ids("5 and 9"), END]])
    text = TOKENIZER.decode(row["input_ids"][0])
    assert f"<|im_start|>user\nError: this is no hermes call of a tool, and was not made: {MALFORMED}<|im_end|>" in text
    assert row["num_turns"].item() == 2


@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_a_call_in_a_thought_is_not_made(opening: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("assistant\n{% endif %}", f"assistant\n{opening}{{% endif %}}")
    thought = f"{'' if opening else '<think>'}I could {call('fall')}.</think>"
    row = run([[*ids(thought), END]], tools=[fall], tokenizer=tokenizer)
    assert (row["num_turns"].item(), row["num_tool_calls"].item()) == (1, 0.0)
    row = run([[*ids(thought + call("fall")), END], [*ids("x"), END]], tools=[fall], tokenizer=tokenizer)
    assert (row["num_turns"].item(), row["num_tool_calls"].item()) == (2, 1.0)


def test_processes_of_tools_load_no_transformers() -> None:
    program = "import sys, rlite.rollout.tools.results; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert toolbox.result_text.__module__ == "rlite.rollout.tools.results"
