"""Texts of tokens, and the place of each token."""

from __future__ import annotations

import random

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.services.record.recorder import TokenTexts


@pytest.fixture(scope="module")
def texts() -> TokenTexts:
    return TokenTexts(byte_tokenizer())


@pytest.mark.parametrize(
    "text", ["", "4+4=8", "naïve café", "日本語 and 🙂🙃", "<|im_start|>user\nhi<|im_end|>\n", "tab\tand\u202eright"]
)
def test_a_text_comes_back_with_the_place_of_each_token(texts: TokenTexts, text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    found, offsets = texts.decode(ids)
    assert found == text
    assert len(offsets) == len(ids)
    assert offsets == sorted(offsets)
    for place, offset in enumerate(offsets):
        before = tokenizer.decode(ids[:place], skip_special_tokens=False)
        assert before.rstrip("\ufffd").startswith(found[:offset]), "the token begins where the text before it ends"


def test_invalid_utf8_keeps_valid_letters(texts: TokenTexts) -> None:
    tokenizer, numbers = byte_tokenizer(), random.Random(0)
    ids = [numbers.randrange(256) for _ in range(3000)]
    text, offsets = texts.decode(ids)
    assert len(offsets) == 3000
    assert "\ufffd" in text
    readable = [letter for letter in tokenizer.decode(ids) if letter.isascii()]
    assert [letter for letter in text if letter.isascii()] == readable
