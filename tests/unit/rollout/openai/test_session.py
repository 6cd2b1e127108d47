"""A session in memory: tokens in, tokens out, with any template and any agent."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from rlite.errors import ConfigError, DataError
from rlite.rollout import GenerationHyperparameters, RolloutError, check_trajectory
from rlite.rollout.openai import AgentClient, AgentSession
from rlite.services.endpoint.dialects.openai import error_body
from rlite.services.endpoint.recording import Recording, Turn, export
from rlite.services.endpoint.requests import ApiError
from rlite.services.endpoint.text_stream import TextStream
from rlite.types import LLMRequest
from tests.agents import ADD, FORGETTING, WITH_TOOLS, Speaker, tokenizer_with


def ask(session: AgentSession, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """The one response to a chat."""

    async def answer() -> dict[str, Any]:
        [message] = [part async for part in session.chat({"model": "policy", "messages": messages, **options}).messages]
        return message

    return asyncio.run(answer())


def say(session: AgentSession, messages: list[dict[str, Any]], text: str, **options: Any) -> list[dict[str, Any]]:
    """The conversation with a question and its answer."""
    asked = [*messages, {"role": "user", "content": text}]
    return [*asked, ask(session, asked, **options)["choices"][0]["message"]]


def trained(batch: Any, row: int = 0) -> list[int]:
    return batch["input_ids"][row][batch["loss_mask"][row]].tolist()


def tokens(batch: Any, row: int = 0) -> list[int]:
    return batch["input_ids"][row][batch["attention_mask"][row]].tolist()


def test_turns_of_a_conversation_are_one_sequence_of_the_tokens_that_the_engine_saw_and_made() -> None:
    tokenizer = tokenizer_with()
    engine = Speaker(["one", " two<|im_start|>", "  three\n\n"], tokenizer, version=7)
    session = AgentSession(engine, tokenizer)
    chat: list[dict[str, Any]] = []
    for question in ("a", "b", "c"):
        chat = say(session, chat, question)
    for earlier, later in zip(engine.asked, engine.asked[1:], strict=False):
        assert later[0][: len(earlier[0] + earlier[1])] == earlier[0] + earlier[1]
    session.set_last_reward(1)
    batch = session.export("concat")
    check_trajectory(batch)
    assert batch.batch_size == (1,)
    assert tokens(batch) == engine.sequences[2]
    assert trained(batch) == [token for _, output in engine.asked for token in output]
    assert batch["versions"][batch["loss_mask"]].unique().tolist() == [7]
    assert batch["versions"][~batch["loss_mask"]].unique().tolist() == [-1]
    assert batch["rewards"].tolist() == [1.0]
    assert batch["num_turns"].tolist() == [3]


def test_new_messages_are_rendered_by_the_template() -> None:
    tokenizer = tokenizer_with()
    engine = Speaker(["yes"], tokenizer)
    session = AgentSession(engine, tokenizer)
    chat = say(session, [{"role": "system", "content": "Be brief."}], "a")
    chat = say(session, chat, "b")
    expected = tokenizer.apply_chat_template(chat[:-1], tokenize=True, add_generation_prompt=True, return_dict=False)
    assert engine.asked[1][0] == expected


def test_an_answer_that_was_cut_is_closed_before_the_conversation_goes_on() -> None:
    tokenizer = tokenizer_with()
    engine = Speaker(["a long answer"], tokenizer)
    session = AgentSession(engine, tokenizer)
    chat = say(session, [], "a", max_tokens=3)
    say(session, chat, "b")
    prompt, output = engine.asked[0]
    assert tokenizer.decode(engine.asked[1][0][len(prompt + output) :]).startswith("<|im_end|>\n<|im_start|>user\nb")


def test_a_stop_string_is_not_said_and_its_tokens_are_kept() -> None:
    tokenizer = tokenizer_with()
    engine = Speaker(["thought\nEnd"], tokenizer)
    session = AgentSession(engine, tokenizer)
    chat = say(session, [], "a", stop=["\nEnd"])
    assert chat[-1]["content"] == "thought"
    say(session, chat, "b")
    assert engine.asked[1][0][: len(engine.sequences[0])] == engine.sequences[0]


def test_calls_and_results_stay_in_one_sequence_with_any_white_space() -> None:
    tokenizer = tokenizer_with(WITH_TOOLS)
    call = 'Let me see.\n\n\n<tool_call>{"arguments":  {"b": 2, "a":1}, "name": "add"}</tool_call>'
    engine = Speaker([call, "It is 3."], tokenizer)
    session = AgentSession(engine, tokenizer)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+2?"}]
    first = ask(session, messages, tools=[ADD])["choices"][0]
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["content"] == "Let me see."
    [asked] = first["message"]["tool_calls"]
    assert (asked["function"]["name"], json.loads(asked["function"]["arguments"])) == ("add", {"a": 1, "b": 2})
    messages += [first["message"], {"role": "tool", "tool_call_id": asked["id"], "content": "3"}]
    second = ask(session, messages, tools=[ADD])["choices"][0]
    assert (second["finish_reason"], second["message"]["content"]) == ("stop", "It is 3.")
    assert "tool_calls" not in second["message"]
    session.set_last_reward(1)
    batch = session.export()
    assert tokens(batch) == engine.sequences[1]
    assert trained(batch) == engine.asked[0][1] + engine.asked[1][1]


def test_without_tools_a_call_is_text() -> None:
    tokenizer = tokenizer_with(WITH_TOOLS)
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    for options in ({}, {"tools": [ADD], "tool_choice": "none"}):
        choice = ask(AgentSession(Speaker([text], tokenizer), tokenizer), [{"role": "user", "content": "?"}], **options)
        assert choice["choices"][0]["message"]["content"] == text


def test_a_template_that_forgets_thoughts_begins_a_new_sequence() -> None:
    tokenizer = tokenizer_with(FORGETTING)
    engine = Speaker(["<think>hm</think>one", "two", "three"], tokenizer)
    session = AgentSession(engine, tokenizer)
    chat = say(session, say(session, [], "a"), "b")
    assert "think" not in tokenizer.decode(engine.asked[1][0])
    say(session, chat, "c")  # nothing was dropped this time
    session.set_last_reward(1)
    batch = session.export("concat")
    assert [trained(batch, row) for row in (0, 1)] == [engine.asked[0][1], engine.asked[1][1] + engine.asked[2][1]]
    assert [tokens(batch, row) for row in (0, 1)] == [engine.sequences[0], engine.sequences[2]]
    assert batch["sequence_index"].tolist() == [0, 1]
    assert batch["rewards"].tolist() == [1.0, 1.0]
    assert batch["token_rewards"].sum().item() == 1.0


def test_a_template_that_never_shows_thoughts_continues_nothing() -> None:
    always = FORGETTING.replace("and ns.count < ns.last", "")
    tokenizer = tokenizer_with(always)
    session = AgentSession(Speaker(["<think>hm</think>one"], tokenizer), tokenizer)
    say(session, say(session, [], "a"), "b")
    assert [turn.parent for turn in session.recording.turns] == [None, None]


def test_history_that_the_agent_edits_is_not_continued() -> None:
    tokenizer = tokenizer_with()
    session = AgentSession(Speaker(["one"], tokenizer), tokenizer)
    chat = say(session, [], "a")
    say(session, [chat[0], {"role": "assistant", "content": "another"}], "b")
    say(session, chat, "b", tools=None)
    first, edited, continued = session.recording.turns
    assert (edited.parent, continued.parent) == (None, first)


def test_white_space_that_an_agent_changes_is_no_edit() -> None:
    tokenizer = tokenizer_with()
    engine = Speaker(["<think>\nhm\n</think>\n\none\n"], tokenizer)
    session = AgentSession(engine, tokenizer)
    chat = say(session, [], "a")
    say(session, [chat[0], {"role": "assistant", "content": "<think>\n\nhm\n\n</think>\none"}], "b")
    assert engine.asked[1][0][: len(engine.sequences[0])] == engine.sequences[0]
    say(session, [chat[0], {"role": "assistant", "content": chat[1]["content"].replace("one", "o n e")}], "b")
    assert session.recording.turns[2].parent is None


def test_branches_share_their_beginning_which_is_trained_on_once() -> None:
    tokenizer = tokenizer_with()
    engine = Speaker(["root", "left", "right", "leaf"], tokenizer)
    session = AgentSession(engine, tokenizer)
    root = say(session, [], "a")
    say(session, root, "l")
    say(session, say(session, root, "r"), "s")
    session.set_last_reward(2)
    session.set_reward(session.recording.turns[1].id, 1)
    batch = session.export()
    outputs = [output for _, output in engine.asked]
    assert trained(batch, 0) == outputs[0] + outputs[1]
    assert trained(batch, 1) == outputs[2] + outputs[3]
    assert tokens(batch, 1)[: len(engine.sequences[0])] == engine.sequences[0]
    assert batch["rewards"].tolist() == [3.0, 3.0]


def test_choices_of_one_request_are_interactions_of_their_own() -> None:
    tokenizer = tokenizer_with()
    session = AgentSession(Speaker(["one", "two"], tokenizer), tokenizer)
    response = ask(session, [{"role": "user", "content": "?"}], n=2, seed=1)
    assert [choice["message"]["content"] for choice in response["choices"]] == ["one", "two"]
    session.set_reward(f"{response['id']}:1", 1)
    assert session.export("individual")["rewards"].tolist() == [0.0, 1.0]
    assert session.export("concat").batch_size == (2,)
    with pytest.raises(DataError, match=f"no interaction has the id '{response['id']}'; the latest are: chatcmpl"):
        session.set_reward(response["id"], 1)


def test_a_turn_is_worth_its_reward_and_its_share_of_later_ones_once() -> None:
    tokenizer = tokenizer_with()
    session = AgentSession(Speaker(["x"], tokenizer), tokenizer)
    chat: list[dict[str, Any]] = []
    for question in "abc":
        chat = say(session, chat, question)
    with pytest.raises(DataError, match="finite number"):
        session.set_last_reward(float("nan"))
    with pytest.raises(ConfigError, match=r"turn_discount=2: expected a number in \[0, 1\]"):
        session.apply_reward_discount(2)
    session.set_last_reward(4)
    session.set_reward(session.recording.turns[0].id, 1)
    session.apply_reward_discount(0.5)
    with pytest.raises(RolloutError, match="discounted before"):
        session.apply_reward_discount(0.5)
    with pytest.raises(RolloutError, match="discounted before"):
        session.set_last_reward(1)
    assert session.export("individual")["rewards"].tolist() == [2.0, 2.0, 4.0]
    batch = session.export("concat")
    assert batch["rewards"].tolist() == [2.0]
    assert batch["token_rewards"][batch["token_rewards"] != 0].tolist() == [1.0, 1.0]
    with pytest.raises(ConfigError, match="style='both'"):
        session.export("both")  # type: ignore[arg-type]


def test_an_agent_that_asked_for_nothing_has_nothing_to_reward_or_to_train_on() -> None:
    session = AgentSession(Speaker([""], tokenizer_with()), tokenizer_with())
    with pytest.raises(RolloutError, match="asked the model for nothing"):
        session.set_last_reward(1)
    with pytest.raises(RolloutError, match="nothing to train on"):
        session.export()


def test_a_client_that_leaves_aborts_its_turn_which_trains_only_when_asked() -> None:
    tokenizer = tokenizer_with()
    engine = Speaker(["abcdefghij"], tokenizer, latency=0.2)
    session = AgentSession(engine, tokenizer)
    body = {"model": "policy", "messages": [{"role": "user", "content": "?"}], "stream": True}

    async def leave() -> None:
        messages = session.chat(body).messages
        async for message in messages:
            if message["choices"][0]["delta"].get("content"):
                break
        await messages.aclose()

    asyncio.run(leave())
    [turn] = session.recording.turns
    assert turn.is_aborted
    assert 0 < len(turn.output_ids) < 11
    with pytest.raises(RolloutError, match="nothing to train on"):
        session.export()
    assert trained(session.export(include_aborted=True)) == turn.output_ids
    ask(session, body["messages"])  # type: ignore[arg-type]
    session.set_last_reward(1)
    assert len(session.export()) == 1


def test_an_answer_without_tokens_has_a_reward_and_no_row() -> None:
    first = Turn(id="1", prompt_ids=[1], output_ids=[2], logprobs=[-1.0], versions=[0], finish_reason="stop")
    empty = Turn(id="2", prompt_ids=[1, 2, 3], output_ids=[], logprobs=[], versions=[], finish_reason="stop")
    empty.parent = first
    recording = Recording([first, empty])
    recording.set_last_reward(0.5)
    batch = export(recording)
    assert batch["input_ids"].tolist() == [[1, 2]]
    assert batch["rewards"].tolist() == [0.5]


def test_a_response_that_was_made_and_never_taken_does_not_count() -> None:
    tokenizer = tokenizer_with()
    session = AgentSession(Speaker(["x"], tokenizer), tokenizer)

    async def drop() -> None:
        messages = session.chat({"model": "policy", "messages": [{"role": "user", "content": "?"}]}).messages
        await anext(messages)
        await messages.aclose()

    asyncio.run(drop())
    assert [turn.is_aborted for turn in session.recording.turns] == [True]


@settings(max_examples=30)
@given(
    text=st.text(min_size=1, max_size=12)
    | st.sampled_from(["Hm <tool_call>", "a\n\n", "é🙂", "<tool_call>{}", "EN END"]),
    has_tools=st.booleans(),
)
def test_streamed_text_equals_the_whole_response(text: str, has_tools: bool) -> None:
    tokenizer = tokenizer_with(WITH_TOOLS)
    options: dict[str, Any] = {"tools": [ADD]} if has_tools else {}
    body = {"model": "policy", "messages": [{"role": "user", "content": "?"}], "stop": "END", **options}
    calls = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' if has_tools else ""

    async def parts(is_stream: bool) -> list[dict[str, Any]]:
        session = AgentSession(Speaker([text + calls], tokenizer), tokenizer)
        return [message async for message in session.chat({**body, "stream": is_stream}).messages]

    [message] = [part["choices"][0]["message"] for part in asyncio.run(parts(False))]
    deltas = [part["choices"][0]["delta"] for part in asyncio.run(parts(True))]
    assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
    called = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["function"] for call in called] == [call["function"] for call in message.get("tool_calls", [])]


def test_raw_texts_are_continued_token_for_token_too() -> None:
    tokenizer = tokenizer_with()
    engine = Speaker(["one"], tokenizer)
    session = AgentSession(engine, tokenizer)

    async def complete(prompt: Any) -> str:
        body = {"model": "policy", "prompt": prompt, "logprobs": 0}
        [response] = [part async for part in session.completion(body).messages]
        assert response["choices"][0]["logprobs"]["token_logprobs"] == [-1.0] * 4
        return response["choices"][0]["text"]

    assert asyncio.run(complete("say: ")) == "one"
    asyncio.run(complete("say: one, more: "))
    asyncio.run(complete([*engine.sequences[1], 5]))
    first, second, third = session.recording.turns
    assert (second.parent, third.parent) == (first, second)
    assert engine.asked[1][0][: len(engine.sequences[0])] == engine.sequences[0]


REFUSED = [
    ({"model": "other"}, 404, "model", "the model 'other' does not exist; there is 'policy'"),
    ({"model": None}, 400, "model", "no model"),
    ({"messages": []}, 400, "messages", "not empty"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", "expected a text"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role", "one of system"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].tool_call_id", "the id of the call"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "messages[0].content[0]",
        "parts of type 'text'",
    ),
    ({"presence_penalty": 0.5}, 400, "presence_penalty", "supported: 0"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", "'type': 'text'"),
    ({"tool_choice": "required", "tools": [ADD]}, 400, "tool_choice", "'auto' or 'none'"),
    ({"top_logprobs": 3, "logprobs": True}, 400, "top_logprobs", "not supported"),
    ({"temprature": 0.5}, 400, "temprature", "'temprature' is not supported"),
    ({"temperature": -1}, 400, "temperature", "temperature=-1"),
    ({"temperature": 1e-320}, 400, "temperature", "in [1e-06, 1e+06]"),
    ({"temperature": 10**400}, 400, "temperature", "in [1e-06, 1e+06]"),
    ({"top_p": 1e-320}, 400, "top_p", "in [1e-06, 1]"),
    ({"stop": ["\ud800"]}, 400, "stop", "non-empty strings"),
    ({"stop": ["x"] * 17}, 400, "stop", "at most 16 texts of at most 256 characters"),
    ({"stop": "x" * 257}, 400, "stop", "at most 16 texts of at most 256 characters"),
    ({"stop_token_ids": ["a"]}, 400, "stop_token_ids", "token ids"),
    ({"stop_token_ids": [1 << 70]}, 400, "stop_token_ids", "token ids"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages", "half of a surrogate pair"),
    ({"temperature": "hot"}, 400, "temperature", "'hot'; expected a number"),
    ({"max_tokens": 1.5}, 400, "max_tokens", "expected an integer"),
    ({"seed": 1 << 63}, 400, "seed", "expected an integer of 64 bits"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_completion_tokens", "which max_tokens says"),
    ({"n": 0}, 400, "n", "from 1 to 128"),
    ({"stream": "yes"}, 400, "stream", "true or false"),
    ({"tools": [ADD]}, 400, "tools", "chat template leaves out 'add'"),
    ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
]


@pytest.mark.parametrize(("change", "status", "param", "message"), REFUSED, ids=[str(case[0])[:40] for case in REFUSED])
def test_unsupported_parameters_are_refused_by_name(change: dict, status: int, param: str, message: str) -> None:
    session = AgentSession(Speaker(["x"], tokenizer_with()), tokenizer_with())
    body = {"model": "policy", "messages": [{"role": "user", "content": "?"}], **change}
    with pytest.raises(ApiError) as refusal:
        session.chat(body)
    assert (refusal.value.status, refusal.value.param) == (status, param)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [5] * 1_000_000},
        {"messages": [{"role": "user", "content": [5] * 1_000_000}]},
        {"messages": [{"role": "user", "content": "?", **{f"x{number}": 1 for number in range(300_000)}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": [5] * 1_000_000}}}]},
        {"tools": [{"type": "function", "function": {"name": ""}}] * 300_000},
        {f"x{number}": 1 for number in range(300_000)},
        {"temperature": [[0.5]] * 1_000_000},
        {"max_tokens": 10**4000, "seed": 10**4000},
        {"top_p": float("nan")},
    ],
)
def test_a_hostile_body_is_refused_at_its_first_error(change: dict[str, Any]) -> None:
    session = AgentSession(Speaker(["x"], tokenizer_with()), tokenizer_with())
    body = {"model": "policy", "messages": [{"role": "user", "content": "?"}], **change}
    started = time.process_time()
    with pytest.raises(ApiError) as refusal:
        session.chat(body)
    assert refusal.value.status == 400
    assert len(str(refusal.value)) < 5000
    assert time.process_time() - started < 30


def test_a_parameter_at_its_value_for_off_is_accepted() -> None:
    session = AgentSession(Speaker(["x"], tokenizer_with()), tokenizer_with())
    off = {"presence_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}, "user": "me", "seed": None}
    assert ask(session, [{"role": "developer", "content": "?"}], **off)["choices"][0]["message"]["content"] == "x"


def test_a_prompt_without_room_for_an_answer_is_too_long() -> None:
    session = AgentSession(Speaker(["abc"], tokenizer_with()), tokenizer_with(), max_length=40)
    with pytest.raises(ApiError, match="leaves no room") as refusal:
        ask(session, [{"role": "user", "content": "x" * 100}])
    assert refusal.value.code == "context_length_exceeded"
    assert ask(session, [{"role": "user", "content": "x"}])["choices"][0]["finish_reason"] == "stop"


def test_sampling_of_a_request_overrides_that_of_the_session() -> None:
    tokenizer = tokenizer_with()
    engine = Speaker(["x"], tokenizer)
    session = AgentSession(engine, tokenizer, GenerationHyperparameters(greedy=True, min_new_tokens=9, top_p=0.9))
    ask(session, [{"role": "user", "content": "?"}])
    ask(
        session, [{"role": "user", "content": "?"}], temperature=0.5, max_completion_tokens=4, stop="a", seed=3, top_k=2
    )
    assert engine.requests[0].gconfig == GenerationHyperparameters(greedy=True, min_new_tokens=9, top_p=0.9)
    assert engine.requests[1].gconfig == GenerationHyperparameters(
        temperature=0.5, top_p=0.9, max_new_tokens=4, min_new_tokens=4, stop=("a",), seed=3, top_k=2
    )
    whole = AgentSession(engine, tokenizer, GenerationHyperparameters(temperature=1, top_p=1))
    ask(whole, [{"role": "user", "content": "?"}], temperature=0.5, top_p=0.9)
    assert engine.requests.pop().gconfig == GenerationHyperparameters(temperature=0.5, top_p=0.9)
    fixed = AgentSession(engine, tokenizer, GenerationHyperparameters(top_p=0.9), is_sampling_fixed=True)
    ask(fixed, [{"role": "user", "content": "?"}], temperature=0, top_p=0.5, max_tokens=4, top_k=2)
    assert engine.requests[2].gconfig == GenerationHyperparameters(top_p=0.9, max_new_tokens=4)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5) | st.just("auto"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("text"), inner, max_size=3)
    ),
    max_leaves=5,
)
VALID: dict[str, Any] = {
    "model": "policy",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ],
    "tools": [ADD],
    "tool_choice": "auto",
    "stop": ["x"],
    "stream_options": {"include_usage": True},
    **dict.fromkeys(("temperature", "top_p", "seed", "max_tokens", "n", "top_k"), 1),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values within a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value, of which the one at `path` is another."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@settings(max_examples=200)
@given(place=st.sampled_from(places(VALID)), new=values)
def test_any_body_is_answered_or_refused(place: tuple[Any, ...], new: Any) -> None:
    tokenizer = tokenizer_with(WITH_TOOLS)
    session = AgentSession(Speaker(["x"], tokenizer), tokenizer)
    body = changed(VALID, place, new)

    async def answer() -> list[dict[str, Any]]:
        return [message async for message in session.chat(body).messages]

    try:
        refusal = None if asyncio.run(answer()) else "no message"
    except ApiError as error:
        refusal = json.dumps(error_body(error))
        assert error.status in (400, 404), refusal  # noqa: PT017  # either of two
    assert refusal is None or "message" in refusal


@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_stream_that_is_closed_after_its_last_chunk_is_delivered(num_choices: int) -> None:
    tokenizer = tokenizer_with()
    session = AgentSession(Speaker(["x", "yes"], tokenizer), tokenizer)
    body = {"model": "policy", "messages": [{"role": "user", "content": "?"}], "stream": True, "n": num_choices}

    async def read(num_ended: int) -> None:
        messages = session.chat(body).messages
        ended = 0
        async for message in messages:
            ended += message["choices"][0]["finish_reason"] is not None
            if ended == num_ended:
                break
        await messages.aclose()

    asyncio.run(read(num_choices))
    assert [turn.is_aborted for turn in session.recording.turns] == [False] * num_choices
    if num_choices == 2:
        asyncio.run(read(1))
        assert [turn.is_aborted for turn in session.recording.turns[2:]] == [True, True]


def test_a_client_in_this_process_may_stop_at_the_last_chunk() -> None:
    tokenizer = tokenizer_with()
    session = AgentSession(Speaker(["x"], tokenizer), tokenizer)

    async def use() -> None:
        async with AgentClient(session) as client:
            chunks = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "?"}], stream=True
            )
            async for chunk in chunks:
                if chunk.choices[0].finish_reason:
                    break
            await chunks.close()

    asyncio.run(use())
    session.set_last_reward(1)
    assert len(session.export()) == 1


class Stopping(Speaker):
    """Ends at the first stop string, as an engine does."""

    def __init__(self, texts: list[str], tokenizer: Any, end: str = "<|im_end|>", **options: Any) -> None:
        super().__init__(texts, tokenizer, **options)
        self._say = self._answer
        self.end = end

        def answer(request: LLMRequest) -> list[int]:
            said = self._say(request)[:-1]  # type: ignore[operator]
            said += tokenizer(self.end, add_special_tokens=False)["input_ids"]
            for length in range(1, len(said) + 1):
                if any(stop in tokenizer.decode(said[:length]) for stop in request.gconfig.stop):
                    said = said[:length]
                    break
            self.asked[-1] = (self.asked[-1][0], said)
            return said

        self._answer = answer


def complete(session: AgentSession, prompt: str, **options: Any) -> str:
    async def answer() -> Any:
        body = {"model": "policy", "prompt": prompt, **options}
        return [part async for part in session.completion(body).messages]

    return "".join(part["choices"][0]["text"] for part in asyncio.run(answer()))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("stop", ["\nObservation:", "\n", "<|im_end|>", "Obs", "<|endoftext|>"])
def test_a_stop_string_is_read_once_by_an_agent_that_continues_its_text(stop: str, is_stream: bool) -> None:
    tokenizer = tokenizer_with()
    engine = Stopping([f"Thought: add{stop}", "42"], tokenizer)
    session = AgentSession(engine, tokenizer)
    prompt = "Question: 1+2?\n"
    text = complete(session, prompt, stop=[stop], stream=is_stream)
    assert text == "Thought: add"
    prompt += text + stop + " 3\n\nAnswer:"
    complete(session, prompt, stop=[stop], stream=is_stream)
    first, second = session.recording.turns
    assert tokenizer.decode(engine.asked[1][0]) == prompt
    assert second.parent is first
    session.set_last_reward(1)
    assert tokenizer.decode(tokens(session.export())) == prompt + "42<|im_end|>"


def test_a_prompt_without_the_stop_string_of_the_answer_is_read_as_it_is() -> None:
    tokenizer = tokenizer_with()
    engine = Stopping(["one\nstop", "two"], tokenizer)
    session = AgentSession(engine, tokenizer)
    assert complete(session, "say: ", stop="\nstop") == "one"
    complete(session, "say: one\nand: ")
    assert tokenizer.decode(engine.asked[1][0]) == "say: one\nand: "
    assert session.recording.turns[1].parent is None


def undeclared(template: str | None = None) -> Any:
    """A tokenizer whose end of turn is no special token."""
    tokenizer = tokenizer_with(template)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.add_tokens([AddedToken("<|end|>", normalized=False)])
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|end|>")
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in tokenizer.all_special_ids
    return tokenizer


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_end_token_that_is_not_special_is_not_said_and_not_doubled(is_stream: bool) -> None:
    tokenizer = undeclared()
    engine = Stopping(["one", "two"], tokenizer, end="<|end|>")
    engine.end_ids = frozenset([tokenizer.convert_tokens_to_ids("<|end|>")])
    session = AgentSession(engine, tokenizer)
    if is_stream:
        assert complete(session, "say: ", stream=True) == "one"
        complete(session, "say: one<|end|>\nsay: ")
        expected = "say: one<|end|>\nsay: two<|end|>"
    else:
        chat = say(session, say(session, [], "a"), "b")
        assert [message["content"] for message in chat] == ["a", "one", "b", "two"]
        expected = tokenizer.apply_chat_template(chat, tokenize=False).removesuffix("\n")
    session.set_last_reward(1)
    assert tokenizer.decode(tokens(session.export())) == expected
    assert len(session.export()) == 1


def test_stop_tokens_of_a_request_are_not_said() -> None:
    tokenizer = tokenizer_with()
    engine = Stopping(["one;"], tokenizer, end="")
    session = AgentSession(engine, tokenizer)
    assert complete(session, "say: ", stop_token_ids=tokenizer(";")["input_ids"]) == "one"


def test_a_call_in_a_thought_that_the_prompt_begins_is_text() -> None:
    opened = WITH_TOOLS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    tokenizer = tokenizer_with(opened)
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    for is_stream in (False, True):
        text = f"Shall I {call}?</think>Hm. {call}"
        session = AgentSession(Speaker([text], tokenizer), tokenizer)
        body = {"model": "policy", "messages": [{"role": "user", "content": "?"}], "tools": [ADD], "stream": is_stream}

        async def parts(session: AgentSession = session, body: Any = body) -> list[Any]:
            return [part async for part in session.chat(body).messages]

        choices = [part["choices"][0] for part in asyncio.run(parts())]
        messages = [choice["delta"] if is_stream else choice["message"] for choice in choices]
        assert "".join(message.get("content") or "" for message in messages) == f"Shall I {call}?</think>Hm."
        assert sum(len(message.get("tool_calls", [])) for message in messages) == 1


def test_bytes_that_are_no_characters_are_decoded_once() -> None:
    tokenizer = tokenizer_with()
    part = tokenizer("é🙂")["input_ids"]
    decoded = 0

    class Counting:
        all_special_ids = ()

        def decode(self, tokens: list[int], **options: Any) -> str:
            nonlocal decoded
            decoded += len(tokens)
            return tokenizer.decode(tokens, **options)

    for tokens in (part[:1] * 2000, part[2:5] * 700, [*part[:1], *part, *part[2:4], *part]):
        text, decoded = TextStream(Counting()), 0  # type: ignore[arg-type]
        sent = "".join(text.feed([token]) for token in tokens) + text.feed([], "length")
        assert sent == text.text == tokenizer.decode(tokens)
        assert decoded < 20 * len(tokens)
