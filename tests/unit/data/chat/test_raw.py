"""Raw texts: long ones are refused by what a beginning of them costs."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.prompts import CHARACTERS_PER_TOKEN, TooManyTokens, bounded_tokens, raw_prompts, raw_tokens
from tests.tiny import tokenizer_with_bos

TOKENIZER = byte_tokenizer()


class Counting:
    """A tokenizer, and how many characters it was given."""

    bos_token_id = None

    def __init__(self) -> None:
        self.num_characters = 0

    def __call__(self, text: Any, **options: Any) -> Any:
        self.num_characters += sum(map(len, text)) if isinstance(text, list) else len(text)
        return TOKENIZER(text, **options)


def test_cost_of_refusing_a_text_depends_only_on_the_context() -> None:
    tokenizer = Counting()
    started = time.process_time()
    with pytest.raises(TooManyTokens, match="60000000 characters has far more tokens than the 1024 that fit"):
        bounded_tokens(tokenizer, "a" * 60_000_000, 1024)
    assert tokenizer.num_characters <= 2 * CHARACTERS_PER_TOKEN * 1024
    assert time.process_time() - started < 5


@given(text=st.text(max_size=30), times=st.integers(1, 4000), limit=st.integers(1, 2000))
def test_a_text_that_fits_is_never_refused(text: str, times: int, limit: int) -> None:
    text *= times
    tokens = raw_tokens(TOKENIZER, [text])[0]
    try:
        assert bounded_tokens(TOKENIZER, text, limit) == tokens
    except TooManyTokens:
        assert len(tokens) > limit


def test_a_long_text_of_few_tokens_is_not_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["ha" * 50])
    text = "ha" * 50 * 1000
    assert len(text) > CHARACTERS_PER_TOKEN * 1024
    assert len(bounded_tokens(tokenizer, text, 1024)) == 1000


def test_a_bounded_prompt_begins_as_an_unbounded_one() -> None:
    tokenizer = tokenizer_with_bos()
    assert raw_prompts(tokenizer, ["Hi"], 8) == raw_prompts(tokenizer, ["Hi"])
