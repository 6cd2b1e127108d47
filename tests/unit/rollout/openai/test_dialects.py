"""Dialects: blocks of answers, tokens in and out, what each reads of recorded requests, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlite.rollout.openai import AgentSession
from rlite.rollout.tools.formats import THOUGHTS
from rlite.services.endpoint.dialects.blocks import Block, Blocks, marked
from rlite.services.endpoint.dialects.generate import version_spans
from rlite.services.endpoint.dialects.table import DIALECTS
from rlite.services.endpoint.requests import ApiError
from tests.agents import ADD, WITH_TOOLS, Speaker, tokenizer_with

TOKENIZER = tokenizer_with(WITH_TOOLS)
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
GENERATE = "/inference/v1/generate"
RECORDED = sorted((Path(__file__).parents[3] / "data" / "clients").glob("*.json"))


def ask(session: AgentSession, path: str, **body: Any) -> list[Any]:
    async def answers() -> list[Any]:
        return [message async for message in session.reply(DIALECTS[path], {"model": "policy", **body}).messages]

    return asyncio.run(answers())


# -- blocks ------------------------------------------------------------------------------------------------------------

pieces = st.lists(st.sampled_from([*THOUGHTS, *THOUGHTS.values(), " ", "\n", "a", "<", "</think", "b c"]), max_size=8)


@settings(max_examples=300)
@given(pieces=pieces, begun=st.sampled_from(["", "<think>\n"]), size=st.integers(1, 7))
def test_blocks_are_the_same_however_the_text_arrives_and_lose_no_character(
    pieces: list[str], begun: str, size: int
) -> None:
    text = "".join(pieces)
    whole, parts = Blocks(begun), Blocks(begun)
    list(whole.feed(text, is_last=True))
    told: dict[Block, str] = {}
    for start in range(0, len(text), size):
        for event in parts.feed(text[start : start + size]):
            told[event.block] = told.get(event.block, "") + event.text
    for event in parts.feed("", is_last=True):
        told[event.block] = told.get(event.block, "") + event.text
    assert [vars(block) for block in parts.blocks] == [vars(block) for block in whole.blocks]
    assert [told[block] for block in parts.blocks] == [block.text for block in parts.blocks]
    again = [marked(block.text, block.marks) if block.kind == "thought" else block.text for block in whole.blocks]
    assert "".join(again) == text


@pytest.mark.parametrize(
    ("begun", "text", "blocks"),
    [
        ("", "just text", [("text", "just text")]),
        ("", "<think>\na\n</think>\n\nb", [("thought", "a"), ("text", "b")]),
        ("<think>\n", "a\n</think>\n\nb", [("thought", "a"), ("text", "b")]),
        ("", "<think>cut of", [("thought", "cut of")]),
        ("", "a <think> later is text", [("text", "a <think> later is text")]),
        ("", "[THINK]a[/THINK]b", [("thought", "a"), ("text", "b")]),
        ("", "", []),
    ],
)
def test_a_thought_at_the_beginning_is_a_block(begun: str, text: str, blocks: list[tuple[str, str]]) -> None:
    found = Blocks(begun)
    list(found.feed(text, is_last=True))
    assert [(block.kind, block.text) for block in found.blocks] == blocks


def test_a_signature_of_another_model_gives_the_usual_marks() -> None:
    for marks in (None, "EqQBCkYIBBgCKkA", '{"a": 1}', "[1, 2, 3]", "[]"):
        assert marked("a", marks) == "<think>\na\n</think>\n\n"


# -- tokens in, tokens out ---------------------------------------------------------------------------------------------


def test_tokens_come_out_as_they_were_sampled_with_their_logprobs_and_versions() -> None:
    engine = Speaker(["abc"], TOKENIZER, version=3)
    session = AgentSession(engine, TOKENIZER)
    sampling = {"max_tokens": 9, "temperature": 1.0, "logprobs": 1, "skip_special_tokens": False, "n": 2}
    [whole] = ask(session, GENERATE, token_ids=[70, 71], sampling_params=sampling, request_id="mine")
    ids = TOKENIZER("abc")["input_ids"] + [TOKENIZER.eos_token_id]
    assert (whole["request_id"], whole["prompt_token_ids"]) == ("mine", [70, 71])
    for choice in whole["choices"]:
        assert choice["token_ids"] == ids
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in ids]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-1.0] * len(ids)
        assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": len(ids)}]
        assert choice["finish_reason"] == "stop"
    assert [turn.output_ids for turn in session.recording.turns] == [ids, ids]


def test_a_stream_of_tokens_has_the_tokens_of_the_whole_answer() -> None:
    body = {"token_ids": [70, 71], "sampling_params": {"logprobs": 0}, "stream_options": {"include_usage": True}}
    [whole] = ask(AgentSession(Speaker(["abc"], TOKENIZER), TOKENIZER), GENERATE, **body)
    *parts, usage = ask(AgentSession(Speaker(["abc"], TOKENIZER), TOKENIZER), GENERATE, **body, stream=True)
    choices = [part["choices"][0] for part in parts]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert content == whole["choices"][0]["logprobs"]["content"]
    assert [part.get("prompt_token_ids") for part in parts] == [[70, 71]] + [None] * (len(parts) - 1)
    assert usage["usage"] == whole["usage"]
    assert choices[-1]["weight_versions"] == whole["choices"][0]["weight_versions"]


@given(versions=st.lists(st.integers(0, 3)))
def test_spans_of_versions_are_the_versions(versions: list[int]) -> None:
    spans = version_spans(versions)
    assert [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])] == versions
    assert len(spans) <= len(versions)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_token_ids_of_a_chat_are_returned_on_request(path: str, is_stream: bool) -> None:
    session = AgentSession(Speaker(["abc"], TOKENIZER), TOKENIZER)
    asked = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    parts = ask(session, path, **asked, return_token_ids=True, stream=is_stream)
    [turn] = session.recording.turns
    assert [token for part in parts for token in part["choices"][0]["token_ids"]] == turn.output_ids
    place = parts[0] if "chat" in path or is_stream else parts[0]["choices"][0]
    assert place["prompt_token_ids"] == turn.prompt_ids
    assert "prompt_token_ids" not in str(ask(session, path, **asked, stream=is_stream))


def test_thoughts_in_a_field_of_their_own_reach_the_template() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}|{{ m.content }}\n{% endfor %}"
    engine = Speaker(["x"], tokenizer_with(template))
    said = {"role": "assistant", "content": "5", "reasoning_content": "2+3"}
    history = [{"role": "user", "content": "a"}, said, {"role": "user", "content": "b"}]
    ask(AgentSession(engine, tokenizer_with(template)), "/v1/chat/completions", messages=history)
    assert "assistant:2+3|5\n" in TOKENIZER.decode(engine.asked[0][0])


# -- what is read ------------------------------------------------------------------------------------------------------


def test_sampling_parameters_have_the_names_of_each_dialect() -> None:
    engine = Speaker(["x"], TOKENIZER)
    session = AgentSession(engine, TOKENIZER)
    same: dict[str, Any] = {"temperature": 0.5, "top_p": 0.25}
    hello = [{"role": "user", "content": "x"}]
    ask(session, "/v1/chat/completions", messages=hello, max_completion_tokens=7, stop=["."], **same)
    ask(session, MESSAGES, messages=hello, max_tokens=7, stop_sequences=["."], **same)
    ask(session, RESPONSES, input="x", max_output_tokens=7, stop=["."], **same)
    ask(session, GENERATE, token_ids=[1], sampling_params={"max_tokens": 7, "stop": ["."], **same})
    asked = [request.gconfig for request in engine.requests]
    assert len({repr(gconfig) for gconfig in asked}) == 1
    assert (asked[0].max_new_tokens, asked[0].stop, asked[0].temperature, asked[0].top_p) == (7, (".",), 0.5, 0.25)


def test_an_answer_that_ends_at_a_limit_or_a_stop_says_so() -> None:
    session = AgentSession(Speaker(["one. two"], TOKENIZER), TOKENIZER)
    hello = [{"role": "user", "content": "x"}]
    [cut] = ask(session, MESSAGES, messages=hello, max_tokens=2)
    [cut_too] = ask(session, RESPONSES, input="x", max_output_tokens=2)
    assert (cut["stop_reason"], cut_too["status"]) == ("max_tokens", "incomplete")
    assert cut_too["incomplete_details"] == {"reason": "max_output_tokens"}


HELLO = [{"role": "user", "content": "x"}]
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (MESSAGES, {"messages": HELLO, "tool_choice": {"type": "any"}}, "tool_choice.type", "nothing makes the model call"),
    (MESSAGES, {"messages": HELLO, "tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type", "custom"),
    (MESSAGES, {"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "messages", "of the user at the end"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
     "messages[0].content[0].type", "of user"),
    (MESSAGES, {"messages": HELLO, "output_config": {"format": {"type": "x"}}}, "output_config.format", "nothing"),
    (MESSAGES, {"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
    (MESSAGES, {"messages": HELLO, "n": 2}, "n", "one answer"),
    (MESSAGES, {"messages": HELLO, "mcp_servers": [{"url": "x"}]}, "mcp_servers", "not supported"),
    (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "send all of it in `input`"),
    (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.type", "'text'"),
    (RESPONSES, {"input": "x", "background": True}, "background", "False"),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0]", "items of type message"),
    (RESPONSES, {"input": []}, "input", "not empty"),
    (GENERATE, {"token_ids": []}, "token_ids", "not empty"),
    (GENERATE, {"token_ids": [1, "2"]}, "token_ids", "a list of token ids"),
    (GENERATE, {"token_ids": [1], "features": {"a": 1}}, "features", "not supported"),
    (GENERATE, {"token_ids": [1], "temperature": 1}, "temperature", "not supported"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"min_p": 0.1}}, "min_p", "supported: 0"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"logprobs": 5}}, "sampling_params.logprobs", "0 or 1"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "message"), REFUSED, ids=[f"{c[0]} {c[2]}" for c in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_its_name(path: str, body: Any, param: str, message: str) -> None:
    session = AgentSession(Speaker(["x"], TOKENIZER), TOKENIZER)
    with pytest.raises(ApiError) as refusal:
        ask(session, path, **body)
    assert (refusal.value.status, refusal.value.param) == (400, param)
    assert message in refusal.value.told
    assert session.recording.turns == []


VALID: dict[str, dict[str, Any]] = {
    MESSAGES: {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]},
        ],
        "tools": [{"name": "add", "input_schema": ADD["function"]["parameters"]}],
        "tool_choice": {"type": "auto"}, "stop_sequences": ["a"], "max_tokens": 3, "thinking": {"type": "adaptive"},
    },
    RESPONSES: {
        "instructions": "i",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "1", "output": "2"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": ADD["function"]["parameters"]}],
        "text": {"format": {"type": "text"}}, "max_output_tokens": 3, "include": ["reasoning.encrypted_content"],
    },
    GENERATE: {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "logprobs": 1, "stop": ["a"], "min_p": 0}},
}  # fmt: skip
values = st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.text(max_size=3)
values |= st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=3), values, max_size=2)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("path", VALID)
def test_the_valid_body_is_answered(path: str) -> None:
    assert ask(AgentSession(Speaker(["x"], TOKENIZER), TOKENIZER), path, **VALID[path])


@settings(max_examples=200)
@given(data=st.data(), path=st.sampled_from(list(VALID)), new=values)
def test_any_body_is_answered_or_refused(data: st.DataObject, path: str, new: Any) -> None:
    place = data.draw(st.sampled_from(places(VALID[path])[1:]))
    body = changed(VALID[path], place, new)
    try:
        assert ask(AgentSession(Speaker(["x"], TOKENIZER), TOKENIZER), path, **body)
    except ApiError as error:
        assert 400 <= error.status < 500  # noqa: PT017  # either of two


@pytest.mark.parametrize("file", RECORDED, ids=[file.stem for file in RECORDED])
def test_requests_of_real_clients_are_answered(file: Path) -> None:
    session = AgentSession(Speaker(["It is 5."], TOKENIZER), TOKENIZER)
    for request in json.loads(file.read_text("utf-8")):
        session.model = request["body"]["model"]
        assert ask(session, request["path"], **request["body"])
