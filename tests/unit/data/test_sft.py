"""Demonstrations to token rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.readers.columns import normalise
from rlite.data.sft import sft_rows
from rlite.data.source import Source
from rlite.data.tokens import TokenRows
from rlite.errors import ConfigError, DataError
from tests.tiny import tokenizer_with_bos

TOKENIZER = byte_tokenizer()


def learnt(rows: TokenRows, item: int = 0) -> str:
    batch = rows.batch([item])
    return TOKENIZER.decode(batch["input_ids"][batch["loss_mask"]])


def text(rows: TokenRows, item: int = 0) -> str:
    return TOKENIZER.decode(rows.batch([item])["input_ids"][0])


def test_a_raw_response_is_learnt_with_the_end_that_it_is_given() -> None:
    rows = sft_rows([{"prompt": "2+2=", "response": "4"}, {"prompt": "", "response": "éa<|im_end|>"}], TOKENIZER, 64)
    assert (text(rows), learnt(rows)) == ("2+2=4<|im_end|>", "4<|im_end|>")
    assert text(rows, 1) == "éa<|im_end|>"  # it had its end already
    assert rows.batch([1])["loss_mask"].tolist() == [[False, True, True, True]]  # the first of four bytes: unpredicted


def test_a_raw_prompt_begins_as_the_tokenizer_begins_every_text() -> None:
    prompts = ["a", "<|endoftext|>a"]  # a text that has the beginning already gets no second one
    rows = sft_rows([{"prompt": prompt, "response": "b"} for prompt in prompts], tokenizer_with_bos(), 64)
    for number in range(2):
        assert (text(rows, number), learnt(rows, number)) == ("<|endoftext|>ab<|im_end|>", "b<|im_end|>")


def test_every_turn_of_the_assistant_is_learnt() -> None:
    turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = sft_rows([{"messages": [*turn, *turn]}], TOKENIZER, 64)
    whole = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    assert (text(rows), learnt(rows)) == (whole * 2, "a<|im_end|>" * 2)


def test_a_conversation_is_cut_where_max_length_ends_it() -> None:
    turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]
    whole = len(TOKENIZER.apply_chat_template(turn, return_dict=False))
    rows = sft_rows([{"messages": [*turn, *turn]}, {"messages": turn}], TOKENIZER, whole + 3)
    assert learnt(rows) == "answer<|im_end|>"
    assert (rows.tally.num_truncated, rows.tally.dropped) == (1, {})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "row index 1: no 'response'; the row has prompt"),
        ({"prompt": "a", "response": 4}, "row index 1: 'response' is int 4; expected a text"),
        ({"messages": [{"role": "user", "content": "a"}]}, "row index 1: no 'prompt'; the row has messages"),
    ],
)
def test_a_raw_row_of_another_form_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"data.path=x.json, {message}"):
        sft_rows([{"prompt": "a", "response": "b"}, row], TOKENIZER, 64, "data.path=x.json")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "row index 0: 'messages' is a text; expected a list"),
        ([{"role": "user", "content": "a"}], "row index 0: 'messages' has no turn of the assistant"),
        ([{"role": "assistant"}], r"row index 0, messages\[0\]: 'content' is None"),
    ],
)
def test_a_conversation_of_another_form_is_named(messages: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"data.path=x.json, {message}"):
        sft_rows([{"messages": messages}], TOKENIZER, 64, "data.path=x.json")


def test_a_tokenizer_that_knows_no_end_is_refused() -> None:
    made = byte_tokenizer()
    made.eos_token = None
    with pytest.raises(ConfigError, match="no eos_token"):
        sft_rows([{"prompt": "a", "response": "b"}], made, 64)


@pytest.mark.parametrize("where", ["prompt", "response", "content"])
def test_a_text_that_was_cut_inside_a_character_is_named_with_its_row(where: str) -> None:
    cut = "a\ud83d"  # JSON writes a face as two of these
    if where == "content":
        bad, good = ({"messages": [{"role": "assistant", "content": text}]} for text in (cut, "b"))
    else:
        good = {"prompt": "a", "response": "b"}
        bad = {**good, where: cut}
    with pytest.raises(
        DataError, match=rf"x\.json, row index 1.*'{where}' holds a lone surrogate, .*ud83d, at character 1"
    ):
        sft_rows([good, bad], TOKENIZER, 64, "data.path=x.json")


def conversation(*keys: dict[str, Any]) -> list[dict[str, Any]]:
    """Return questions and the answers 0, 1, ..., each answer with further keys."""
    return [
        message
        for number, own in enumerate(keys)
        for message in ({"role": "user", "content": "?"}, {"role": "assistant", "content": str(number), **own})
    ]


@pytest.mark.parametrize("key", ["weight", "train", "loss_mask"])
@pytest.mark.parametrize("no", [0, False, 0.0])
def test_a_message_that_says_so_is_not_learnt(key: str, no: Any) -> None:
    rows = [{"messages": conversation({key: no}, {key: 1}, {key: True}, {key: None}, {})}]
    assert learnt(sft_rows(rows, TOKENIZER, 200)) == "1<|im_end|>2<|im_end|>3<|im_end|>4<|im_end|>"
    completion = [{"messages": conversation({})[:1], "completion": conversation({}, {key: no}, {})[1:]}]
    assert learnt(sft_rows(completion, TOKENIZER, 200)) == "0<|im_end|>2<|im_end|>"


@pytest.mark.parametrize("value", [2, 0.5, "0", "false", -1, [], {}])
def test_a_weight_that_is_neither_0_nor_1_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match=r"row index 0, messages\[3\]: 'weight' is .*; expected 0, 1, true or false"):
        sft_rows([{"messages": conversation({}, {"weight": value})}], TOKENIZER, 200)


def test_weights_of_sharegpt_messages_are_kept() -> None:
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "0", "weight": 0}]
    rows, _ = normalise(
        [{"conversations": [*turns, turns[0], {"from": "gpt", "value": "1"}]}], "demonstrations", Source("x")
    )
    assert learnt(sft_rows(rows, TOKENIZER, 200)) == "1<|im_end|>"


CALL = {"name": "clock", "arguments": {"zone": "UTC"}}


@pytest.mark.parametrize(
    ("value", "call"),
    [
        (CALL, {"function": CALL}),
        ({"name": "clock", "parameters": {"zone": "UTC"}}, {"function": CALL}),
        ({"id": "c1", "type": "function", "function": CALL}, {"id": "c1", "function": CALL}),
        ([CALL | {"id": "c1"}], {"id": "c1", "function": CALL}),
    ],
)
def test_calls_in_sharegpt_values_keep_their_arguments(value: Any, call: dict[str, Any]) -> None:
    turns = [{"from": "human", "value": "?"}, {"from": "function_call", "value": json.dumps(value)}]
    rows, _ = normalise([{"conversations": turns}], "demonstrations", Source("x"))
    assert rows[0]["messages"][1]["tool_calls"] == [{"type": "function", **call}]


def test_other_keys_of_sharegpt_messages_are_kept() -> None:
    answer = {"tool_calls": [{"type": "function", "function": CALL}], "reasoning_content": "hm", "markdown": None}
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "", **answer}]
    turns.append({"from": "tool", "value": "12:00", "tool_call_id": "c1"})
    rows, _ = normalise([{"conversations": turns}], "demonstrations", Source("x"))
    assert [message.keys() - {"role", "content"} for message in rows[0]["messages"]] == [
        *(set(), {"tool_calls", "reasoning_content"}, {"tool_call_id"})
    ]


def test_only_the_last_turn_is_learnt_on_demand() -> None:
    rows = [{"messages": conversation({}, {}, {})}, {"messages": conversation({}, {"weight": 0})}]
    found = sft_rows(rows, TOKENIZER, 200, last_turn_only=True)
    assert [learnt(found, row) for row in range(2)] == ["2<|im_end|>", "0<|im_end|>"]
