"""The rows of a run in words."""

from __future__ import annotations

from typing import Any

import pytest

from rlite.assembly.quickstart.run import CHATML
from rlite.data.rows import NO_TEMPLATE, described, read_source
from rlite.data.source import Source
from tests.agents import tokenizer_with

TOKENIZER = tokenizer_with()


def rows(*given: dict[str, Any], kind: Any = "prompts") -> Any:
    return read_source(Source(path="-", key="data", rows=given), kind)


@pytest.mark.parametrize("kind", ["prompts", "demonstrations"])
def test_texts_that_do_not_use_the_models_template_are_named(kind: Any) -> None:
    texts = rows({"prompt": "2+3=", "response": "5"}, kind=kind)
    assert described(texts, TOKENIZER) == f"{texts.form}; {NO_TEMPLATE}"
    assert described(texts, None) == texts.form
    bare = tokenizer_with()
    bare.chat_template = None
    assert described(texts, bare) == texts.form
    chat = rows({"prompt": [{"role": "user", "content": "2+3="}], "response": "5"}, kind=kind)
    assert described(chat, TOKENIZER) == chat.form


def test_plain_language_modelling_has_no_prompt_that_could_be_a_chat() -> None:
    text = rows({"text": "Once"}, kind="demonstrations")
    assert described(text, TOKENIZER) == text.form == "plain texts (text)"


READING = CHATML.replace("{{ message['content'] }}", "{{ message.thinking }}{{ message['content'] }}")


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("demonstrations", {"messages": [{"role": "user", "content": "q"}, "{}"]}),
        ("demonstrations", {"prompt": "q", "completion": ["{}"]}),
        ("preferences", {"prompt": "q", "chosen": ["{}"], "rejected": "b"}),
        (
            "preferences",
            {"chosen": [{"role": "user", "content": "q"}, "{}"], "rejected": [{"role": "user", "content": "q"}]},
        ),
        ("unpaired", {"prompt": [{"role": "user", "content": "q"}], "completion": "{}", "label": True}),
        ("prompts", {"messages": ["{}", {"role": "user", "content": "q"}]}),
    ],
)  # fmt: skip
def test_keys_of_messages_that_the_template_does_not_read_are_named(kind: Any, row: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": "a"}

    def with_keys(value: Any, message: dict[str, Any]) -> Any:
        if isinstance(value, list):
            return [with_keys(each, message) for each in value]
        return message if value == "{}" else value

    def remark(**keys: Any) -> str:
        made = {name: with_keys(value, {**said, **keys}) for name, value in row.items()}
        if "rejected" in made and isinstance(made["rejected"], list):
            made["rejected"] = [*made["rejected"], said]
        return described(rows(made, {**made}, kind=kind), tokenizer_with(READING))

    assert remark(mood="sad", citations=[]).endswith(
        "; keys of messages that the chat template does not read: citations, mood"
    )
    assert "keys" not in remark(reasoning_content="hm", tool_call_id="1", weight=1)
    assert "keys" not in remark()
    unread = {name: with_keys(value, {**said, "reasoning_content": "hm"}) for name, value in row.items()}
    if isinstance(unread.get("rejected"), list):
        unread["rejected"] = [*unread["rejected"], said]
    assert described(rows(unread, kind=kind), TOKENIZER).endswith(" does not read: reasoning_content")


def test_columns_that_are_not_read_are_named() -> None:
    pairs = rows({"prompt": "q", "chosen": "a", "rejected": "b", "system": "s", "id": 4}, kind="preferences")
    assert pairs.form == "raw preferences (prompt, chosen, rejected); columns not read: id, system"
    prompts = rows({"prompt": "q", "id": 4}, kind="prompts")
    assert prompts.form == "raw prompts (prompt)"


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("demonstrations", {"prompt": "q", "response": "a"}),
        ("demonstrations", {"text": "a"}),
        ("preferences", {"prompt": "q", "chosen": "a", "rejected": "b"}),
        ("unpaired", {"prompt": "q", "completion": "a", "label": True}),
    ],
)
def test_empty_texts_are_said(kind: Any, row: dict[str, Any]) -> None:
    for name in row.keys() - {"label"}:
        table = rows(row, {**row, name: ""}, kind=kind)
        assert f"{table.form}; some rows have an empty {name!r}" in described(table, None)
