from __future__ import annotations

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.chat.template import has_chat_template


def test_a_tokenizer_without_a_chat_template_has_none() -> None:
    tokenizer = byte_tokenizer()
    assert has_chat_template(tokenizer)
    tokenizer.chat_template = None
    assert not has_chat_template(tokenizer)
    assert not has_chat_template(object()), "a tokenizer of the user's own"
