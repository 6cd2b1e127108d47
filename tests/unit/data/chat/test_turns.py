"""Tokens after an answer."""

from __future__ import annotations

import pytest

from rlite.data.chat.turns import tokens_after, without_end
from rlite.quickstart.tiny import byte_tokenizer
from rlite.types import StopReason

TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


@pytest.mark.parametrize(
    ("output", "stop_reason", "expected", "has_same_end"),
    [
        ("yes<|im_end|>", "stop", "\n", True),
        ("yes", "length", "<|im_end|>\n", True),
        ("yes<|im_end|>", "length", "<|im_end|>\n", True),
        ("yes", "stop", "<|im_end|>\n", True),  # a stop string
        ("yes<|endoftext|>", "stop", "<|im_end|>\n", False),
    ],
)
def test_an_end_token_that_the_model_has_written_is_not_read_again(
    output: str, stop_reason: StopReason, expected: str, has_same_end: bool
) -> None:
    assert tokens_after(TOKENIZER, "<|im_end|>\n", ids(output), stop_reason) == (ids(expected), has_same_end)


def test_an_answer_without_its_end_has_neither_special_tokens_nor_white_space_there() -> None:
    assert without_end(TOKENIZER, ids("<|im_start|> yes <|im_end|>\n")) == ids("<|im_start|> yes")
    assert without_end(TOKENIZER, ids("<|im_end|>\n")) == []
