"""The rows of a run in words."""

from __future__ import annotations

from typing import Any

import pytest

from rlite.data.rows import NO_TEMPLATE, described, read_source
from rlite.data.source import Source


def rows(*given: dict[str, Any], kind: Any = "prompts") -> Any:
    return read_source(Source(path="-", key="data", rows=given), kind)


@pytest.mark.parametrize("kind", ["prompts", "demonstrations"])
def test_texts_that_do_not_use_the_models_template_are_named(kind: Any) -> None:
    texts = rows({"prompt": "2+3=", "response": "5"}, kind=kind)
    assert described(texts, True) == f"{texts.form}, {NO_TEMPLATE}"
    assert described(texts, False) == texts.form
    chat = rows({"prompt": [{"role": "user", "content": "2+3="}], "response": "5"}, kind=kind)
    assert described(chat, True) == chat.form


def test_plain_language_modelling_has_no_prompt_that_could_be_a_chat() -> None:
    text = rows({"text": "Once"}, kind="demonstrations")
    assert described(text, True) == text.form == "plain texts (text)"
