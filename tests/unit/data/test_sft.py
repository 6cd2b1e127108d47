"""Demonstrations to token rows."""

from __future__ import annotations

from typing import Any

import pytest

from rlite.data.sft import sft_rows
from rlite.data.tokens import TokenRows
from rlite.errors import ConfigError, DataError
from rlite.quickstart.tiny import byte_tokenizer
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
