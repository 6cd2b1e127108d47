"""Tokens after an answer."""

from __future__ import annotations

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.chat.stops import length_at_stop, split_at_stop, tokens_after, without_end
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


@pytest.mark.parametrize(
    ("text", "stops", "before", "rest"),
    [
        ("one two", ["two"], "one ", "two"),
        ("one two", ["wo", "two", "zzz"], "one ", "two"),
        ("one<|im_end|>", ["<|im_end|>"], "one", "<|im_end|>"),
        ("one<|im_end|>", ["im_end"], "one", "im_end|>"),
        ("<|im_start|>é\n<|im_end|>", ["\n<|im_end|>"], "é", "\n<|im_end|>"),
        ("é🙂x", ["x"], "é🙂", "x"),
        ("x", ["x"], "", "x"),
    ],
)
def test_text_ends_before_its_first_stop_string(text: str, stops: list[str], before: str, rest: str) -> None:
    assert split_at_stop(TOKENIZER, ids(text), stops) == (before, rest)
    whole = TOKENIZER.decode(ids(text), skip_special_tokens=True)
    assert split_at_stop(TOKENIZER, ids(text), ["yyy"]) == split_at_stop(TOKENIZER, ids(text), []) == (whole, "")
    assert split_at_stop(TOKENIZER, ids(text + "z"), [], num_end=1) == (whole, "")


@pytest.mark.parametrize("begin", [0, 3])
def test_a_stop_string_is_found_at_the_token_that_completes_it(begin: int) -> None:
    def length(text: str, stops: list[str], start: int = 0) -> int | None:
        tokens = [*ids("two")[:begin], *ids(text)]
        found = length_at_stop(TOKENIZER, tokens, stops, start + begin, begin)
        return None if found is None else found - begin

    assert length("one two three", ["two", "zzz"]) == 7
    assert length("one two three", ["zzz"]) is None
    assert length("one<|im_end|>two", ["<|im_end|>"]) == 4
    assert length("one<|im_end|>two", ["e<|im_end|>t"]) == 5
    assert length("one tw", ["two"], 5) is None
    assert length("one two three", ["two"], 6) == 7
